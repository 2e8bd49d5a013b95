"""Drafting one token after the other from a recycled state: what EAGLE-3 and MTP drafters share."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.drafters.pick import greedy, pick
from specjax.layers.loop import scan_short
from specjax.layers.norm import Rows, chosen
from specjax.types import AbsorbIn, Ctx, Mode, Proposal


class Place(NamedTuple):
    """Where a block of pairs stands: positions, how many are real, and the one whose output is wanted."""

    pos: Int[Array, "B Q"]
    valid: Int[Array, " B"]
    last: Int[Array, " B"]
    mode: Mode


def absorbed(block: AbsorbIn) -> Place:
    """A block of the target's: its first ``keep`` pairs are real, the last of them gives the state."""
    return Place(block.pos, block.keep, jnp.maximum(block.keep - 1, 0), block.mode)


def drafted(pos: Int[Array, "B 1"]) -> Place:
    """One pair per row of the drafter's own."""
    one = jnp.ones(pos.shape[:1], jnp.int32)
    return Place(pos, one, one - 1, "verify")


def row(x: Rows, index: Int[Array, " B"]) -> Rows:
    """Row ``index[b]`` of every block: ``[B Q ...]`` -> ``[B 1 ...]``."""
    return chosen(x, lambda a: jnp.take_along_axis(a, index.reshape(-1, *[1] * (a.ndim - 1)), 1))


def embed(
    own: Float[Array, "V D"] | None, lent: Float[Array, "W T"], tokens: Int[Array, "B Q"], dtype: Any
) -> Array:
    """Raw rows ``[B Q D]`` of the drafter's own table or the lent one, whose width may differ. Ids beyond a smaller
    table (the target's padding) take its last row."""
    table = lent if own is None else own
    return table[jnp.minimum(tokens, table.shape[0] - 1)].astype(dtype)


def kept(block: AbsorbIn, fresh: Float[Array, "B D"], before: Float[Array, "B D"]) -> Float[Array, "B D"]:
    """The state after a block: ``fresh``, or the one before where the row kept nothing."""
    return jnp.where(block.keep[:, None] > 0, fresh.astype(before.dtype), before)


#: ``advance(token, state, pos, cache)``: state and cache after one more (state, token) pair per row.
Advance = Callable[
    [Int[Array, " B"], Float[Array, "B D"], Int[Array, "B 1"], Any], tuple[Float[Array, "B D"], Any]
]


def draft(
    k: int,
    state: Float[Array, "B D"],
    cache: Any,
    logits: Callable[[Float[Array, "B D"]], Float[Array, "B Vd"]],
    advance: Advance,
    ids: Int[Array, " Vd"] | None,
    ctx: Ctx,
    keys: Array | None,
    best: Callable[[Float[Array, "B D"]], Int[Array, " B"]] | None = None,
) -> tuple[Proposal, Any]:
    """``k`` tokens per row in k - 1 passes, and the cache with what was fed in it.

    The first token comes from ``state``, that of the last committed pair. Pair i of the round is (state after i
    drafts, draft i) at position ``length - 2 + i``. ``ids``: target id of every draft id (None: the same). With
    ``keys`` tokens are drawn and q is kept; without, ``best`` gives the draft id with the largest logit.
    """

    def choose(state, step):
        if best is not None and greedy(keys, ctx.temperature):
            token, q = best(state), None
        else:
            token, q = pick(logits(state), keys, step, ctx.temperature)
        return (token if ids is None else ids[token]), q

    def one(carry, step):
        state, cache, token = carry
        state, cache = advance(token, state, ctx.length[:, None] - 2 + step, cache)
        token, q = choose(state, step)
        return (state, cache, token), (token, q)

    first = choose(state, 0)
    carry = (state, cache, first[0])
    (_, cache, _), rest = scan_short(one, carry, jnp.arange(1, k, dtype=jnp.int32))
    tokens, q = jax.tree.map(lambda a, b: jnp.concatenate([a[:, None], b.swapaxes(0, 1)], 1), first, rest)
    count = jnp.full(tokens.shape[:1], k, jnp.int32)
    if q is None or ctx.temperature is None:
        return Proposal(tokens, count), cache
    return Proposal(tokens, count, q=q, q_ids=ids, point=ctx.temperature <= 0), cache
