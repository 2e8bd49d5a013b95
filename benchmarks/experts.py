"""Time of a mixture-of-experts block against the number of distinct experts its tokens chose.

    python benchmarks/experts.py [--short] [--configs] [--up 32x128w4s4l16] [--down 32x128w4s4l8] [--out FILE]
    python benchmarks/experts.py --paths grouped,tiled --tokens 128,512,2048,4096 --distinct 128 --blocks 2 --turns 2

If only the experts that are hit are read from memory, the time grows with their number and not with the number of
experts there are. ``bytes_per_second`` counts the weights of the distinct experts once. Every block of a run takes
other experts than the one before, so that no cache can hold them. On a GPU the kernel is first compared with the path
without kernels. ``--short`` leaves most rows of the slow paths out; ``--configs`` also times each of the kernel's two
parts with a list of tiles (``--up`` and ``--down`` set the tiles of the whole). ``grouped`` is the kernel for many
tokens (prefill, wide batches), once with each pair of tiles of ``--grouped``; its rows carry ``flops`` per second too.
"""

import argparse
import functools
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import common
import jax
import jax.numpy as jnp

from specjax.core import platform
from specjax.kernels import dispatch, experts as kernel, grouped_experts
from specjax.layers import moe

#: rows x depth w(arps) s(tages) l(anes)
TILES_UP = (
    "32x128w4s4l16 32x128w4s4l32 32x128w4s4l128 16x128w4s4l8 "
    "32x256w4s3l8 64x64w4s4l32 16x256w4s3l16 64x128w8s3l16"
)
TILES_DOWN = (
    "32x128w4s4l8 32x128w4s4l16 32x128w4s4l128 16x256w4s3l4 "
    "64x128w4s3l16 64x64w4s4l16 32x256w4s3l8 128x64w8s3l16"
)


def seconds_per_block(step: Callable, state, args, distinct: int, weights) -> float:
    """Of a loop of ``blocks`` steps a turn in one program, each fed by the one before, less what a short loop takes."""
    blocks = args.blocks

    def turn(i, state, distinct, weights):
        for b in range(blocks):
            first = (i * blocks + b) * distinct % args.experts
            state = step(state, first, distinct, *weights)
        return state

    if step not in _programs:
        loop = lambda n, s, d, w: jax.lax.fori_loop(0, n, lambda i, s: turn(i, s, d, w), s)  # noqa: E731
        _programs[step] = jax.jit(loop)
    run = functools.partial(_programs[step], s=state, d=distinct, w=weights)
    took = []
    for n in (args.turns, 3 * args.turns) * args.repeats:
        jax.block_until_ready(run(1))
        began = time.perf_counter()
        jax.block_until_ready(run(n))
        took.append(time.perf_counter() - began)
    each = [
        (long - short) / (2 * args.turns * blocks) for short, long in zip(took[::2], took[1::2], strict=True)
    ]
    return statistics.median(each)


#: Compiled loops by step: another number of distinct experts is another argument, not another program.
_programs: dict[Callable, Callable] = {}


def choices(args, tokens: int, first, distinct):
    """Ids [tokens, per_token] over ``distinct`` experts from ``first`` on."""
    place = jnp.arange(tokens * args.per_token, dtype=jnp.int32)
    return ((first + place % distinct) % args.experts).reshape(tokens, args.per_token)


def whole_step(args, tokens: int, apply: Callable) -> Callable:
    """A block: its state is the tokens."""

    def step(x, first, distinct, *weights):
        out = apply(x, choices(args, tokens, first, distinct), *weights, jax.nn.silu)
        return x + (1e-3 * out.mean(1)).astype(x.dtype)

    return step


def part_step(args, case: kernel.Case, part: Callable) -> Callable:
    """One kernel: its state is the block's input and a number that makes it wait for the kernel before."""

    def step(state, first, distinct, *weights):
        inputs, before = state
        ids = choices(args, case.tokens, first + before, distinct).reshape(-1)
        listed = (first + before + jnp.arange(case.slots, dtype=jnp.int32)) % args.experts
        hit = jnp.concatenate([jnp.full(1, distinct, jnp.int32), listed])
        out = part(hit, ids, inputs, *weights)
        return inputs, (out.reshape(-1)[0] > 1e30).astype(jnp.int32)

    return step


def check(args, weights, paths) -> None:
    """The kernel against the path without kernels, one token beside others that are not numbers, the whole block."""
    for tokens in sorted({1, 3, min(16, args.experts // args.per_token)}):
        keys = jax.random.split(jax.random.key(tokens), tokens + 1)
        x = jax.random.normal(keys[0], (tokens, args.width), args.dtype)
        ids = jnp.stack([jax.random.permutation(k, args.experts)[: args.per_token] for k in keys[1:]])
        ids, share = ids.astype(jnp.int32), jnp.full(ids.shape, 1 / args.per_token)
        fast = jax.jit(lambda x, ids, *w: paths["kernel"](x, ids, *w, jax.nn.silu))
        slow = jax.jit(lambda x, ids, *w: moe._gathered(x, ids, *w, jax.nn.silu))
        got, want = fast(x, ids, *weights), slow(x, ids, *weights)
        error = distance(got, want)
        alone = bool(jnp.array_equal(fast(x.at[1:].set(jnp.nan), ids, *weights)[0], got[0]))
        block = distance(jax.jit(moe.experts)(x, share, ids, *weights), want.mean(1))
        print(f"check: {tokens} tokens, relative error {error:.1e}, the same beside NaN: {alone}", flush=True)
        print(
            f"       whole block {block:.1e}: {dispatch.choose('experts', x, ids, weights[0], jax.nn.silu)}"
        )
        if not (error < 1e-2 and alone and block < 1e-2):
            raise SystemExit("the kernel is wrong")


def check_grouped(args, weights, path) -> None:
    """The kernel for many tokens against tiles one by one, the first token beside others that are not numbers."""
    for tokens in sorted({1 + moe.FEW_TOKENS, max(map(int, args.tokens.split(",")))}):
        x = jax.random.normal(jax.random.key(tokens), (tokens, args.width), args.dtype)
        scores = jax.random.uniform(jax.random.key(tokens + 1), (tokens, args.experts))
        ids = jax.lax.top_k(scores, args.per_token)[1].astype(jnp.int32)
        fast = jax.jit(lambda x, ids, *w: path(x, ids, *w, jax.nn.silu))
        got = fast(x, ids, *weights)
        error = distance(
            got, jax.jit(lambda x, ids, *w: moe._tiled(x, ids, *w, jax.nn.silu))(x, ids, *weights)
        )
        alone = bool(jnp.array_equal(fast(x.at[1:].set(jnp.nan), ids, *weights)[0], got[0]))
        print(
            f"check grouped: {tokens} tokens, relative error {error:.1e}, the same beside NaN: {alone}",
            flush=True,
        )
        if not (error < 1e-2 and alone):
            raise SystemExit("the kernel is wrong")


def distance(got, want) -> float:
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


def case_of(args, tokens: int) -> kernel.Case:
    return kernel.Case(
        tokens=tokens,
        per_token=args.per_token,
        experts=args.experts,
        width=args.width,
        size=args.expert_size,
        dtype=jnp.dtype(args.dtype),
        activation=jax.nn.silu,
    )


def kernel_path(args) -> Callable:
    """The kernel with the tiles asked for (elsewhere than on a GPU: interpreted)."""
    name = platform.backend()
    base = kernel.TILES.get(name, kernel.TILES["cuda"])
    tiles = kernel.Tiles(
        *(tile(given) if given else t for given, t in ((args.up, base.up), (args.down, base.down)))
    )

    def apply(x, ids, gate, up, down, activation):
        interpret = name not in kernel.TILES
        return kernel.launch(
            x, ids, gate, up, down, case=case_of(args, x.shape[0]), tiles=tiles, interpret=interpret
        )

    return apply


def grouped_paths(args) -> dict[str, Callable]:
    """The kernel for many tokens, with the tiles its table has and with each pair of ``--grouped``."""
    name = platform.backend()
    pairs: dict[str, grouped_experts.Tiles | None] = {"grouped": None}
    for text in args.grouped.split():
        up, down = (
            grouped_experts.Tile(*map(int, re.fullmatch(r"(\d+)x(\d+)w(\d+)s(\d+)", part).groups()))
            for part in text.split("/")
        )
        pairs[f"grouped {text}"] = grouped_experts.Tiles(up, down)

    def path(tiles):
        def apply(x, ids, gate, up, down, activation):
            case = grouped_experts.case(x, ids, gate, activation)
            known = name if name in grouped_experts.TILES else "cuda"
            own = tiles or grouped_experts.choices(case, known)[0]
            return grouped_experts.launch(
                x, ids, gate, up, down, case=case, tiles=own, interpret=known != name
            )

        return apply

    return {name: path(tiles) for name, tiles in pairs.items()}


def tile(text: str) -> kernel.Tile:
    """``"32x128w4s3l8"``: 32 rows, 128 deep, 4 warps, 3 stages, 8 lanes."""
    return kernel.Tile(*map(int, re.fullmatch(r"(\d+)x(\d+)w(\d+)s(\d+)l(\d+)", text).groups()))


def configs(args, weights) -> list[dict]:
    """Each part of the kernel alone, with every tile of the lists."""
    gate, up, down = weights
    tokens, rows = args.config_tokens, []
    case = case_of(args, tokens)
    x = jax.random.normal(jax.random.key(1), (tokens, args.width), args.dtype)
    hidden = jax.random.normal(jax.random.key(2), (case.slots, case.rows, args.expert_size), args.dtype)
    up_part = lambda hit, ids, x, *w, t: kernel.launch_up(hit, x, *w, case=case, tile=t)  # noqa: E731
    down_part = lambda hit, ids, h, *w, t: kernel.launch_down(hit, ids, h, *w, case=case, tile=t)  # noqa: E731
    parts = (("up", TILES_UP, x, (gate, up), up_part), ("down", TILES_DOWN, hidden, (down,), down_part))
    for name, tiles, inputs, arrays, part in parts:
        for text in tiles.split():
            step = part_step(args, case, functools.partial(part, t=tile(text)))
            for distinct in (8, 64, 128):
                if not args.per_token <= distinct <= min(args.experts, tokens * args.per_token):
                    continue
                row = {"path": f"{name} {text}", "tokens": tokens, "distinct": distinct}
                size = distinct * sum(w[0].nbytes for w in arrays)
                try:
                    seconds = seconds_per_block(step, (inputs, jnp.int32(0)), args, distinct, arrays)
                except Exception as error:  # a tile that needs more shared memory than there is
                    print(row | {"error": str(error).splitlines()[0][:120]}, flush=True)
                    break
                rows.append(row | figures(seconds, size))
                print(rows[-1], flush=True)
    return rows


def figures(seconds: float, size: int) -> dict:
    return {
        "microseconds": round(1e6 * seconds, 1),
        "bytes_per_second": round(size / seconds / 1e9) * 1e9 if seconds > 0 else None,
    }


def wanted(args, path: str, tokens: int, distinct: int) -> bool:
    """Whether ``--short`` keeps a row: all of the kernel's, one or two of the others'."""
    if not args.short or path == "kernel":
        return True
    if path == "gathered":
        return tokens == 1
    return tokens == 16 and distinct in (8, 128)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--per-token", type=int, default=8)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--expert-size", type=int, default=768)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", default="1,4,8,16")
    parser.add_argument("--distinct", default="8,16,32,64,128")
    parser.add_argument(
        "--paths",
        help="of kernel,gathered,tiled,grouped; default: the first three (on a CPU: gathered,tiled)",
    )
    parser.add_argument("--grouped", default="", help="further tiles of grouped: '64x64w8s3/128x64w8s3 ...'")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--configs", action="store_true")
    parser.add_argument("--config-tokens", type=int, default=16)
    parser.add_argument("--up", help="tiles of the kernel's first part")
    parser.add_argument("--down", help="tiles of its second part")
    parser.add_argument(
        "--turns", type=int, default=10, help="of a short loop; a long one takes three times as many"
    )
    parser.add_argument(
        "--blocks", type=int, default=8, help="blocks a turn: spreads the cost of a turn itself"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    """Measure and write."""
    args = parse()
    keys, e, f, d = jax.random.split(jax.random.key(0), 3), args.experts, args.expert_size, args.width
    shapes = ((e, f, d), (e, f, d), (e, d, f))
    weights = [jax.random.normal(key, s, args.dtype) * 0.02 for key, s in zip(keys, shapes, strict=True)]
    paths = {"kernel": kernel_path(args), "gathered": moe._gathered, "tiled": moe._tiled}
    on_gpu = platform.backend() in kernel.TILES
    names = args.paths.split(",") if args.paths else [p for p in paths if on_gpu or p != "kernel"]
    if "grouped" in names:
        paths |= (many := grouped_paths(args))
        names = [p for name in names for p in (many if name == "grouped" else [name])]
        check_grouped(args, weights, many["grouped"])
    if "kernel" in names:
        check(args, weights, paths)
    rows, one = [], 3 * f * d * jnp.dtype(args.dtype).itemsize
    for tokens in map(int, args.tokens.split(",")):
        x = jax.random.normal(jax.random.key(tokens), (tokens, d), args.dtype)
        for path in names:
            step = whole_step(args, tokens, paths[path])
            for distinct in map(int, args.distinct.split(",")):
                if not args.per_token <= distinct <= min(e, tokens * args.per_token):
                    continue
                if not wanted(args, path, tokens, distinct):
                    continue
                row = {"path": path, "tokens": tokens, "distinct": distinct}
                try:
                    seconds = seconds_per_block(step, x, args, distinct, weights)
                except Exception as error:  # tiles that need more shared memory than there is
                    print(row | {"error": str(error).splitlines()[0][:120]}, flush=True)
                    break
                rows.append(row | figures(seconds, distinct * one))
                if tokens > moe.FEW_TOKENS and seconds > 0:
                    rows[-1]["flops"] = round(6 * tokens * args.per_token * f * d / seconds / 1e9) * 1e9
                print(rows[-1], flush=True)
    if args.configs:
        rows += configs(args, weights)
    common.write(args.out, args, rows)


if __name__ == "__main__":
    main()
