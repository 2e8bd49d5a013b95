"""Grouped-query attention of a block over cached keys, masked by position alone."""

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, Int

from specjax.layers.linear import precision_of


def attend(
    q: Float[Array, "B Q H C"],
    keys: Float[Array, "B G S C"],
    values: Float[Array, "B G S C"],
    q_pos: Int[Array, "B Q"],
    key_pos: Int[Array, "B S"],
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Float[Array, "B Q H C"]:
    """Softmax attention in float32; query head h reads key/value head ``h // (H/G)``.

    A key is visible when ``0 <= key_pos <= q_pos`` (and ``key_pos > q_pos - window``). Values nobody sees
    are zeroed, since garbage in a cache may be NaN and 0 * NaN is NaN.
    """
    groups, queries = keys.shape[1], q.shape[1]
    packed = rearrange(q, "b q (g r) c -> b g (r q) c", g=groups)
    exact = precision_of(q.dtype)
    scores = jnp.einsum("bgnc,bgsc->bgns", packed, keys, precision=exact, preferred_element_type=jnp.float32)
    scores = rearrange(scores * scale, "b g (r q) s -> b g r q s", q=queries)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    visible = _visible(q_pos, key_pos, window)
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    # a row that sees nothing (padding) must give zeros, not NaN
    top = jnp.maximum(jnp.max(scores, -1, keepdims=True), -1e30)
    weights = jnp.exp(scores - top)
    weights = weights / jnp.maximum(jnp.sum(weights, -1, keepdims=True), 1e-30)
    seen = visible.any(1)[:, None, :, None]
    weights = rearrange(weights, "b g r q s -> b g (r q) s").astype(q.dtype)
    out = jnp.einsum("bgns,bgsc->bgnc", weights, jnp.where(seen, values, 0), precision=exact)
    return rearrange(out.astype(q.dtype), "b g (r q) c -> b q (g r) c", q=queries)


def _visible(q_pos, key_pos, window) -> jax.Array:
    q, key = q_pos[:, :, None], key_pos[:, None, :]
    ok = (key >= 0) & (key <= q)
    return ok if window is None else ok & (key > q - window)
