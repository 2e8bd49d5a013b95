"""Gated feed-forward blocks."""

import jax
from jaxtyping import Array, Float

from specjax.layers.linear import linear


def swiglu(
    x: Float[Array, "B Q D"],
    gate: Float[Array, "F D"],
    up: Float[Array, "F D"],
    down: Float[Array, "D F"],
) -> Float[Array, "B Q D"]:
    """``down(silu(gate x) * up x)``."""
    return linear(jax.nn.silu(linear(x, gate)) * linear(x, up), down)
