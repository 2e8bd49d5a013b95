"""The one place where weights meet activations: precision and the CPU's one-row trap are decided here."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# XLA's CPU back end has a fast bfloat16 product only for four rows and more and a float32 result: padding
# rows and rounding afterwards is four to five times faster there, and never done elsewhere.
_CPU_BF16_ROWS = 4


def precision_of(dtype) -> jax.lax.Precision | None:
    """float32 asks for full precision (GPUs default to TF32); lower precisions keep the default."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def linear(
    x: Float[Array, "*N D"],
    w: Float[Array, "*F D"],
    bias: Float[Array, "*F"] | None = None,
    out_dtype=None,
) -> Float[Array, "..."]:
    """``x @ w.T`` over the last axis of both; ``w`` may have several leading (head) axes.

    ``out_dtype`` sets the accumulator and result type (float32 for logits); default: that of ``x``.
    """
    lead, features = x.shape[:-1], w.shape[:-1]
    rows = _pad_rows(x.reshape(-1, x.shape[-1]))
    y = jax.lax.dot_general(
        rows,
        w.reshape(-1, w.shape[-1]),
        (((1,), (1,)), ((), ())),
        precision=precision_of(x.dtype),
        preferred_element_type=out_dtype or (jnp.float32 if _cpu_bfloat16(x.dtype) else x.dtype),
    ).astype(out_dtype or x.dtype)
    y = y[: max(1, _size(lead))].reshape(*lead, *features)
    return y if bias is None else y + bias.astype(y.dtype)


def _cpu_bfloat16(dtype) -> bool:
    return dtype == jnp.bfloat16 and jax.default_backend() == "cpu"


def _pad_rows(x):
    if _cpu_bfloat16(x.dtype) and x.shape[0] < _CPU_BF16_ROWS:
        return jnp.pad(x, ((0, _CPU_BF16_ROWS - x.shape[0]), (0, 0)))
    return x


def _size(shape) -> int:
    n = 1
    for s in shape:
        n *= s
    return n
