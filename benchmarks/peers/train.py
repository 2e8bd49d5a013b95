"""Training speed beside the speculators package: its own step and ours, on the same device in one run.

    python benchmarks/peers/train.py [--cases eagle3-kl dflash-kl dflash-ce] [--rows 32] [--length 512] [--out FILE]
    python benchmarks/peers/train.py --smoke      # tiny sizes, float32, on the CPU

Drafters for a target of SmolLM2-135M's sizes with random tables. Both sides get the same weights to begin with, the
same features on the device (what the target computes is part of neither), the same documents of 100 to 500 tokens, the
first 80 of each not trained, and the same loss: EAGLE-3 with seven steps over 8192 draft tokens, each weighing 0.8 of
the one before; DFlash with blocks of eight rows at 64 anchors per 512 tokens. Both compute in bfloat16 on float32
masters. We pack documents into rows; the package joins a batch's documents to one row, as its collation does, uses flex
attention and its fused losses, and compiles its forward pass.

Blocks of steps take turns; a block's time is from a device at rest to a device at rest. Prints a JSON line per case:
medians over blocks of milliseconds per step, and documents and trained-on tokens (padding not counted) per second;
``loss`` of the first and of the last step of either side (ours in its terms; which rows at a document's end count, and
which anchors are drawn, differs). What fails on the package's side is printed and written, and the exit status is 1.
"""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # two libraries share the device's memory
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the package looks its target's config up, and there is none

import argparse
import dataclasses
import json
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common
import jax
import jax.numpy as jnp
import numpy as np
import speculators_side as peer
from cases import DECAY, GAMMA, UNROLL, Case, case_of, documents, make
from train_features import SMOLLM2, weights

from specjax import checkpoints, registry
from specjax.train import methods, serial, step
from specjax.types import Pair, Shared

TINY = SMOLLM2 | {
    "vocab_size": 512, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
}  # fmt: skip
_BEGAN = time.perf_counter()


def say(*words: Any) -> None:
    """A line with the seconds since the start."""
    print(f"[{time.perf_counter() - _BEGAN:6.1f}]", *words, flush=True)


class Ours:
    """Our compiled step."""

    def __init__(
        self, case: Case, folder: Path, target: Any, target_cfg: Any, given: Any, args: argparse.Namespace
    ):
        how, lent = methods.method(case.method), registry.target("llama").shared(target, target_cfg)
        full = Shared(lent.embed.astype(jnp.float32), lent.head.astype(jnp.float32))
        found = checkpoints.load_drafter(checkpoints.hub.resolve(folder), target_cfg, full, jnp.float32)
        cfg, p = found.cfg, found.weights
        if case.method == "eagle3" and cfg.own_head:  # rows of the target's head, which neither side trains
            cfg, p = dataclasses.replace(cfg, own_head=False), dataclasses.replace(p, head=None)
        more: dict[str, Any] = {"gamma": GAMMA, "anchors": args.anchors}
        if case.method == "eagle3":
            rounds = [np.asarray(serial.choose(batch, None, jax.random.key(0)).used) for batch, _ in given]
            more = {"decay": DECAY, "unroll": UNROLL, "answers": int(max(x.sum(1).max() for x in rounds))}
        recipe = how.recipe(
            terms=case.terms, rows=args.rows, length=args.length, dtype=args.dtype, betas=(0.9, 0.999),
            optimizer="adamw", learning_rate=args.learning_rate, steps=args.total, warmup=args.warmup / args.total,
            **more,
        )  # fmt: skip
        # the features are the state before the final norm's gain
        gain = lambda f: f.replace(hidden=f.hidden * jnp.asarray(case.sharpness, f.hidden.dtype))  # noqa: E731
        self.given, self.target = [(batch, gain(features)) for batch, features in given], target
        self.state = step.start(p, how.frozen(cfg), recipe)
        self.run, _ = step.compiled(step.Step(Pair("llama", target_cfg, case.method, cfg), recipe))

    def step(self, i: int) -> jax.Array:
        """One step; the loss, not waited for."""
        self.state, metrics = self.run(self.state, self.target, *self.given[i % len(self.given)])
        return metrics["loss"][0] / metrics["loss"][1]

    def wait(self) -> None:
        jax.block_until_ready(self.state.step)


def measure(
    case: Case, target: Any, target_cfg: Any, hf: dict[str, Any], args: argparse.Namespace
) -> dict[str, Any]:
    """Every figure of a case. What goes wrong on the package's side is under ``error``."""
    table = np.asarray(registry.target("llama").shared(target, target_cfg).head, np.float32)
    size = args.draft_vocab if case.method == "eagle3" else len(table)
    ids = np.sort(np.random.default_rng(0).permutation(len(table))[:size])
    given = make(case, table, ids, args)
    texts = [documents(case, *one) for one in given]
    tokens = statistics.mean(sum(len(d["tokens"]) for d in text) for text in texts)
    count = statistics.mean(map(len, texts))
    say(case.name, f"{count:.0f} documents, {tokens:.0f} tokens of {args.rows * args.length} per step")
    out: dict[str, Any] = {
        "case": case.name,
        "documents": count,
        "tokens": tokens,
        "loss": {},
        "first_seconds": {},
    }
    model = peer.build(case, hf, table, ids, "simple_flex_attention" if args.gpu else "eager")
    sides: dict[str, Any] = {"specjax": Ours(case, peer.saved(model), target, target_cfg, given, args)}
    out["parameters"] = {
        "specjax": sum(x.size for x in jax.tree.leaves(sides["specjax"].state.masters)),
        "speculators": sum(x.numel() for x in model.parameters() if x.requires_grad),
    }
    try:
        sides["speculators"] = peer.Side(case, model, texts, args)
    except Exception:
        _failed(out, sides)
    losses: dict[str, list[Any]] = {name: [] for name in sides}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for block in range(-1, args.blocks):
        for name in list(sides):
            try:
                times[name].append(_block(sides[name], losses[name], 3 if block < 0 else args.steps))
            except Exception:
                if name == "specjax":
                    raise
                _failed(out, sides)
                continue
            if block < 0:
                out["first_seconds"][name] = times[name].pop() * 3
            say(case.name, name, "compiled" if block < 0 else f"{1e3 * times[name][-1]:.2f} ms per step")
    for name in sides:
        median = statistics.median(times[name])
        out[name] = {"ms": 1e3 * median, "documents_per_second": count / median, "tokens_per_second": tokens / median,
                     "blocks_ms": [1e3 * t for t in times[name]]}  # fmt: skip
        out["loss"][name] = [float(losses[name][0]), float(losses[name][-1])]
    if "speculators" in sides:
        out["times_theirs"] = out["speculators"]["ms"] / out["specjax"]["ms"]
        out["speculators"]["gib"] = sides["speculators"].gib()
    return out


def _failed(out: dict[str, Any], sides: dict[str, Any]) -> None:
    out["error"] = traceback.format_exc()
    sides.pop("speculators", None)
    say("SPECULATORS FAILED", out["case"], "\n" + out["error"])


def _block(side: Any, losses: list[Any], steps: int) -> float:
    """Seconds per step of a block of steps."""
    side.wait()
    start, first = time.perf_counter(), len(losses)
    losses += [side.step(first + i) for i in range(steps)]
    side.wait()
    return (time.perf_counter() - start) / steps


def arguments() -> argparse.Namespace:
    """The command's options, and what follows from them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=["eagle3-kl", "dflash-kl", "dflash-ce"])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--anchors", type=int, default=64, help="blocks per row")
    parser.add_argument("--draft-vocab", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=20, help="per block")
    parser.add_argument("--blocks", type=int, default=6, help="per side")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: whether it runs, not how fast")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.gpu = not args.smoke
    if args.smoke:
        args.rows, args.length, args.anchors, args.draft_vocab, args.steps, args.blocks = 1, 256, 16, 64, 1, 1
    args.total = 3 + args.steps * args.blocks
    args.warmup, args.dtype = max(1, args.total // 25), "bfloat16" if args.gpu else "float32"
    return args


def main() -> int:
    """One line per case; 1 if the package failed anywhere."""
    args = arguments()
    peer.import_package()
    hf = TINY if args.smoke else SMOLLM2
    target_cfg = registry.target("llama").config(hf)
    target = weights(target_cfg, args.dtype)
    say("target's tables are made on", jax.devices()[0].device_kind)
    results = []
    for name in args.cases:
        results.append(measure(case_of(name, args), target, target_cfg, hf, args))
        print(json.dumps({k: v for k, v in results[-1].items() if k != "error"}), flush=True)
        common.write(args.out, args, results)
    return int(any("error" in result for result in results))


if __name__ == "__main__":
    sys.exit(main())
