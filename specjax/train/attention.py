"""Attention of training: rows of packed documents over what all of them see and over what is theirs alone.

In decoding a draft is made over the pairs of the committed text and those of the drafts before it. In training every
position of a text begins a round of its own at once, so a row sees two sets of keys: the *context*, made in the first
step by all rows up to its own and shared between queries; and its *own*, made in later steps, which no other row sees.
Own keys are few, so their scores are sums of products of elements; nothing of the size rows x rows x steps exists.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.train.products import product
from specjax.train.types import Batch

#: Keys and values of one earlier step, one of each per row.
Own = tuple[Float[Array, "R N G C"], Float[Array, "R N G Cv"]]


def take_rows(x: Array, rows: Int[Array, "R N"] | None) -> Array:
    """Rows ``x[r, rows[r]]`` of an array ``[R T ...]``, those beyond the end being the last; None: all of them."""
    if rows is None:
        return x
    index = jnp.minimum(rows, x.shape[1] - 1)
    return jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 2)), 1)


def same_document(batch: Batch, rows: Int[Array, "R N"] | None = None) -> Bool[Array, "R N T"]:
    """Whether token t is of the document that row ``rows[r, n]`` is of (None: every row). Padding is of none."""
    doc = take_rows(batch.doc, rows)[:, :, None]
    return (doc == batch.doc[:, None, :]) & (doc >= 0)


def visible(
    batch: Batch, rows: Int[Array, "R N"] | None = None, ahead: int = 0, window: int | None = None
) -> Bool[Array, "R N T"]:
    """What of its context each row sees: its document up to itself, as far back as ``window`` reaches from ``ahead``
    positions behind it, where the row's later steps stand."""
    pos = take_rows(batch.pos, rows)[:, :, None]
    key = batch.pos[:, None, :]
    seen = same_document(batch, rows) & (key <= pos)
    return seen if window is None else seen & (key > pos + ahead - window)


def attend_packed(
    q: Float[Array, "R N H C"],
    keys: Float[Array, "R T G C"],
    values: Float[Array, "R T G Cv"],
    seen: Bool[Array, "R N T"],
    own: tuple[Own, ...],
    scale: float,
    softcap: float | None = None,
) -> Float[Array, "R N H Cv"]:
    """Attention over context and own keys as if they were joined; scores and softmax in float32.

    A row that sees nothing gives zeros. Scores are computed a second time for the gradient instead of being kept.
    """

    def run(q, keys, values, seen, own):
        return _attend(q, keys, values, seen, own, scale, softcap)

    return jax.checkpoint(run)(q, keys, values, seen, own)


def _attend(q, keys, values, seen, own, scale, softcap):
    grouped = q.reshape(*q.shape[:2], keys.shape[2], -1, q.shape[-1])  # [R N G A C]
    scores = _capped(product("rngac,rtgc->rgant", grouped, keys) * scale, softcap)
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    top = jnp.max(scores, -1)
    if own:
        own_keys, own_values = (jnp.stack(x, 2) for x in zip(*own, strict=True))  # [R N J G C]
        mine = _capped(_own_scores(grouped, own_keys) * scale, softcap)
        top = jnp.maximum(top, jnp.max(mine, -1))
    top = jax.lax.stop_gradient(jnp.maximum(top, -1e30))[..., None]
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, -1, keepdims=True)
    if own:
        mine = jnp.exp(mine - top)
        total = total + jnp.sum(mine, -1, keepdims=True)
    total = jnp.maximum(total, 1e-30)
    out = product("rgant,rtgc->rngac", (weights / total).astype(q.dtype), values)
    if own:
        out = out + _own_mix((mine / total).astype(q.dtype), own_values)
    return out.reshape(*q.shape[:3], -1).astype(q.dtype)


def _capped(scores, softcap):
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def _own_scores(q, keys):
    """``[R G A N J]`` of queries ``[R N G A C]`` and each row's own keys ``[R N J G C]``."""
    products = q[:, :, None].astype(jnp.float32) * keys[:, :, :, :, None].astype(jnp.float32)
    return jnp.sum(products, -1).transpose(0, 3, 4, 1, 2)


def _own_mix(weights, values):
    """``[R N G A C]`` of weights ``[R G A N J]`` and each row's own values ``[R N J G C]``."""
    weights = weights.transpose(0, 3, 4, 1, 2)[..., None].astype(jnp.float32)
    return jnp.sum(weights * values[:, :, :, :, None].astype(jnp.float32), 2)
