"""Where the time of a round goes, for drafters of SmolLM2's size with random weights: ``specjax.profile`` for each.

What they propose does not matter (nearly nothing is kept), what a pass costs does. Results are what
:meth:`specjax.profiling.Profile.as_dict` tells; seconds. What is in the file already is not measured again, so a run
that was stopped goes on.

    python benchmarks/rounds.py --out benchmarks/results/<date>-<device>/rounds.json
"""

import argparse
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

if os.environ.get("JAX_PLATFORMS", "cpu") == "cpu":
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[-1]})  # before any thread pool exists

import common
import numpy as np

import specjax
from specjax import registry
from specjax.drafters.body import Body
from specjax.types import Params


def layers(target_cfg: Any, number: int) -> Body:
    """Drafter layers of the target's own width and heads."""
    c = target_cfg
    return Body(
        hidden_size=c.hidden_size, heads=c.heads, kv_heads=c.kv_heads, head_dim=c.head_dim, mlp_size=c.mlp_size,
        eps=c.eps, rope=c.rope, qk_norm=True, windows=(None,) * number,
    )  # fmt: skip


def sized(name: str, target_cfg: Any, k: int) -> Any:
    """The drafter's tiny config at the size a checkpoint for this target would have."""
    tiny = registry.drafter(name).tiny(target_cfg)
    n = target_cfg.num_layers
    taps = (2, n // 2, n - 3)
    changes = {
        "eagle3": {
            "body": layers(target_cfg, 1),
            "taps": taps,
            "head_rows": 8192,
            "reduced": True,
            "own_head": True,
        },
        "dflash": {"body": layers(target_cfg, 5), "taps": taps, "rows": k + 1, "causal": (False,) * 5},
    }
    changes["dspark"] = changes["dflash"] | {"rows": k}
    return dataclasses.replace(tiny, k=k, **changes.get(name, {}))


def with_drafter(params: Params, name: str, k: int) -> Params:
    """The target with a drafter of random weights."""
    module, cfg = registry.drafter(name), sized(name, params.meta.target_cfg, k)
    lent = registry.target(params.meta.family).shared(params.target, params.meta.target_cfg)
    weights = specjax.checkpoints.random_weights(module.abstract(cfg), 1, lent.embed.dtype)
    meta = dataclasses.replace(params.meta, drafter=name, drafter_cfg=cfg)
    return Params(params.target, weights, meta)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafters", default="eagle3,dflash,dspark,draft_model")
    parser.add_argument("--k", type=int, default=7)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--trace", type=Path, help="folder for a trace of each drafter")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    target = specjax.load(args.target, dtype=args.dtype)
    ids = np.random.default_rng(0).integers(
        5, target.meta.target_cfg.vocab_size - 5, (args.rows, args.prompt_tokens)
    )
    results = json.loads(args.out.read_text())["results"] if args.out and args.out.exists() else {}
    for name in args.drafters.split(","):
        if name in results:
            continue
        found = specjax.profile(
            with_drafter(target, name, args.k), ids.tolist(), max_new_tokens=args.new_tokens, rows=args.rows,
            ignore_eos=True, repeats=args.repeats, trace=args.trace and args.trace / name,
        )  # fmt: skip
        print(found, flush=True)
        results[name] = found.as_dict()
        common.write(args.out, args, results)


if __name__ == "__main__":
    main()
