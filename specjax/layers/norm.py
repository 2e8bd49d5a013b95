"""RMS normalisation, in the three roundings that checkpoints were trained with.

=================== ======================= =============================================
function            formula                 families
=================== ======================= =============================================
``rms_norm``        ``cast(r(x)) * w``      Llama, Qwen2.5, Qwen3, DeepSeek
``rms_norm_offset`` ``cast(r(x) (1 + w))``  Gemma 3, Qwen3.5: stored minus one
``rms_norm_wide``   ``cast(r(x) w)``        Gemma 4; without a weight: ``cast(r(x))``
=================== ======================= =============================================

``r(x) = x / sqrt(mean(x^2) + eps)`` is float32 always; ``cast`` rounds to the type of ``x``. In float32 the
first and the last agree.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "*N D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "*N D"]:
    """Rounded to ``x``'s type before the weight multiplies in that type."""
    return _normed(x, eps).astype(x.dtype) * weight.astype(x.dtype)


def rms_norm_offset(x: Float[Array, "*N D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "*N D"]:
    """Multiplied by ``1 + weight`` in float32, then rounded."""
    return (_normed(x, eps) * (1 + weight.astype(jnp.float32))).astype(x.dtype)


def rms_norm_wide(
    x: Float[Array, "*N D"], weight: Float[Array, " D"] | None, eps: float
) -> Float[Array, "*N D"]:
    """Multiplied by ``weight`` (None: by nothing) in float32, then rounded."""
    out = _normed(x, eps)
    return (out if weight is None else out * weight.astype(jnp.float32)).astype(x.dtype)


@struct.dataclass
class Normed:
    """``rms_norm`` of ``x`` (``offset``: ``rms_norm_offset``; ``wide``: ``rms_norm_wide``), left to the product that
    reads it."""

    x: Float[Array, "*N D"]
    weight: Float[Array, " D"]
    eps: float = struct.field(pytree_node=False)
    offset: bool = struct.field(pytree_node=False, default=False)
    wide: bool = struct.field(pytree_node=False, default=False)

    def array(self) -> Float[Array, "*N D"]:
        """The normed rows."""
        norm = rms_norm_offset if self.offset else rms_norm_wide if self.wide else rms_norm
        return norm(self.x, self.weight, self.eps)

    def of(self, choose: Callable[[Array], Array]) -> "Normed":
        """The same of rows that ``choose`` takes from them."""
        return dataclasses.replace(self, x=choose(self.x))


@struct.dataclass
class Joined:
    """Rows side by side along the last axis, of one width, each with its own norm of one kind; left to the product that
    reads them."""

    parts: tuple[Normed, ...]

    def array(self) -> Float[Array, "*N DD"]:
        """The normed rows."""
        return jnp.concatenate([part.array() for part in self.parts], -1)

    def of(self, choose: Callable[[Array], Array]) -> "Joined":
        """The same of rows that ``choose`` takes from them."""
        return Joined(tuple(part.of(choose) for part in self.parts))


#: Rows, or rows whose norm is left to the product that reads them.
Rows = Array | Normed | Joined


def plain(x: Rows) -> Float[Array, "*N D"]:
    """The rows, normed if they are to be."""
    return x.array() if isinstance(x, Normed | Joined) else x


def chosen(x: Rows, choose: Callable[[Array], Array]) -> Rows:
    """The rows that ``choose`` takes from an array of them."""
    return x.of(choose) if isinstance(x, Normed | Joined) else choose(x)


def _normed(x, eps):
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
