"""Gated feed-forward blocks."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.layers.linear import gated, linear
from specjax.layers.norm import Rows


def swiglu(
    x: Rows,
    gate: Float[Array, "F D"],
    up: Float[Array, "F D"],
    down: Float[Array, "D F"],
) -> Float[Array, "B Q D"]:
    """``down(silu(gate x) * up x)`` of rows ``[B Q D]``."""
    return linear(gated(x, gate, up, jax.nn.silu), down)


def geglu(
    x: Rows,
    gate: Float[Array, "F D"],
    up: Float[Array, "F D"],
    down: Float[Array, "D F"],
) -> Float[Array, "B Q D"]:
    """``down(gelu(gate x) * up x)`` with the tanh form of GELU."""
    return linear(gated(x, gate, up, gelu_tanh), down)


def gelu_tanh(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """GELU by its tanh formula, worked out in float32: its cubic loses most of bfloat16's digits."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)
