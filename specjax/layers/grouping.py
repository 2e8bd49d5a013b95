"""Tokens sorted by what they chose, into tiles of a fixed number of rows that belong to one expert each."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

TILE_MIN, TILE_MAX = 8, 128


class Groups(NamedTuple):
    """Where every choice lies among the rows of all tiles.

    ``slot``: row of each choice; ``choice``: which choice a row holds (their number: none); ``expert``: of each tile
    (any for tiles that are not used); ``used``: tiles that hold anything.
    """

    slot: Int[Array, " n"]
    choice: Int[Array, " rows"]
    expert: Int[Array, " tiles"]
    used: Int[Array, ""]


def tile_rows(choices: int, experts: int, least: int = TILE_MIN) -> int:
    """A power of two near the mean number of choices per expert."""
    tile = least
    while tile < min(TILE_MAX, choices / experts):
        tile *= 2
    return tile


def tile_count(choices: int, experts: int, tile: int) -> int:
    """Tiles that are enough for any distribution of the choices over experts."""
    return choices // tile + min(experts, choices)


def group(expert: Int[Array, " n"], experts: int, tile: int) -> Groups:
    """Tiles of ``tile`` rows for choices of experts in any order; within an expert the order is kept."""
    n, tiles = expert.size, tile_count(expert.size, experts, tile)
    count = jnp.bincount(expert, length=experts)
    last = jnp.cumsum(-(-count // tile))  # tiles up to and including each expert's
    first_row = (last - -(-count // tile)) * tile
    order = jnp.argsort(expert, stable=True)
    rank = jnp.zeros_like(expert).at[order].set(jnp.arange(n, dtype=expert.dtype))
    rank = rank - (jnp.cumsum(count) - count)[expert]  # place among the choices of the same expert
    slot = first_row[expert] + rank
    choice = jnp.full(tiles * tile, n, jnp.int32).at[slot].set(jnp.arange(n, dtype=jnp.int32))
    tile_expert = jnp.minimum(jnp.searchsorted(last, jnp.arange(tiles), side="right"), experts - 1)
    return Groups(slot, choice, tile_expert, last[-1])


def gathered(x: Float[Array, "N D"], groups: Groups, per_token: int) -> Float[Array, "rows D"]:
    """The token of each row of all tiles; zeros where a row holds none."""
    # a row without a choice names a token past the last
    return x.at[groups.choice // per_token].get(mode="fill", fill_value=0)
