"""The training pass of block drafters: many blocks per packed row at once.

Any position whose successor is trained may be a block's anchor. Of each row ``A`` of them are drawn; their blocks'
``A x N`` rows attend to the row's injected context, which is made once and shared, and to their own block. Context
is what decoding would hold: positions of the same document before the anchor (whose own features are hidden), in
a sliding layer as far back as in decoding. Layers, inputs and windows are the functions that decode.

Source: DFlash (arXiv 2602.06036) and DSpark (arXiv 2607.05147), as DeepSpec and speculators train them.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int

from specjax.drafters import dflash
from specjax.drafters.body import keys_values, norm, turn
from specjax.drafters.dflash_config import Config, check_k, max_k
from specjax.layers.rope import rope_angles
from specjax.train.attention import take_rows
from specjax.train.products import product
from specjax.train.types import Batch, Features
from specjax.types import Shared

#: Float32 logits that :func:`matches` makes at a time.
_LOGITS_AT_ONCE = 2**28


class Anchors(NamedTuple):
    """Blocks of a batch: each row's anchors by index within the row, ascending, and which are real."""

    at: Int[Array, "R A"]
    real: Bool[Array, "R A"]


class Labels(NamedTuple):
    """What the drafts of every block are to be. ``tokens``: the text's. ``previous``: the token before each draft.
    ``counted``: the block is real, and its text is trained up to and with this token."""

    tokens: Int[Array, "R A K"]
    previous: Int[Array, "R A K"]
    counted: Bool[Array, "R A K"]


def candidates(batch: Batch) -> Bool[Array, "R T"]:
    """Positions whose next token is trained and of the same document."""
    following = lambda x: jnp.pad(x[:, 1:], ((0, 0), (0, 1)))  # noqa: E731
    inside = (batch.doc >= 0) & (following(batch.doc + 1) == batch.doc + 1)
    return inside & following(batch.trained)


def anchors(batch: Batch, count: int, key: jax.Array) -> Anchors:
    """``count`` candidates of every row, drawn uniformly without replacement; all of them where there are fewer, the
    places left over not being real. No row has more places than tokens."""
    good, length = candidates(batch), batch.tokens.shape[1]
    count = min(count, length)
    drawn, at = jax.lax.top_k(jnp.where(good, jax.random.uniform(key, good.shape), -1.0), count)
    at = jnp.sort(jnp.where(drawn >= 0, at, length), -1)
    return Anchors(jnp.minimum(at, length - 1).astype(jnp.int32), at < length)


def labels(batch: Batch, cfg: Config, blocks: Anchors) -> Labels:
    """Tokens behind each anchor: draft i is token ``anchor + 1 + i``, whatever the layout. What lies behind a token
    that is not trained, or the document's end, does not count: in decoding the block would end there."""
    index = blocks.at[:, :, None] + jnp.arange(1, max_k(cfg) + 1)
    flat = index.reshape(index.shape[0], -1)
    take = lambda x, shift=0: take_rows(x, flat - shift).reshape(index.shape)  # noqa: E731
    same = take(batch.doc) == take_rows(batch.doc, blocks.at)[:, :, None]
    wanted = same & take(batch.trained) & (index < batch.tokens.shape[1])
    counted = jnp.cumprod(wanted, -1).astype(bool) & blocks.real[:, :, None]
    return Labels(take(batch.tokens), take(batch.tokens, 1), counted)


def teacher(hidden: Float[Array, "R T D"], cfg: Config, blocks: Anchors) -> Float[Array, "R A K D"]:
    """The target's hidden row that predicts each draft: of the token before it."""
    index = blocks.at[:, :, None] + jnp.arange(max_k(cfg))
    return take_rows(hidden, index.reshape(index.shape[0], -1)).reshape(*index.shape, -1)


def rows(
    p: dflash.Weights,
    shared: Shared,
    cfg: Config,
    batch: Batch,
    features: Features,
    at: Int[Array, "R A"],
) -> Float[Array, "R A K D"]:
    """Final-normed rows that predict the drafts of the blocks anchored ``at``: what
    :func:`specjax.drafters.dflash.drafting_rows` gives over the same context."""
    shape, (r, a) = cfg.body, at.shape
    taps = jnp.concatenate([features.taps[j] for j in cfg.taps], -1)
    fused = dflash.fuse(p, cfg, jnp.where(batch.doc[..., None] >= 0, taps, 0))
    start = take_rows(batch.pos, at)
    x = dflash.block_inputs(p, shared, cfg, take_rows(batch.tokens, at).reshape(-1))
    angles = rope_angles(shape.rope, start.reshape(-1, 1) + jnp.arange(cfg.rows))
    context_angles = rope_angles(shape.rope, batch.pos)
    same = take_rows(batch.doc, at)[:, :, None, None] == batch.doc[:, None, None, :]
    unfold = lambda x: x.reshape(r, a, *x.shape[1:])  # noqa: E731

    def mixer(i: int):
        keys, values = keys_values(p.layers[i], shape, fused)
        keys = turn(keys, shape, context_angles)
        seen = same & dflash.context_seen(cfg, i, start[:, :, None, None], batch.pos[:, None, None, :])

        def mix(q, k, v):
            own = (unfold(k), unfold(v), dflash.block_visible(cfg, i))
            out = attend_blocks(unfold(q), (keys, values, seen), own, shape.scale)
            return out.reshape(q.shape[:-1] + out.shape[-1:])

        return mix

    for i in range(shape.layers):
        x = dflash.block_layer(p, cfg, i, x, angles, mixer(i))
    return unfold(norm(x[:, cfg.first :], p.norm, shape))


def attend_blocks(
    q: Float[Array, "R A N H C"],
    context: tuple[Float[Array, "R T G C"], Float[Array, "R T G C"], Bool[Array, "R A _ T"]],
    own: tuple[Float[Array, "R A N G C"], Float[Array, "R A N G C"], Bool[Array, "N N"]],
    scale: float,
) -> Float[Array, "R A N H C"]:
    """Attention of blocks over their row's context and over themselves as if these were joined.

    Each is (keys, values, visible); ``_`` is N, or 1 where all rows of a block see the same. Scores and softmax are
    float32. They are computed again for the gradient, not kept.
    """
    return jax.checkpoint(functools.partial(_attend, scale))(q, context, own)


def _attend(scale, q, context, own):
    keys, values, seen = context
    own_keys, own_values, own_seen = own
    groups, blocks = keys.shape[2], q.shape[1:3]
    q = rearrange(q, "r a n (g h) c -> r g h a n c", g=groups)
    flat = q.reshape(*q.shape[:2], -1, q.shape[-1])
    past = product("rgmc,rgtc->rgmt", flat, keys.swapaxes(1, 2)) * scale
    past = past.reshape(*q.shape[:3], *blocks, -1)
    past = jnp.where(seen[:, None, None], past, -jnp.inf)
    near = product("rghanc,ramgc->rghanm", q, own_keys) * scale
    near = jnp.where(own_seen, near, -jnp.inf)
    top = jnp.maximum(jnp.max(past, -1, keepdims=True), jnp.max(near, -1, keepdims=True))
    top = jax.lax.stop_gradient(jnp.maximum(top, -1e30))
    past, near = jnp.exp(past - top), jnp.exp(near - top)
    total = jnp.sum(past, -1, keepdims=True) + jnp.sum(near, -1, keepdims=True)
    past, near = ((w / total).astype(q.dtype) for w in (past, near))
    past = past.reshape(*flat.shape[:3], -1)
    out = product("rgmt,rgtc->rgmc", past, values.swapaxes(1, 2)).reshape(q.shape)
    out = out + product("rghanm,ramgc->rghanc", near, own_values)
    return rearrange(out.astype(q.dtype), "r g h a n c -> r a n (g h) c")


#: ``choose(hidden, logits, previous)``: the draft id of every draft, given the right token before each.
Choose = Callable[[Float[Array, "B K D"], Float[Array, "B K V"], Int[Array, "B K"]], Int[Array, "B K"]]


def matches(
    p: dflash.Weights,
    shared: Shared,
    cfg: Config,
    batch: Batch,
    features: Features,
    k: int,
    choose: Choose,
) -> Bool[Array, "R T k"]:
    """Which of the first ``k`` drafts of a block at every position are the text's, see
    :meth:`specjax.train.types.Method.matches`. A few anchors of every row are done at a time.

    ValueError when a block does not give ``k`` drafts.
    """
    check_k(cfg, k)
    r, length = batch.tokens.shape
    chunk = max(1, min(length, _LOGITS_AT_ONCE // (r * k * cfg.vocab)))
    ids = dflash.target_ids(p)

    def some(at: Int[Array, " A"]) -> Bool[Array, "R A k"]:
        at = jnp.broadcast_to(at, (r, *at.shape))
        truth = labels(batch, cfg, Anchors(at, at < length))
        hidden = rows(p, shared, cfg, batch, features, jnp.minimum(at, length - 1))
        fold = lambda x: x[:, :, :k].reshape(-1, k, *x.shape[3:])  # noqa: E731
        hidden, previous = fold(hidden), fold(truth.previous)
        drafts = choose(hidden, dflash.unembed(p, shared, cfg, hidden), previous)
        drafts = drafts if ids is None else ids[drafts]
        return (drafts == fold(truth.tokens)).reshape(*at.shape, k)

    places = jnp.arange(-(-length // chunk) * chunk, dtype=jnp.int32).reshape(-1, chunk)
    found = jnp.moveaxis(jax.lax.map(some, places), 0, 1).reshape(r, -1, k)[:, :length]
    return found & inside(batch, k) & candidates(batch)[:, :, None]


def inside(batch: Batch, k: int) -> Bool[Array, "R T k"]:
    """Whether token ``t + 1 + i`` is of the document of token t."""
    length = batch.doc.shape[1]
    index = jnp.arange(length)[:, None] + jnp.arange(1, k + 1)
    doc = batch.doc[:, jnp.minimum(index, length - 1)]
    return (doc == batch.doc[:, :, None]) & (doc >= 0) & (index < length)
