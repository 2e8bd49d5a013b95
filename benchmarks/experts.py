"""Time of a mixture-of-experts block against the number of distinct experts its tokens chose.

    python benchmarks/experts.py [--out FILE]

If only the experts that are hit are read from memory, the time grows with their number and not with the number of
experts there are. ``bytes_per_second`` counts the weights of the distinct experts once.
"""

import argparse
import time
from pathlib import Path

import common
import jax
import jax.numpy as jnp

from specjax.layers import moe

PATHS = {"gathered": moe._gathered, "tiled": moe._tiled}


def measure(path: str, tokens: int, distinct: int, args, weights) -> float:
    """Seconds per block: a loop of blocks in one program, each fed by the one before."""
    k = args.per_token
    ids = (jnp.arange(tokens * k) % distinct).reshape(tokens, k)
    x = jnp.ones((tokens, args.width), args.dtype)

    def block(_, x):
        out = PATHS[path](x, ids, *weights, jax.nn.silu)
        return x + (1e-3 * out.mean(1)).astype(x.dtype)

    run = jax.jit(lambda x, n: jax.lax.fori_loop(0, n, block, x))
    took = []
    for n in (args.turns, 3 * args.turns, args.turns, 3 * args.turns):
        jax.block_until_ready(run(x, n))
        began = time.perf_counter()
        jax.block_until_ready(run(x, n))
        took.append(time.perf_counter() - began)
    return (took[1] + took[3] - took[0] - took[2]) / (4 * args.turns)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--per-token", type=int, default=8)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--expert-size", type=int, default=768)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", default="1,4,8,16")
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    keys, e, f, d = jax.random.split(jax.random.key(0), 3), args.experts, args.expert_size, args.width
    shapes = ((e, f, d), (e, f, d), (e, d, f))
    weights = [jax.random.normal(key, s, args.dtype) * 0.02 for key, s in zip(keys, shapes, strict=True)]
    rows, one = [], 3 * f * d * jnp.dtype(args.dtype).itemsize
    for tokens in map(int, args.tokens.split(",")):
        chosen = tokens * args.per_token
        for distinct in sorted({args.per_token, min(chosen, e) // 2, min(chosen, e)}):
            if distinct < args.per_token:
                continue
            for path in PATHS:
                seconds = measure(path, tokens, distinct, args, weights)
                row = {
                    "path": path,
                    "tokens": tokens,
                    "distinct": distinct,
                    "microseconds": round(1e6 * seconds, 1),
                }
                rows.append(row | {"bytes_per_second": round(distinct * one / seconds / 1e9) * 1e9})
                print(rows[-1], flush=True)
    common.write(args.out, args, rows)


if __name__ == "__main__":
    main()
