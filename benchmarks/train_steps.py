"""A training step of each method, on an accelerator: time, memory, and where the time goes.

    python benchmarks/train_steps.py [--methods dflash dspark] [--rows 32] [--length 448] [--profile] [--out FILE]

The target has the sizes of SmolLM2-135M and random weights; rows are full of documents of about 300 tokens. Times are
medians over runs that wait for the device. Prints one JSON line per method, in milliseconds: ``features`` (the target's
pass), ``loss`` (no gradient), ``gradient`` (with it, features given), ``step`` (with the optimiser, features given),
``online`` (features made in the step); ``rows`` and ``rows_gradient`` for block drafters: everything below the head.
``--profile`` lists the kernels of a step (features given) as well, forward and backward apart.
"""

import argparse
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
from train_features import SMOLLM2, packed, timed, weights

from specjax import profiling_kernels, registry
from specjax.core.platform import traced_options
from specjax.train import block, features, methods, step
from specjax.train.types import Batch
from specjax.types import Pair

#: Settings a method cannot do without.
NEEDED: dict[str, dict[str, Any]] = {"dflash": {"mask_id": 16}, "dspark": {"mask_id": 16}}


def answers(batch: Batch) -> Batch:
    """The batch with the first 80 tokens of every document as its prompt."""
    return Batch(batch.tokens, batch.doc, batch.pos, batch.trained & (np.asarray(batch.pos) >= 80))


def measure(
    name: str, args: argparse.Namespace, target: Any, target_cfg: Any, batch: Batch
) -> dict[str, Any]:
    """Every figure of a method."""
    how = methods.method(name)
    cfg = how.config(NEEDED.get(name, {}) | json.loads(args.settings), target_cfg)
    recipe = how.recipe(rows=args.rows, length=args.length, **json.loads(args.recipe))
    pair = Pair("llama", target_cfg, name, cfg)
    lent = registry.target("llama").shared(target, target_cfg)
    start = step.start(how.init(cfg, target, lent, jax.random.key(0)), how.frozen(cfg), recipe)
    extract = jax.jit(
        functools.partial(features.extract, pair=pair, needs=how.needs(cfg), dtype=recipe.dtype)
    )
    given = extract(target, batch=batch)
    shared = step.cast(lent, recipe.dtype)
    found = {"method": name, "parameters": sum(x.size for x in jax.tree.leaves(start.masters))}

    def loss(masters, shared, batch, given):
        p = step.cast(step.merge(masters, start.fixed), recipe.dtype)
        return how.loss(p, shared, cfg, recipe, batch, given, jax.random.key(1))

    def below(masters, shared, batch, given):
        p = step.cast(step.merge(masters, start.fixed), recipe.dtype)
        blocks = block.anchors(batch, recipe.anchors, jax.random.key(1))
        out = block.rows(getattr(p, "backbone", p), shared, cfg, batch, given, blocks.at)
        return jnp.sum(out.astype(jnp.float32))

    inputs = (start.masters, shared, batch, given)
    runs = {"loss": loss, "gradient": jax.grad(loss, has_aux=True)}
    if name in NEEDED:
        runs |= {"rows": below, "rows_gradient": jax.grad(below)}
    found["features"] = timed(lambda: extract(target, batch=batch))
    for figure, run in runs.items():
        compiled = jax.jit(run).lower(*inputs).compile()
        found[figure] = timed(lambda c=compiled: c(*inputs))
    one = step.Step(pair, recipe)
    for figure, more in (("step", given), ("online", None)):
        compiled = jax.jit(one.__call__).lower(start, target, batch, more).compile()
        found[figure] = timed(lambda c=compiled, m=more: c(start, target, batch, m))
        found[f"{figure}_gib"] = compiled.memory_analysis().temp_size_in_bytes / 2**30
    if args.profile:
        found["kernels"] = kernels(jax.jit(one.__call__), (start, target, batch, given))
        print(profiling_kernels.table(found["kernels"], found["step"]), flush=True)
    return found


def kernels(step: Any, inputs: tuple, turns: int = 3) -> list[dict[str, Any]]:
    """Kernels of a jitted step, the longest first (:func:`specjax.profiling_kernels.rows`)."""
    compiled = step.lower(*inputs).compile(compiler_options=traced_options() or None)
    jax.block_until_ready(compiled(*inputs))
    with tempfile.TemporaryDirectory() as folder:
        seen = profiling_kernels.traced(lambda: [compiled(*inputs) for _ in range(turns)], Path(folder))
    return profiling_kernels.rows(seen, profiling_kernels.Operations(compiled.as_text() or ""), scope, turns)


def scope(path: str) -> str:
    """The part of a step that an operation belongs to, by how jax differentiates."""
    if "transpose(" in path:
        return "again" if "rematted" in path else "backward"
    return "forward" if "jvp(" in path else "other"


def main() -> None:
    """One line per method."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", default=["eagle3", "mtp", "assistant", "dflash", "dspark"])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=448)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--recipe", default="{}", help="changes of the recipe, as JSON")
    parser.add_argument("--settings", default="{}", help="changes of the drafter's config, as JSON")
    parser.add_argument("--profile", action="store_true", help="list the kernels of a step")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    target_cfg = registry.target("llama").config(SMOLLM2 | {"num_hidden_layers": args.layers})
    target = weights(target_cfg, "bfloat16")
    batch = jax.device_put(answers(packed(args.rows, args.length, 0, 0)[1]))
    results = []
    for name in args.methods:
        results.append(measure(name, args, target, target_cfg, batch))
        print(json.dumps(results[-1]), flush=True)
    common.write(args.out, args, results)


if __name__ == "__main__":
    main()
