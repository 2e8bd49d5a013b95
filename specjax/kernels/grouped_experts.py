"""Mixture of experts for many tokens: sorted by expert into tiles of rows, and every tile multiplied with its expert.

Two Pallas-Triton kernels, which compile for CUDA and ROCm. Sorting and gathering are XLA's
(``specjax.layers.grouping``). A program of the first kernel multiplies one tile of rows with some rows of ``gate`` and
``up`` of the tile's expert and keeps ``activation(gate x) * up x`` in the weights' dtype; one of the second multiplies
that with some rows of ``down`` and stores each row where its token wants it. There are as many tiles as any choice of
experts can need; those that stayed empty end at once.

Tiles of the same expert follow one another, so that its weights are read from memory once and from the cache after.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from specjax.core import platform
from specjax.kernels import experts_op as op
from specjax.kernels.building import compiling, first_that_builds
from specjax.kernels.configs import LEAST
from specjax.kernels.experts_op import Tile, Tiles
from specjax.layers.grouping import gathered, group, tile_count, tile_rows

ABOUT = "Pallas-Triton: bfloat16 or float16, sizes that are multiples of 16"


@dataclasses.dataclass(frozen=True)
class Case(op.Case):
    """With many tokens every expert has tiles of its own."""

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return tile_rows(self.choices, self.experts, LEAST)

    @property
    def tiles(self) -> int:
        return tile_count(self.choices, self.experts, self.rows)


#: By platform and rows of a tile at most, the likeliest first; where one does not fit, the next is tried. Chosen by
#: registers and local memory alone (gfx942 has 64 KB).
TILES: dict[str, dict[int, tuple[Tiles, ...]]] = {
    "cuda": {
        32: (
            Tiles(Tile(64, 128, 4, 3), Tile(64, 128, 4, 4)),
            Tiles(Tile(32, 64, 4, 2), Tile(32, 64, 4, 2)),
        ),
        64: (
            Tiles(Tile(64, 64, 4, 3), Tile(128, 64, 4, 3)),
            Tiles(Tile(32, 64, 4, 2), Tile(32, 64, 4, 2)),
        ),
        128: (
            Tiles(Tile(64, 64, 8, 3), Tile(128, 64, 8, 3)),
            Tiles(Tile(32, 32, 8, 2), Tile(32, 32, 8, 2)),
        ),
    },
    "rocm": {
        32: (
            Tiles(Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
            Tiles(Tile(32, 64, 4, 1), Tile(32, 64, 4, 1)),
        ),
        64: (
            Tiles(Tile(64, 64, 4, 1), Tile(64, 64, 4, 2)),
            Tiles(Tile(32, 64, 4, 1), Tile(32, 64, 4, 1)),
        ),
        128: (
            Tiles(Tile(64, 64, 8, 1), Tile(128, 64, 8, 1)),
            Tiles(Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
        ),
    },
}


def choices(case: Case, name: str) -> tuple[Tiles, ...]:
    """Tiles for a case on platform ``name``, the likeliest first."""
    by_rows = TILES[name]
    return by_rows[min(most for most in by_rows if most >= case.rows)]


case = functools.partial(op.case, Case)


def refuse(case: Case) -> str | None:
    """Why the kernels cannot serve this case; None if they can."""
    if reason := op.refuse(case):
        return reason
    if case.tiles > 65535:
        return f"{case.tiles} tiles: a launch has at most 65535"
    return None


def build(case: Case, name: str) -> None:
    """Compile for the current device; raises whatever stands in the way."""
    _chosen(case, name)


@functools.lru_cache(maxsize=256)
def _chosen(case: Case, name: str) -> Tiles:
    """The first tiles that compile for the current device."""

    def one(tiles: Tiles):
        run = functools.partial(launch, case=case, tiles=tiles)
        with compiling():
            jax.jit(run).lower(*op.shapes(case)).compile()

    return first_that_builds(choices(case, name), one)


def bind(case: Case, reference: Callable) -> Callable:
    """The operation, see :func:`specjax.kernels.experts_op.bound`."""
    run = {name: functools.partial(launch, case=case, tiles=_tiles_for(case, name)) for name in TILES}
    return op.bound(run, reference)


def interpreted(case: Case) -> Callable:
    """What :func:`bind` gives, in Pallas' interpreter."""
    run = functools.partial(launch, case=case, tiles=choices(case, "cuda")[0], interpret=True)
    return lambda *arrays: run(*arrays[:-1])  # the activation is part of the case


def _tiles_for(case: Case, name: str) -> Tiles:
    """What was built here; elsewhere than here the likeliest."""
    return _chosen(case, name) if platform.backend() == name else choices(case, name)[0]


def launch(x, ids, gate, up, down, *, case: Case, tiles: Tiles, interpret: bool = False):
    """Sorting and both kernels: float32 [N, k, D]."""
    groups = group(ids.reshape(-1).astype(jnp.int32), case.experts, case.rows)
    plan = jnp.concatenate([groups.used[None], groups.expert]).astype(jnp.int32)
    hidden = launch_up(
        plan, gathered(x, groups, case.per_token), gate, up, case=case, tile=tiles.up, interpret=interpret
    )
    return launch_down(plan, groups.choice, hidden, down, case=case, tile=tiles.down, interpret=interpret)


def launch_up(plan, rows, gate, up, *, case: Case, tile: Tile, interpret: bool = False):
    """``activation(gate x) * up x`` of every row that holds a choice: [tiles * rows, F]."""
    tile = tile.fit(case.size, case.width)
    return pl.pallas_call(
        functools.partial(_up_kernel, case=case, tile=tile),
        grid=(case.size // tile.rows, case.tiles),
        out_shape=jax.ShapeDtypeStruct((case.tiles * case.rows, case.size), case.dtype),
        compiler_params=triton.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="grouped_experts_up",
    )(plan, rows, gate, up)


def launch_down(plan, choice, hidden, down, *, case: Case, tile: Tile, interpret: bool = False):
    """Every choice's output: float32 [N, k, D]."""
    tile = tile.fit(case.width, case.size)
    out = pl.pallas_call(
        functools.partial(_down_kernel, case=case, tile=tile),
        grid=(case.width // tile.rows, case.tiles),
        out_shape=jax.ShapeDtypeStruct((case.choices, case.width), jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="grouped_experts_down",
    )(plan, choice, hidden, down)
    return out.reshape(case.tokens, case.per_token, case.width)


def _up_kernel(plan_ref, x_ref, gate_ref, up_ref, hidden_ref, *, case: Case, tile: Tile):
    index, start = pl.program_id(1), pl.program_id(0) * tile.rows

    @pl.when(index < plan_ref[0])
    def _():
        expert, rows = plan_ref[1 + index], pl.ds(index * case.rows, case.rows)
        columns = pl.ds(start, tile.rows)

        def step(i, sums):
            at = pl.ds(i * tile.depth, tile.depth)
            x = x_ref[rows, at]
            gate, up = gate_ref[expert, columns, at], up_ref[expert, columns, at]
            return sums[0] + op.dot(x, gate), sums[1] + op.dot(x, up)

        zero = jnp.zeros((case.rows, tile.rows), jnp.float32)
        g, u = jax.lax.fori_loop(0, case.width // tile.depth, step, (zero, zero))
        hidden_ref[rows, columns] = (case.activation(g) * u).astype(case.dtype)


def _down_kernel(plan_ref, choice_ref, hidden_ref, down_ref, out_ref, *, case: Case, tile: Tile):
    index, start = pl.program_id(1), pl.program_id(0) * tile.rows
    shape = case.rows, tile.rows

    @pl.when(index < plan_ref[0])
    def _():
        expert, rows = plan_ref[1 + index], pl.ds(index * case.rows, case.rows)

        def step(i, total):
            at = pl.ds(i * tile.depth, tile.depth)
            return total + op.dot(hidden_ref[rows, at], down_ref[expert, pl.ds(start, tile.rows), at])

        total = jax.lax.fori_loop(0, case.size // tile.depth, step, jnp.zeros(shape, jnp.float32))
        # rows without a choice point past the end: the interpreter would write them back where they point
        place = jnp.broadcast_to(choice_ref[rows][:, None], shape)
        columns = start + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        triton.store(out_ref.at[place, columns], total, mask=place < case.choices)
