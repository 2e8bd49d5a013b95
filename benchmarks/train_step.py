"""Training steps of drafters on an accelerator: time, memory and where the time goes.

    python benchmarks/train_step.py [--methods eagle3,mtp,assistant] [--rows 32] [--length 448] [--out FILE]

The target has the sizes of SmolLM2-135M and random weights; rows are full of documents of about 300 tokens, of which
the first 60 are the prompt. Drafters have their default shape and recipe. Prints one JSON line per method: ``step_ms``
with the target's pass inside, ``kept_ms`` with features that were made before, ``features_ms`` that pass alone (medians
over runs that wait for the device).
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import common
import jax
from train_features import SMOLLM2, packed, timed, weights

from specjax import registry
from specjax.train import methods
from specjax.train.step import Step, start
from specjax.types import Pair

PROMPT = 60
#: Tokens that occur: those of the default draft vocabulary of random weights.
VOCABULARY = 8192


def steps_of(step: Step, state: Any, target: Any, batch: Any, features: Any, times: int) -> dict[str, Any]:
    """Compile one form of the step and run it."""
    run = jax.jit(step.__call__, donate_argnums=0)
    began = time.perf_counter()
    compiled = run.lower(state, target, batch, features).compile()
    seconds, memory, taken = time.perf_counter() - began, compiled.memory_analysis(), []
    for _ in range(times + 3):
        began = time.perf_counter()
        state, metrics = compiled(state, target, batch, features)
        jax.block_until_ready(state)
        taken.append(1e3 * (time.perf_counter() - began))
    total, weight = metrics["loss"]
    return {
        "ms": round(statistics.median(taken[3:]), 2),
        "compile_s": round(seconds, 1),
        "temp_gib": round(getattr(memory, "temp_size_in_bytes", 0) / 2**30, 2),
        "loss": float(total / weight),
    }


def measure(name: str, args: argparse.Namespace, family: Any, cfg: Any, target: Any) -> dict[str, Any]:
    """Figures of one method."""
    module = methods.method(name)
    drafter = module.config({}, cfg)
    recipe = module.recipe(rows=args.rows, length=args.length, dtype=args.dtype)
    if args.answers and name in ("eagle3", "mtp", "assistant"):
        recipe = module.recipe(rows=args.rows, length=args.length, dtype=args.dtype, answers=args.answers)
    step = Step(Pair("llama", cfg, name, drafter), recipe)
    batch = packed(args.rows, args.length, 0, 0)[1]
    trained = (batch.doc >= 0) & (batch.pos >= PROMPT)
    batch = jax.device_put(batch.replace(tokens=batch.tokens % VOCABULARY, trained=trained))
    p = module.init(drafter, target, family.shared(target, cfg), jax.random.key(0))
    fresh = lambda: start(p, module.frozen(drafter), recipe)  # noqa: E731
    made = jax.jit(step.features)
    features = jax.block_until_ready(made(target, batch))
    online = steps_of(step, fresh(), target, batch, None, args.times)
    kept = steps_of(step, fresh(), target, batch, features, args.times)
    return {
        "method": name,
        "parameters": sum(x.size for x in jax.tree.leaves(p)),
        "step_ms": online["ms"],
        "kept_ms": kept["ms"],
        "features_ms": round(timed(lambda: made(target, batch), args.times), 2),
        "tokens_per_s": round(1e3 * args.rows * args.length / online["ms"]),
        "online": online,
        "kept": kept,
        "recipe": {key: getattr(recipe, key) for key in ("unroll", "terms", "answers", "chunks", "anchors")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", default="eagle3,mtp,assistant,dflash,dspark")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=448)
    parser.add_argument("--answers", type=int, default=256)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    family = registry.target("llama")
    cfg = family.config(SMOLLM2 | {"num_hidden_layers": args.layers})
    target = weights(cfg, args.dtype)
    found = []
    for name in args.methods.split(","):
        found.append(measure(name, args, family, cfg, target))
        print(json.dumps(found[-1]), flush=True)
    common.write(args.out, args, found)


if __name__ == "__main__":
    main()
