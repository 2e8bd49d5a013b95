"""Grouped-query attention of a block over cached keys, masked by position alone."""

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, Int

from specjax.layers.linear import precision_of

# XLA's CPU back end copies a whole cache to change its layout for a batched product; a plain product per
# row and head reads it in place. Beyond this many products the copies cost less than compiling them all.
_CPU_UNROLLED = 64


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
    scores = _product(packed, keys, transposed=True)
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
    out = _product(weights, jnp.where(seen, values, 0), transposed=False)
    return rearrange(out.astype(q.dtype), "b g (r q) c -> b q (g r) c", q=queries)


def _visible(q_pos, key_pos, window) -> jax.Array:
    q, key = q_pos[:, :, None], key_pos[:, None, :]
    ok = (key >= 0) & (key <= q)
    return ok if window is None else ok & (key > q - window)


def _product(a: jax.Array, b: jax.Array, transposed: bool) -> jax.Array:
    """float32 ``[B G N M]`` product per row and head; ``transposed``: contract the last axis of both."""
    options = {"precision": precision_of(a.dtype), "preferred_element_type": jnp.float32}
    contract = (((1,), (1 if transposed else 0,)), ((), ()))
    if jax.default_backend() == "cpu" and a.shape[0] * a.shape[1] <= _CPU_UNROLLED:
        one = lambda i, g: jax.lax.dot_general(a[i, g], b[i, g], contract, **options)  # noqa: E731
        return jnp.stack([jnp.stack([one(i, g) for g in range(a.shape[1])]) for i in range(a.shape[0])])
    return jnp.einsum("bgnk,bgmk->bgnm" if transposed else "bgnk,bgkm->bgnm", a, b, **options)
