"""Mixture of experts for few tokens: every expert that is hit is read once, at the speed of memory.

Three Pallas-Triton kernels, which compile for CUDA and ROCm. The first lists the distinct experts that were chosen. The
second streams rows of ``gate`` and ``up`` of one expert after another against all tokens and keeps
``activation(gate x) * up x`` in the weights' dtype. The third streams rows of ``down`` against that and stores each
token's part at the places where the token chose the expert. All tokens are multiplied with every expert that is hit: a
matrix unit takes 16 rows at the price of one, and time goes into reading.

A program of the second and third kernel has fixed rows of a weight matrix and takes every ``lanes``-th listed expert,
so that programs are as many as the chip holds and share the work evenly however many experts are hit.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from specjax.kernels import experts_op as op
from specjax.kernels.building import compiling
from specjax.kernels.configs import LEAST
from specjax.kernels.experts_op import Tiles
from specjax.kernels.sizes import power

ABOUT = "Pallas-Triton: bfloat16 or float16, up to 64 tokens, sizes that are multiples of 16"
MAX_TOKENS = 64
_COMPARED = 8192  # numbers compared at a time: what registers hold


@dataclasses.dataclass(frozen=True)
class Case(op.Case):
    """With few tokens all of them are rows of every product."""

    @property
    def slots(self) -> int:
        """The most experts that can be hit."""
        return min(self.experts, self.choices)

    @property
    def rows(self) -> int:
        """Tokens with padding."""
        return power(self.tokens, LEAST)


@dataclasses.dataclass(frozen=True)
class Tile(op.Tile):
    """Read for every ``lanes``-th expert that is hit."""

    lanes: int


#: By platform. CUDA's are within 3 % of the fastest of eight on an H200; ROCm's were chosen by registers and local
#: memory alone (gfx942 has 64 KB).
TILES = {
    "cuda": Tiles(up=Tile(32, 128, 4, 4, lanes=16), down=Tile(32, 128, 4, 4, lanes=8)),
    "rocm": Tiles(up=Tile(32, 128, 4, 2, lanes=32), down=Tile(64, 128, 4, 2, lanes=32)),
}


case = functools.partial(op.case, Case)


def refuse(case: Case) -> str | None:
    """Why the kernels cannot serve this case; None if they can."""
    if case.tokens > MAX_TOKENS:
        return f"{case.tokens} tokens: beyond {MAX_TOKENS} experts are served by tokens that are sorted"
    return op.refuse(case)


def build(case: Case, platform: str) -> None:
    """Compile for the current device; raises whatever stands in the way."""
    run = functools.partial(launch, case=case, tiles=TILES[platform])
    with compiling():
        jax.jit(run).lower(*op.shapes(case)).compile()


def bind(case: Case, reference: Callable) -> Callable:
    """The operation, see :func:`specjax.kernels.experts_op.bound`."""
    return op.bound(
        {name: functools.partial(launch, case=case, tiles=tiles) for name, tiles in TILES.items()}, reference
    )


def beyond(case: Case) -> bool:
    """Prefill passes: tokens sorted by expert fill XLA's products."""
    return case.tokens > MAX_TOKENS


def interpreted(case: Case) -> Callable:
    """What :func:`bind` gives, in Pallas' interpreter."""
    run = functools.partial(launch, case=case, tiles=TILES["cuda"], interpret=True)
    return lambda *arrays: run(*arrays[:-1])  # the activation is part of the case


def launch(x, ids, gate, up, down, *, case: Case, tiles: Tiles, interpret: bool = False):
    """All kernels, one after the other: float32 [N, k, D]."""
    ids = ids.reshape(-1).astype(jnp.int32)
    hit = launch_list(ids, case=case, interpret=interpret)
    hidden = launch_up(hit, x, gate, up, case=case, tile=tiles.up, interpret=interpret)
    return launch_down(hit, ids, hidden, down, case=case, tile=tiles.down, interpret=interpret)


def launch_list(ids, *, case: Case, interpret: bool = False):
    """How many experts are hit, and which: int32 [1 + slots]."""
    return pl.pallas_call(
        functools.partial(_list_kernel, case=case),
        grid=(1,),
        out_shape=jax.ShapeDtypeStruct((1 + case.slots,), jnp.int32),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="experts_list",
    )(ids)


def launch_up(hit, x, gate, up, *, case: Case, tile: Tile, interpret: bool = False):
    """``activation(gate x) * up x`` for every listed expert: [slots, rows, F]."""
    tile = tile.fit(case.size, case.width)
    return pl.pallas_call(
        functools.partial(_up_kernel, case=case, tile=tile),
        grid=(case.size // tile.rows, min(tile.lanes, case.slots)),
        out_shape=jax.ShapeDtypeStruct((case.slots, case.rows, case.size), case.dtype),
        compiler_params=triton.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="experts_up",
    )(hit, x, gate, up)


def launch_down(hit, ids, hidden, down, *, case: Case, tile: Tile, interpret: bool = False):
    """Every choice's output: float32 [N, k, D]."""
    tile = tile.fit(case.width, case.size)
    out = pl.pallas_call(
        functools.partial(_down_kernel, case=case, tile=tile),
        grid=(case.width // tile.rows, min(tile.lanes, case.slots)),
        out_shape=jax.ShapeDtypeStruct((case.choices, case.width), jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="experts_down",
    )(hit, ids, hidden, down)
    return out.reshape(case.tokens, case.per_token, case.width)


def _list_kernel(ids_ref, hit_ref, *, case: Case):
    """Experts in the order of their numbers or, if there are more of them than choices, of the first to choose each."""
    by_expert = case.slots == case.experts
    place = jnp.arange(power(case.slots), dtype=jnp.int32)
    known = place < case.slots
    expert = place if by_expert else triton.load(ids_ref.at[place], mask=known, other=-1)
    first = jnp.full(place.shape, case.choices, jnp.int32)
    part = min(power(case.choices), max(16, _COMPARED // place.size))
    for start in range(0, case.choices, part):
        other = start + jnp.arange(part, dtype=jnp.int32)
        ids = triton.load(ids_ref.at[other], mask=other < case.choices, other=-2)
        same = jnp.where(expert[:, None] == ids[None, :], other[None, :], case.choices)
        first = jnp.minimum(first, jnp.min(same, axis=1))
    live = known & (first < case.choices if by_expert else first == place)
    rank = jnp.cumsum(live.astype(jnp.int32))  # from 1 on: the number of experts stands before them
    triton.store(hit_ref.at[jnp.where(live, rank, 1 + case.slots)], expert, mask=live)
    hit_ref[0] = jnp.sum(live.astype(jnp.int32))


def _up_kernel(hit_ref, x_ref, gate_ref, up_ref, hidden_ref, *, case: Case, tile: Tile):
    rows = pl.ds(pl.program_id(0) * tile.rows, tile.rows)
    real = jax.lax.broadcasted_iota(jnp.int32, (case.rows, tile.depth), 0) < case.tokens

    def serve(slot, expert):
        def step(i, sums):
            at = pl.ds(i * tile.depth, tile.depth)
            x = triton.load(x_ref.at[pl.ds(0, case.rows), at], mask=real, other=0)
            return sums[0] + op.dot(x, gate_ref[expert, rows, at]), sums[1] + op.dot(
                x, up_ref[expert, rows, at]
            )

        zero = jnp.zeros((case.rows, tile.rows), jnp.float32)
        g, u = jax.lax.fori_loop(0, case.width // tile.depth, step, (zero, zero))
        hidden_ref[slot, pl.ds(0, case.rows), rows] = (case.activation(g) * u).astype(case.dtype)

    _each(hit_ref, min(tile.lanes, case.slots), serve)


def _down_kernel(hit_ref, ids_ref, hidden_ref, down_ref, out_ref, *, case: Case, tile: Tile):
    start = pl.program_id(0) * tile.rows
    shape, token = (case.rows, tile.rows), jnp.arange(case.rows, dtype=jnp.int32)
    columns = start + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    places = [token * case.per_token + j for j in range(case.per_token)]
    chosen = [triton.load(ids_ref.at[p], mask=token < case.tokens, other=-1) for p in places]

    def serve(slot, expert):
        def step(i, total):
            at = pl.ds(i * tile.depth, tile.depth)
            hidden = hidden_ref[slot, pl.ds(0, case.rows), at]
            return total + op.dot(hidden, down_ref[expert, pl.ds(start, tile.rows), at])

        total = jax.lax.fori_loop(0, case.size // tile.depth, step, jnp.zeros(shape, jnp.float32))
        for place, ids in zip(places, chosen, strict=True):
            # other rows point past the end: the interpreter would write them back where they point
            row = jnp.broadcast_to(jnp.where(ids == expert, place, case.choices)[:, None], shape)
            triton.store(out_ref.at[row, columns], total, mask=row < case.choices)

    _each(hit_ref, min(tile.lanes, case.slots), serve)


def _each(hit_ref, lanes: int, serve: Callable) -> None:
    """``serve(slot, expert)`` for this program's part of the list."""
    lane = pl.program_id(1)

    def one(i, _):
        slot = lane + i * lanes
        serve(slot, hit_ref[1 + slot])

    jax.lax.fori_loop(0, (hit_ref[0] - lane + lanes - 1) // lanes, one, None)
