"""Where the work of block attention lies: the case, the grid, and the flat list of tiles as every program sees it."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import triton

from specjax.kernels.block_attention_op import View
from specjax.kernels.configs import LEAST, Attention
from specjax.kernels.sizes import power


@dataclasses.dataclass(frozen=True)
class Case:
    """What decides whether and how the kernels are built."""

    batch: int
    rows: int
    heads: int
    kv_heads: int
    size: int
    value_size: int
    slots: int
    dtype: Any
    own: bool
    ring: bool
    view: View

    @property
    def group(self) -> int:
        """Query heads that share keys."""
        return self.heads // self.kv_heads

    @property
    def packed(self) -> int:
        """Query rows per key/value head."""
        return self.rows * self.group

    @property
    def padded(self) -> int:
        """Head size with padding."""
        return power(self.size, LEAST)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The grid: query rows of a program, how many such tiles of queries a head has, programs."""

    case: Case
    tile: Attention
    rows: int
    programs: int

    @property
    def stacks(self) -> int:
        """Tiles of query rows per key/value head; each reads the keys anew."""
        return -(-self.case.packed // self.rows)

    @property
    def lines(self) -> int:
        """Lists of tiles per row of the batch."""
        return self.case.kv_heads * self.stacks


def plan(case: Case, tile: Attention, most_rows: int, processors: int) -> Plan:
    """The grid for these tiles: never more programs than there could be work for."""
    rows = min(power(case.packed, LEAST), most_rows)
    lines = case.batch * case.kv_heads * -(-case.packed // rows)
    longest = lines * (-(-case.slots // tile.keys) + case.own)
    return Plan(case, tile, rows, max(1, min(processors * tile.resident, -(-longest // tile.least))))


# Where tiles are. All of this is for one row or, as vectors, for all rows of the batch.


def tiles_of(plan: Plan, start, end):
    """Tiles of the cache: the first one seen, the first and last + 1 of those seen whole by every row, the end."""
    case, view, keys = plan.case, plan.case.view, plan.tile.keys
    end = jnp.minimum(end, case.slots)
    stop = (end + keys - 1) // keys
    first = whole = jnp.zeros_like(stop)
    if case.ring:
        return first, stop, stop, stop
    if view.window is not None:
        low = jnp.maximum(start - view.window + (view.window_from == "row"), 0)
        first = jnp.minimum(low // keys, stop)
        past = jnp.maximum(start + case.rows - view.window, 0) if view.window_from == "row" else low
        whole = jnp.clip((past + keys - 1) // keys, first, stop)
    until = jnp.minimum(end, start + 1) if view.causal else end
    return first, whole, jnp.maximum(jnp.minimum(until // keys, stop), whole), stop


@dataclasses.dataclass(frozen=True)
class Listed:
    """The flat list of tiles, as every program knows it: vectors over rows of the batch, and scalars."""

    plan: Plan
    lane: Any
    counts: Any
    upto: Any
    total: Any
    share: Any

    def row(self, flat):
        """The row of the batch to which tile ``flat`` belongs."""
        return jnp.sum((self.upto <= flat).astype(jnp.int32))

    def line(self, b):
        """Where row b's tiles begin, and how many each of its lines has."""
        before = jnp.sum(jnp.where(self.lane < b, self.counts, 0))
        return before, jnp.sum(jnp.where(self.lane == b, self.counts, 0)) // self.plan.lines


def listed_tiles(start_ref, end_ref, plan: Plan) -> Listed:
    case = plan.case
    lane = jnp.arange(power(case.batch, LEAST), dtype=jnp.int32)
    there = lane < case.batch
    start = triton.load(start_ref.at[lane], mask=there, other=0)
    end = triton.load(end_ref.at[lane], mask=there, other=0)
    first, _, _, stop = tiles_of(plan, start, end)
    # a line without tiles would leave its output unwritten
    counts = jnp.where(there, jnp.maximum(stop - first + case.own, 1), 0) * plan.lines
    total = jnp.sum(counts)
    share = jnp.maximum((total + plan.programs - 1) // plan.programs, plan.tile.least)
    return Listed(plan, lane, counts, jnp.cumsum(counts), total, share)
