"""Attention of a block of queries over a cached context: the operation, its settings, and the reference.

A block is what a drafter fills in one pass or what a target verifies: ``N`` rows at consecutive positions from
``start``. It sees cached keys and, where they are given apart (a drafter's block never enters the cache), its own.
"""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.kernels import dispatch
from specjax.layers.softmax import attend_parts


@dataclasses.dataclass(frozen=True)
class View:
    """What rows see and how scores are made.

    ``causal``: row n at position ``start + n`` sees no later position; otherwise whatever is cached and the whole
    block. ``window``: how many positions back, counted from each row (``"row"``: position > own - window, in both
    directions within a block that is not causal) or from the block's start (``"anchor"``: position >= start - window;
    the block itself is seen whole). ``softcap``: ``cap * tanh(score / cap)``.
    """

    scale: float
    causal: bool
    window: int | None = None
    window_from: Literal["row", "anchor"] = "row"
    softcap: float | None = None


def attend_block(
    q: Float[Array, "B N H C"],
    keys: Float[Array, "B G S C"],
    values: Float[Array, "B G S C"],
    start: Int[Array, " B"],
    end: Int[Array, " B"],
    block: tuple[Float[Array, "B N G C"], Float[Array, "B N G C"]] | None = None,
    positions: Int[Array, "B S"] | None = None,
    *,
    view: View,
    implementation: str | None = None,
) -> Float[Array, "B N H C"]:
    """Softmax attention in float32, rounded to the queries' type.

    Cached slots at or beyond ``end`` hold garbage, possibly NaN, and are never seen. Slot s holds position s, or
    ``positions`` (a ring; -1 = empty). A row that sees nothing gives zeros. ``block``: keys and values of the block's
    rows, if they are not in the cache. ``implementation``: ``"auto"``, ``"pallas"`` or ``"xla"`` (None: what
    ``SPECJAX_KERNELS`` says); ``"pallas"`` raises ValueError where the kernel cannot serve.
    """
    run = lambda *arrays: reference(*arrays, view=view)  # noqa: E731
    facts = (q, keys, values, block, positions, view)
    run = dispatch.implementation("block_attention", facts, run, implementation)
    return run(q, keys, values, start, end, block, positions)


def reference(q, keys, values, start, end, block=None, positions=None, *, view: View):
    """The same in jnp: scores of the whole context in float32."""
    past = past_visible(view, q.shape[1], start, end, keys.shape[2], positions)
    parts = [(keys, values, past)]
    if block is not None:
        own = jnp.broadcast_to(own_visible(view, q.shape[1]), (q.shape[0], q.shape[1], q.shape[1]))
        parts.append((block[0].swapaxes(1, 2), block[1].swapaxes(1, 2), own))
    return attend_parts(q, parts, view.scale, view.softcap)


def past_visible(view: View, rows: int, start, end, slots: int, positions=None) -> Bool[Array, "B N S"]:
    """Cached slots that each row of the block sees."""
    slot, start = jnp.arange(slots, dtype=start.dtype), start[:, None, None]
    at = slot[None] if positions is None else positions
    row = start + jnp.arange(rows, dtype=start.dtype)[:, None]
    seen = ((slot < end[:, None]) & (at >= 0))[:, None]
    at = at[:, None]
    if view.causal:
        seen = seen & (at <= row)
    if view.window is not None:
        seen = seen & ((at > row - view.window) if view.window_from == "row" else (at >= start - view.window))
    return jnp.broadcast_to(seen, (start.shape[0], rows, slots))


def own_visible(view: View, rows: int) -> Bool[Array, "N N"]:
    """Rows of the block that each of its rows sees."""
    row, other = jnp.arange(rows)[:, None], jnp.arange(rows)
    seen = other <= row if view.causal else jnp.ones((rows, rows), bool)
    if view.window is not None and view.window_from == "row":
        seen = seen & (jnp.abs(row - other) < view.window)
    return seen
