"""Time candidates of tiles for block attention and KV injection; a candidate that crashes takes only itself along.

    python benchmarks/tune_kernels.py attention [--size 128] [--heads 32] [--groups 8] [--rows 16] [--slots 8192]
    python benchmarks/tune_kernels.py injection [--tokens 8] [--width 4096] [--layers 5]
    python benchmarks/tune_kernels.py injection --finish [--tokens 8]     # its last kernel, behind the table's products
    python benchmarks/tune_kernels.py product [--rows 8] [--width 4096] [--outs 4096 1024 1024] [--gated]
    python benchmarks/tune_kernels.py head [--rows 8] [--width 4096] [--outs 151936]

Candidates run in a process of their own, which tells every time as soon as it is measured. When that process dies or
hangs, the candidate at work is put down as broken and a new process takes the rest. The best ones are printed as lines
for ``specjax/kernels/configs.py``; ``--out FILE`` keeps all.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path

from specjax.kernels import configs
from specjax.kernels.configs import Attention, Head, Injection, Product, Projection


def candidates(args) -> list:
    """What is tried, within what a table could hold."""
    if args.op == "attention":
        wide = args.size > 128
        keys, stages = ((16, 32), (1, 2, 3)) if wide else ((32, 64, 128), (2, 3, 4))
        return [Attention(*values) for values in itertools.product(keys, (4, 8), stages, (1, 2, 3))]
    if args.op == "product":
        tiles = itertools.product((64, 32, 128), (128, 256), (4, 8), (4, 3, 5), (3, 2))
        return [Product(*values) for values in tiles]
    if args.op == "head":
        return [
            Head(*values) for values in itertools.product((32, 64, 128), (64, 128, 256), (4, 8), (3, 4, 5))
        ]
    if args.finish:
        table = configs.INJECTION[configs.kind()]
        pairs = itertools.product((1, 2, 4, 8), (1, 2, 4))
        return [dataclasses.replace(table, tokens=tokens, warps=warps) for tokens, warps in pairs]
    tiles = itertools.product((16, 32, 64, 128), (64, 128, 256), (1, 2, 4, 8), (4,), (4,))
    return [Projection(*values) for values in tiles]


def work(args) -> None:
    """Measure candidates that come in as numbers, one a line; a line of JSON for each."""
    import jax
    from device_time import Clock, short

    make = {"attention": _attention, "injection": _injection, "product": _product, "head": _head}[args.op]
    run, tried = make(args), candidates(args)
    clock = Clock(1 << 12 if args.tiny else 1 << 27)
    print(json.dumps({"ready": str(jax.devices()[0].device_kind)}), flush=True)
    for line in sys.stdin:
        number = int(line)
        if number in args.crash:
            os.abort()  # for the test of the parent
        try:
            timing = clock(run(tried[number]))
            found = {"microseconds": round(timing.median, 2), "method": timing.method}
        except Exception as error:
            found = {"error": short(error)}
        print(json.dumps({"candidate": number} | found), flush=True)


def _attention(args):
    import jax
    import jax.numpy as jnp

    from specjax.kernels import (
        block_attention as entry,
        block_attention_kernel as kernel,
        block_attention_plan as plans,
    )
    from specjax.kernels.block_attention_op import View

    case = entry.Case(
        args.batch, args.rows, args.heads, args.groups, args.size, args.size, args.slots, jnp.dtype(jnp.bfloat16),
        True, False, View(args.size**-0.5, False),
    )  # fmt: skip
    fill = lambda s: jnp.full(s.shape, args.slots if s.dtype == jnp.int32 else 0.5, s.dtype)  # noqa: E731
    arrays, chip = jax.tree.map(fill, entry.shapes(case)), configs.kind()

    def run(tile: Attention):
        rows = configs.attention_rows(chip, case.padded)
        plan = plans.plan(case, tile, rows, configs.CHIPS[chip].processors)
        launch = functools.partial(kernel.launch, plan=plan, interpret=chip == "default")
        return functools.partial(jax.jit(launch).lower(*arrays).compile(), *arrays)

    return run


def _injection(args):
    import jax
    import jax.numpy as jnp

    from specjax.kernels import kv_injection as entry, kv_injection_kernel as kernel
    from specjax.kernels.kv_injection_op import Heads
    from specjax.layers.rope import RopeConfig

    case = entry.Case(
        args.tokens, 1, args.width, args.layers, args.groups, args.size, 1024, jnp.dtype(jnp.bfloat16), True, False,
        False, True, Heads(RopeConfig(args.size, 1e6), 1e-6),
    )  # fmt: skip
    fill = lambda s: jnp.full(s.shape, 1 if s.dtype == jnp.int32 else 0.01, s.dtype)  # noqa: E731
    arrays, chip = list(jax.tree.map(fill, entry.shapes(case))), configs.kind()

    def run(tile: Projection | Injection):
        tiles = tile if isinstance(tile, Injection) else Injection({max(64, args.tokens): tile})
        launch = functools.partial(kernel.launch, case=case, tiles=tiles, interpret=chip == "default")
        program = jax.jit(launch, donate_argnums=2).lower(*arrays).compile()

        def call():
            arrays[2] = program(*arrays)
            return arrays[2]

        return call

    return run


def _product(args):
    import jax
    import jax.numpy as jnp

    from specjax.kernels import skinny as entry, skinny_kernel as kernel

    kind, activation = jnp.dtype(jnp.bfloat16), jax.nn.silu if args.gated else None
    case = kernel.Case(
        args.rows, args.width, tuple(args.outs), kind, kind, args.normed, 1e-6, False, activation
    )
    arrays, chip = (
        jax.tree.map(lambda s: jnp.full(s.shape, 0.01, s.dtype), entry.shapes(case)),
        configs.kind(),
    )

    def run(tile: Product):
        plan = kernel.plan(case, tile, configs.CHIPS[chip].processors)
        launch = functools.partial(kernel.launch, case=case, plan=plan, interpret=chip == "default")
        return functools.partial(jax.jit(launch).lower(*arrays).compile(), *arrays)

    return run


def _head(args):
    import jax
    import jax.numpy as jnp

    from specjax.kernels import head as entry, head_kernel as kernel

    case = kernel.Case(args.rows, args.width, args.outs[0], args.outs[0], jnp.dtype(jnp.bfloat16))
    arrays, chip = (
        jax.tree.map(lambda s: jnp.full(s.shape, 0.01, s.dtype), entry.shapes(case)),
        configs.kind(),
    )

    def run(tile: Head):
        launch = functools.partial(kernel.launch, case=case, tile=tile, interpret=chip == "default")
        return functools.partial(jax.jit(launch).lower(*arrays).compile(), *arrays)

    return run


class Worker:
    """The process that measures; its lines arrive in a queue, None at its end."""

    def __init__(self):
        command = [sys.executable, __file__, *sys.argv[1:], "--worker"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.lines: queue.Queue = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            if line.startswith("{"):
                self.lines.put(json.loads(line))
        self.lines.put(None)

    def ask(self, number: int, seconds: float) -> dict:
        """The result of a candidate; an error if the process ends or takes too long, after which it is gone."""
        try:
            self.process.stdin.write(f"{number}\n")
            self.process.stdin.flush()
        except OSError:
            return self._gone("the process had ended")
        return self.wait(seconds)

    def wait(self, seconds: float) -> dict:
        try:
            found = self.lines.get(timeout=seconds)
        except queue.Empty:
            return self._gone(f"no answer in {seconds:.0f} s")
        return self._gone("the process ended") if found is None else found

    def _gone(self, why: str) -> dict:
        self.process.kill()
        code = self.process.wait()
        return {"gone": True, "error": f"{why} (exit status {code})"}


def tune(args) -> list[dict]:
    """Every candidate's time or error."""
    tried, worker, results = candidates(args)[: args.most], None, []
    for number, tile in enumerate(tried):
        if worker is None:
            worker = Worker()
            ready = worker.wait(args.seconds)
            if "error" in ready:
                raise SystemExit(f"no process can be started: {ready['error']}")
        found = worker.ask(number, args.seconds)
        if found.pop("gone", False):
            worker = None
        results.append({"tile": dataclasses.asdict(tile)} | found)
        print(results[-1], flush=True)
    if worker is not None:
        worker.process.stdin.close()
        worker.process.wait()
    return results


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("op", choices=["attention", "injection", "product", "head"])
    for name, value in {"size": 128, "heads": 32, "groups": 8, "rows": 16, "slots": 8192, "batch": 8, "tokens": 8,
                        "width": 4096, "layers": 5}.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--outs", type=int, nargs="+", default=[4096], help="rows of each weight")
    parser.add_argument("--gated", action="store_true", help="two weights: gate and up")
    parser.add_argument("--normed", action="store_true", help="a norm stands before")
    parser.add_argument(
        "--finish", action="store_true", help="injection: tokens and warps of its last kernel"
    )
    parser.add_argument("--most", type=int, help="candidates to try")
    parser.add_argument("--seconds", type=float, default=60, help="that one may take")
    parser.add_argument("--tiny", action="store_true", help="read little between measurements: for a try")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--crash", type=int, nargs="*", default=[], help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure, print the best, write."""
    args = parse()
    if args.worker:
        return work(args)
    results = tune(args)
    good = sorted((r for r in results if "microseconds" in r), key=lambda r: r["microseconds"])
    names = {"attention": "Attention", "injection": "Projection", "product": "Product", "head": "Head"}
    name = "Injection" if args.finish else names[args.op]
    print(f"{len(good)} of {len(results)} ran; the best:")
    for row in good[:5]:
        values = ", ".join(f"{k}={v}" for k, v in row["tile"].items())
        print(f"  {name}({values}),  # {row['microseconds']} us ({row['method']})")
    if args.out:
        import common

        common.write(args.out, args, results)


if __name__ == "__main__":
    main()
