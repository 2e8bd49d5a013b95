"""Softmax attention over sets of keys, in plain jnp: what runs where no kernel does."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float

from specjax.layers.linear import precision_of

# XLA's CPU back end copies a whole cache to change its layout for a batched product; a plain product per
# row and head reads it in place. Beyond this many products the copies cost less than compiling them all.
_CPU_UNROLLED = 64


def attend_parts(
    q: Float[Array, "B Q H C"],
    parts: Sequence[tuple[Float[Array, "B G _ C"], Float[Array, "B G _ C"], Bool[Array, "B Q _"]]],
    scale: float,
    softcap: float | None = None,
) -> Float[Array, "B Q H C"]:
    """Softmax attention in float32 over several sets of (keys, values, visible), as if they were joined.

    Query head h reads key/value head ``h // (H/G)``. A cache and a block are two parts, so that nothing has
    to be copied together. Values must be finite even where nobody sees them, since 0 * NaN is NaN: caches keep
    none that is not (:func:`specjax.core.cache.laid_out`), and zeroing them here would copy a cache per layer
    and step. Keys may be anything. A query that sees nothing (padding) gives zeros.
    """
    groups, queries = parts[0][0].shape[1], q.shape[1]
    packed = rearrange(q, "b q (g r) c -> b g (r q) c", g=groups)
    scores = [_scores(packed, keys, visible, scale, softcap) for keys, _, visible in parts]
    top = functools.reduce(jnp.maximum, (jnp.max(s, -1, keepdims=True) for s in scores))
    weights = [jnp.exp(s - jnp.maximum(top, -1e30)) for s in scores]
    total = jnp.maximum(sum(jnp.sum(w, -1, keepdims=True) for w in weights), 1e-30)
    mixed = (
        _mix((w / total).astype(q.dtype), values) for w, (_, values, _) in zip(weights, parts, strict=True)
    )
    out = functools.reduce(jnp.add, mixed)
    return rearrange(out.astype(q.dtype), "b g (r q) c -> b q (g r) c", q=queries)


def _scores(packed, keys, visible, scale, softcap) -> jax.Array:
    """Masked float32 scores ``[B G R Q S]``."""
    scores = _product(packed, keys, transposed=True) * scale
    scores = rearrange(scores, "b g (r q) s -> b g r q s", q=visible.shape[1])
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    return jnp.where(visible[:, None, None], scores, -jnp.inf)


def _mix(weights, values) -> jax.Array:
    return _product(rearrange(weights, "b g r q s -> b g (r q) s"), values, transposed=False)


def _product(a: jax.Array, b: jax.Array, transposed: bool) -> jax.Array:
    """float32 ``[B G N M]`` product per row and head; ``transposed``: contract the last axis of both."""
    options = {"precision": precision_of(a.dtype), "preferred_element_type": jnp.float32}
    contract = (((1,), (1 if transposed else 0,)), ((), ()))
    if jax.default_backend() == "cpu" and a.shape[0] * a.shape[1] <= _CPU_UNROLLED:
        one = lambda i, g: jax.lax.dot_general(a[i, g], b[i, g], contract, **options)  # noqa: E731
        return jnp.stack([jnp.stack([one(i, g) for g in range(a.shape[1])]) for i in range(a.shape[0])])
    return jnp.einsum("bgnk,bgmk->bgnm" if transposed else "bgnk,bgkm->bgnm", a, b, **options)
