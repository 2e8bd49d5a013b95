"""Block attention and KV injection beside XLA and cuDNN, on a GPU.

    python benchmarks/kernels.py --out FILE [--only attention|ragged|injection] [--budget 220] [--tiny]

Every size is measured by all contenders in turn, and then by all of them again (A B A B), after reading what fills the
caches; a time is the sum of a call's kernels on the device. The file is written after every size, and a run that finds
its own sizes in the file leaves them out: it can be stopped and started again. Kernels are first compared with float32.
XLA and cuDNN hold the block inside the cached keys, which spares them a little work; cuDNN has its caches in the layout
that it likes. ``reference`` is what runs where no kernel does. ``floor`` is the time to read all cached keys and values
(or all weights) once at 4.3 TB/s, the copy bandwidth of an H200. ``--tiny`` shrinks everything, for a try on a CPU.
"""

import argparse
import functools
import json
import statistics
import time
from pathlib import Path

import common
import jax
import jax.numpy as jnp
import numpy as np
from device_time import Clock, compile_all, short

from specjax.core import platform
from specjax.kernels import (
    block_attention as attention,
    block_attention_kernel,
    configs,
    dispatch,
    kv_injection as injection,
    kv_injection_kernel,
)
from specjax.kernels.block_attention_op import View, attend_block, reference as plain_attention
from specjax.kernels.kv_injection_op import Heads, Projections, inject, reference as plain_injection
from specjax.layers.rope import RopeConfig

BANDWIDTH, FLOPS = 4.3e12, 0.79e15
HEADS, GROUPS, SIZE = 32, 8, 128
#: Cached keys, rows of the batch, rows of the block.
ATTENTION = [
    (2048, 1, 16), (2048, 8, 16), (2048, 8, 8), (2048, 32, 16), (8192, 1, 16), (8192, 8, 16), (8192, 8, 8),
    (8192, 32, 16), (32768, 1, 16), (32768, 8, 16), (32768, 8, 8), (32768, 32, 16),
]  # fmt: skip
RAGGED = (8192, 32, 16)
#: Rows of the batch, positions of the block.
INJECTION = [(1, 1), (1, 8), (8, 8), (1, 1024)]
WIDTH, LAYERS, SLOTS = 4096, 5, 8192
VIEW = View(SIZE**-0.5, False)
ROPE = Heads(RopeConfig(SIZE, 1e6), 1e-6)


def xla_attention(q, keys, values, start, end, block):
    """Einsums over the cache, which holds the block."""
    del start, block
    b, n, h, c = q.shape
    packed = q.reshape(b, n, GROUPS, h // GROUPS, c)
    scores = jnp.einsum("bngrc,bgsc->bgrns", packed, keys, preferred_element_type=jnp.float32) * VIEW.scale
    seen = (jnp.arange(keys.shape[2]) < end[:, None])[:, None, None, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), -1).astype(values.dtype)
    return jnp.einsum("bgrns,bgsc->bngrc", weights, values).reshape(q.shape)


def cudnn_attention(q, keys, values, start, end, block):
    """Caches [B S G C], which hold the block."""
    del start, block
    engine = "cudnn" if platform.backend() == "cuda" else None
    return jax.nn.dot_product_attention(
        q, keys, values, scale=VIEW.scale, key_value_seq_lengths=end, implementation=engine
    )


def pallas_attention(slots, batch, rows):
    """The kernel with its first tiles, elsewhere than on a GPU interpreted."""
    case = attention.Case(
        batch, rows, HEADS, GROUPS, SIZE, SIZE, slots, jnp.dtype(jnp.bfloat16), True, False, VIEW
    )
    chip = configs.kind()
    run = functools.partial(block_attention_kernel.launch, plan=attention.tiles(case, chip)[0])
    return functools.partial(run, interpret=chip == "default")


def attention_jobs(sizes):
    """Programs and shapes by (size, contender)."""
    jobs, s = {}, lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    for slots, batch, rows in sizes:
        q, own = s(batch, rows, HEADS, SIZE), s(batch, rows, GROUPS, SIZE)
        one = jax.ShapeDtypeStruct((batch,), jnp.int32)
        for name, function in {
            "pallas": pallas_attention(slots, batch, rows),
            "xla": xla_attention,
            "cudnn": cudnn_attention,
            "reference": functools.partial(plain_attention, view=VIEW),
        }.items():
            cached = s(batch, slots, GROUPS, SIZE) if name == "cudnn" else s(batch, GROUPS, slots, SIZE)
            jobs[(slots, batch, rows), name] = function, (q, cached, cached, one, one, (own, own))
    return jobs


def attention_rows(sizes, lengths_of, label, clock, args, save):
    """Measure all contenders at every size."""
    jobs = attention_jobs([s for s in sizes if save.missing(label(s))])
    programs, pool = compile_all(jobs), {}
    if jobs:
        most = max(s[0] * s[1] for s in sizes) * GROUPS * SIZE
        pool = {i: uniform(most, i) for i in (1, 2)}
    for slots, batch, rows in sizes:
        size, name_of = (slots, batch, rows), label((slots, batch, rows))
        if not save.missing(name_of) or save.late():
            continue
        lengths = lengths_of(slots, batch)
        q = uniform(batch * rows * HEADS * SIZE, 3).reshape(batch, rows, HEADS, SIZE)
        own = tuple(
            uniform(batch * rows * GROUPS * SIZE, i).reshape(batch, rows, GROUPS, SIZE) for i in (4, 5)
        )
        calls = {}
        for name in ("pallas", "xla", "cudnn", "reference"):
            program = programs[size, name]
            shape = (batch, slots, GROUPS, SIZE) if name == "cudnn" else (batch, GROUPS, slots, SIZE)
            k, v = (pool[i][: slots * batch * GROUPS * SIZE].reshape(shape) for i in (1, 2))
            calls[name] = program, (q, k, v, lengths, lengths, own)
        seen = float(jnp.sum(lengths)) * 2 * GROUPS * SIZE * 2
        row = {"slots": slots, "batch": batch, "rows": rows, "bytes": seen, "floor": 1e6 * seen / BANDWIDTH}
        save(name_of, row | contest(calls, clock, args))


def contest(calls, clock, args) -> dict:
    """Medians of every contender, A B A B; the contender's error where it could not run."""
    times, kernels, method = {name: [] for name in calls}, {}, {}
    for _ in range(args.rounds):
        for name, (program, arrays) in calls.items():
            if isinstance(program, Exception):
                times[name] = short(program)
                continue
            try:
                timing = clock(
                    functools.partial(program, *arrays) if arrays is not None else program, args.runs
                )
            except Exception as error:
                times[name] = short(error)
                continue
            if isinstance(times[name], list):
                times[name].append(round(timing.median, 2))
                longest = sorted(timing.kernels, key=lambda kernel: -kernel[1])[:8]
                kernels[name] = [(n[:40], round(t, 1)) for n, t in longest if t > 1]
                method[name] = timing.method
    middle = {n: statistics.median(t) for n, t in times.items() if isinstance(t, list) and t}
    others = [t for n, t in middle.items() if n in ("xla", "cudnn")]
    gain = min(others) / middle["pallas"] if others and "pallas" in middle else None
    return {"microseconds": middle, "rounds": times, "gain": gain, "kernels": kernels, "method": method}


@functools.lru_cache(maxsize=64)
def _make(count: int):
    return jax.jit(lambda k: jax.random.normal(k, (count,), jnp.bfloat16))


def key(seed: int):
    return jax.random.key(seed, impl="rbg")


def uniform(count: int, seed: int):
    """Normally distributed bfloat16."""
    return _make(count)(key(seed))


def reference_injection(*arrays):
    """By XLA alone: the products within are the compiler's, too."""
    with dispatch.asking("xla"):
        return plain_injection(*arrays, heads=ROPE)


def injection_arrays(batch, block, small):
    """Weights are shared by all sizes; caches are new."""
    slots = SLOTS // batch
    pos = (jnp.arange(batch) * 37 % max(1, slots - block))[:, None] + jnp.arange(block)
    cache = lambda i: uniform(SLOTS * GROUPS * SIZE, i).reshape(batch, GROUPS, slots, SIZE)  # noqa: E731
    caches = tuple((cache(2 * i), cache(2 * i + 1)) for i in range(LAYERS))
    x = uniform(batch * block * WIDTH, 9).reshape(batch, block, WIDTH)
    return x, small, caches, pos.astype(jnp.int32), jnp.full(batch, block, jnp.int32)


def injection_weights():
    weight = lambda i: (uniform(GROUPS * SIZE * WIDTH, i) * WIDTH**-0.5).reshape(GROUPS, SIZE, WIDTH)  # noqa: E731
    norm = jnp.ones(SIZE, jnp.bfloat16)
    return tuple(Projections(weight(2 * i), weight(2 * i + 1), None, None, norm) for i in range(LAYERS))


def injection_rows(clock, args, save):
    """Measure both contenders at every size; caches are given away and come back."""
    label = lambda size: f"injection T{size[0] * size[1]}"  # noqa: E731
    wanted = [s for s in INJECTION if save.missing(label(s))]
    if not wanted:
        return
    weights, jobs = injection_weights(), {}
    for size in wanted:
        arrays = jax.eval_shape(lambda size=size: injection_arrays(*size, weights))
        case = injection.case(*arrays[:3], ROPE)
        chip = configs.kind()
        launch = functools.partial(
            kv_injection_kernel.launch,
            case=case,
            tiles=next(configs.injection(chip)),
            interpret=chip == "default",
        )
        for name, run in (("pallas", launch), ("xla", reference_injection)):
            jobs[size, name] = jax.jit(run, donate_argnums=2), arrays
    programs = compile_all(jobs)
    for size in wanted:
        if save.late():
            return
        calls = {}
        for name in ("pallas", "xla"):
            program = programs[size, name]
            calls[name] = (
                (program, ()) if isinstance(program, Exception) else (Passing(program, size, weights), None)
            )
        tokens, read = size[0] * size[1], sum(a.nbytes for a in jax.tree.leaves(weights))
        floor = 1e6 * max(read / BANDWIDTH, tokens * read / FLOPS)
        save(label(size), {"tokens": tokens, "bytes": read, "floor": floor} | contest(calls, clock, args))


class Passing:
    """A program whose caches are given away, called again and again with those it returned."""

    def __init__(self, program, size, weights):
        self.program = program
        self.x, self.weights, self.caches, self.pos, self.keep = injection_arrays(*size, weights)

    def __call__(self):
        self.caches = self.program(self.x, self.weights, self.caches, self.pos, self.keep)
        return self.caches


def check(args) -> dict:
    """Relative errors of both kernels as the library calls them, against float32, with NaN beyond the context."""
    slots, batch, rows = 300, 3, 16
    lengths = jnp.asarray([0, 37, 300], jnp.int32)
    q = uniform(batch * rows * HEADS * SIZE, 1).reshape(batch, rows, HEADS, SIZE)
    k, v = (uniform(batch * GROUPS * slots * SIZE, i).reshape(batch, GROUPS, slots, SIZE) for i in (2, 3))
    own = tuple(uniform(batch * rows * GROUPS * SIZE, i).reshape(batch, rows, GROUPS, SIZE) for i in (4, 5))
    hidden = (jnp.arange(slots) >= lengths[:, None])[:, None, :, None]
    poisoned = jnp.where(hidden, jnp.nan, k), jnp.where(hidden, jnp.nan, v)
    want = "pallas" if platform.backend() in ("cuda", "rocm") else "auto"
    run = jax.jit(functools.partial(attend_block, view=VIEW, implementation=want))
    got = run(q, *(poisoned if want == "pallas" else (k, v)), lengths, lengths, own)
    wide = lambda tree: jax.tree.map(lambda a: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a, tree)  # noqa: E731
    errors = {
        "attention": distance(got, plain_attention(*wide((q, k, v)), lengths, lengths, wide(own), view=VIEW))
    }
    weights = injection_weights()
    for size in INJECTION[:3]:
        arrays = injection_arrays(*size, weights)
        got = jax.jit(functools.partial(inject, heads=ROPE, implementation=want))(*arrays)
        exact = jax.jit(reference_injection)(*wide(arrays))
        errors[f"injection T{size[0] * size[1]}"] = max(
            distance(a, b) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(exact), strict=True)
        )
    print("relative errors", errors, flush=True)
    if not max(errors.values()) < 1e-2:
        raise SystemExit("a kernel is wrong")
    return errors


def distance(got, want) -> float:
    got, want = (np.asarray(x, np.float32) for x in (got, want))
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


class Save:
    """Rows by name, in a file that grows; rows that were there before stay."""

    def __init__(self, args):
        self.args, self.rows, self.began = args, {}, time.monotonic()
        if args.out and args.out.exists():
            before = json.loads(args.out.read_text())
            if before.get("commit") == common.commit():
                self.rows = before["results"]

    def missing(self, name: str) -> bool:
        return name not in self.rows

    def late(self) -> bool:
        return time.monotonic() - self.began > self.args.budget

    def __call__(self, name: str, row: dict) -> None:
        self.rows[name] = row
        times = " ".join(f"{n} {t:.1f}" for n, t in row.get("microseconds", {}).items())
        gain = row.get("gain")
        print(
            f"{name}: floor {row.get('floor', 0):.1f} {times}" + (f" gain {gain:.2f}" if gain else ""),
            flush=True,
        )
        common.write(self.args.out, self.args, self.rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", choices=["attention", "ragged", "injection"])
    parser.add_argument("--budget", type=float, default=220, help="seconds after which no new size is begun")
    parser.add_argument("--runs", type=int, default=5, help="of each contender at a time")
    parser.add_argument("--rounds", type=int, default=2, help="how often contenders take turns")
    parser.add_argument("--tiny", action="store_true")
    return parser.parse_args()


def shrink() -> None:
    """Sizes for a try."""
    global HEADS, GROUPS, SIZE, ATTENTION, RAGGED, INJECTION, WIDTH, LAYERS, SLOTS, VIEW, ROPE
    HEADS, GROUPS, SIZE, WIDTH, LAYERS, SLOTS = 4, 2, 32, 64, 2, 64
    ATTENTION, RAGGED, INJECTION = [(64, 1, 4)], (64, 2, 4), [(1, 1), (2, 4), (1, 32)]
    VIEW, ROPE = View(SIZE**-0.5, False), Heads(RopeConfig(SIZE, 1e6), 1e-6)


def main() -> None:
    """Compare, measure and write."""
    args = parse()
    if args.tiny:
        shrink()
    platform.enable_compilation_cache()
    save, clock = Save(args), Clock(*([1 << 12] if args.tiny else []))
    wanted = lambda name: args.only in (None, name)  # noqa: E731
    if save.missing("errors"):
        save("errors", check(args))
    if wanted("injection"):
        injection_rows(clock, args, save)
    if wanted("ragged"):
        rng = np.random.default_rng(1)
        spread = lambda slots, batch: jnp.asarray(rng.integers(slots // 8, slots + 1, batch), jnp.int32)  # noqa: E731
        attention_rows([RAGGED], spread, lambda s: f"ragged S{s[0]} B{s[1]} N{s[2]}", clock, args, save)
    if wanted("attention"):
        full = lambda slots, batch: jnp.full(batch, slots, jnp.int32)  # noqa: E731
        attention_rows(ATTENTION, full, lambda s: f"attention S{s[0]} B{s[1]} N{s[2]}", clock, args, save)
    print("late: start it again to go on" if save.late() else "done", flush=True)


if __name__ == "__main__":
    main()
