"""From raw logits to the distribution a token is drawn from, and the keys that draw it.

Order: logit bias, penalties, temperature, top-k, top-p, min-p. A draft sees temperature only; everything
here belongs to the target, at every drafted position and at the bonus position alike.

Keys are a pure function of the request's seed, a tag and the absolute position of the token decided, so
a draw depends neither on the neighbours in the batch nor on how rounds are cut into chunks.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from specjax.types import Counts, Sampling

MATCH, DRAFT, ACCEPT, EXTRA = 1, 2, 3, 4


def row_keys(key_data: UInt32[Array, "B 2"]) -> Array:
    """Typed key array [B] from the raw data kept in the state."""
    return jax.random.wrap_key_data(key_data, impl="threefry2x32")


def position_keys(keys: Array, tag: int, pos: Int[Array, "B Q"]) -> Array:
    """Typed keys [B, Q], one per row and absolute position."""
    fold = lambda key, p: jax.random.fold_in(jax.random.fold_in(key, tag), p)  # noqa: E731
    return jax.vmap(jax.vmap(fold, (None, 0)))(keys, pos)


def round_keys(keys: Array, length: Int[Array, " B"]) -> Array:
    """Keys of one round: folding in the length at its start keeps the noise of two rounds apart when both
    decide the same position, without which rejection rules are biased."""
    return jax.vmap(jax.random.fold_in)(keys, length)


def gumbel(keys: Array, vocab: int) -> Float[Array, "B Q V"]:
    """Independent standard Gumbel noise for each key."""
    return jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, (vocab,), jnp.float32)))(keys)


def adjust(
    logits: Float[Array, "B Q V"],
    sampling: Sampling,
    counts: Counts | None,
    drafts: Int[Array, "B K"],
    first: Int[Array, ""] | int,
) -> Float[Array, "B Q V"]:
    """Logit bias and penalties. Position i sees the committed tokens and drafts 0..i-1 as its history;
    ``first`` is the index of the first position given."""
    if sampling.bias is not None:
        logits = logits + sampling.bias[:, None]
    if counts is None:
        return logits
    used = _counts_before(counts.output, drafts, first + jnp.arange(logits.shape[1]))
    if sampling.repetition is not None:
        r = sampling.repetition[:, None, None]
        seen = counts.prompt[:, None] | (used > 0)
        logits = jnp.where(seen, jnp.where(logits > 0, logits / r, logits * r), logits)
    if sampling.frequency is not None:
        logits = logits - sampling.frequency[:, None, None] * used
    if sampling.presence is not None:
        logits = logits - sampling.presence[:, None, None] * (used > 0)
    return logits


def _counts_before(output, drafts, positions) -> Int[Array, "B Q V"]:
    used = jnp.broadcast_to(output[:, None], (output.shape[0], positions.shape[0], output.shape[1]))
    vocab = jnp.arange(output.shape[1])
    for j in range(drafts.shape[1]):
        hit = (drafts[:, j, None, None] == vocab) & (j < positions)[None, :, None]
        used = used + hit
    return used


def temper(logits: Float[Array, "B Q V"], temperature: Float[Array, " B"]) -> Float[Array, "B Q V"]:
    """Divide by the row's temperature, the largest logit moved to 0 so that no temperature overflows."""
    logits = logits - jnp.max(logits, -1, keepdims=True)
    return logits / jnp.where(temperature > 0, temperature, 1.0)[:, None, None]


def filtered(logits: Float[Array, "B Q V"], sampling: Sampling) -> Float[Array, "B Q V"]:
    """Top-k, top-p and min-p, in this order: what lies outside becomes -inf. Ties at a threshold stay."""
    order = _sortable(logits)
    if sampling.top_k is not None:
        k = jnp.where(sampling.top_k > 0, sampling.top_k, logits.shape[-1])[:, None]
        at_least = lambda t: jnp.sum(order >= t[..., None], -1) >= k  # noqa: E731
        logits = _keep_from(logits, order, _largest(at_least, order.shape[:-1]))
    if sampling.top_p is not None:
        probs, p = jax.nn.softmax(logits, -1), sampling.top_p[:, None]
        mass = lambda t: jnp.sum(jnp.where(order >= t[..., None], probs, 0), -1) >= p  # noqa: E731
        cut = jnp.where(p >= 1, jnp.uint32(0), _largest(mass, order.shape[:-1]))
        logits = _keep_from(logits, order, cut)
    if sampling.min_p is not None:
        floor = jnp.max(logits, -1) + jnp.log(sampling.min_p[:, None])
        logits = jnp.where(logits >= floor[..., None], logits, -jnp.inf)
    return logits


def _keep_from(logits, order, cut):
    return jnp.where(order >= cut[..., None], logits, -jnp.inf)


def _sortable(x: Float[Array, "*N"]) -> UInt32[Array, "*N"]:
    """Unsigned integers in the same order as the floats (-0.0 counts as 0.0)."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(0x80000000)
    bits = jnp.where(bits == sign, jnp.uint32(0), bits)  # compilers drop an addition of 0.0
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _largest(holds, shape) -> UInt32[Array, "*N"]:
    """Largest uint32 t for which ``holds(t)``, a condition that turns false once as t grows.

    Thirty-two masked sums instead of a sort of the vocabulary: exact, and several times cheaper.
    """

    def step(i, t):
        trial = t | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(holds(trial), trial, t)

    return jax.lax.fori_loop(0, 32, step, jnp.zeros(shape, jnp.uint32))


def count_tokens(counts: Counts, tokens: Int[Array, "B Q"], emitted: Int[Array, " B"]) -> Counts:
    """Add the first ``emitted`` tokens of each row to the output history."""
    live = jnp.arange(tokens.shape[1]) < emitted[:, None]
    rows = jnp.arange(tokens.shape[0])[:, None]
    return dataclasses.replace(
        counts, output=counts.output.at[rows, tokens].add(live.astype(counts.output.dtype))
    )


def nonfinite(logits: Float[Array, "B Q V"]) -> Bool[Array, "B Q"]:
    """True where no token can be drawn: NaN, +inf, or nothing above -inf (padding columns are -inf)."""
    return ~jnp.isfinite(jnp.max(logits, -1))
