"""RMS normalisation, in the three roundings that checkpoints were trained with."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "*N D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "*N D"]:
    """Llama, Qwen and DeepSeek rounding: normalise in float32, cast to ``x``'s type, then scale."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * weight.astype(x.dtype)
