"""Choice of experts by sigmoid scores within groups (DeepSeek-V3, Kimi)."""

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int

from specjax.layers.linear import linear


def route_groups(
    x: Float[Array, "N D"],
    router: Float[Array, "E D"],
    bias: Float[Array, " E"],
    k: int,
    groups: int = 1,
    kept: int = 1,
    normalise: bool = True,
    scale: float = 1.0,
) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
    """Weights (float32) and ids of k experts; of equal ones the lower id.

    ``bias`` moves the choice, never the weights. With several groups only the experts of the ``kept`` best are
    eligible, a group being as good as its two best experts together.
    """
    scores = jax.nn.sigmoid(linear(x, router, out_dtype=jnp.float32))
    choice = scores + bias.astype(jnp.float32)
    if groups > 1:
        choice = jnp.where(_eligible(choice, groups, kept), choice, -jnp.inf)
    _, ids = jax.lax.top_k(choice, k)
    weights = jnp.take_along_axis(scores, ids, 1)
    if normalise:
        weights = weights / (jnp.sum(weights, -1, keepdims=True) + 1e-20)
    return weights * scale, ids


def _eligible(choice: Float[Array, "N E"], groups: int, kept: int) -> Bool[Array, "N E"]:
    grouped = rearrange(choice, "n (g e) -> n g e", g=groups)
    best, _ = jax.lax.top_k(grouped, 2)
    _, chosen = jax.lax.top_k(jnp.sum(best, -1), kept)
    keep = (chosen[..., None] == jnp.arange(groups)).any(1)
    return jnp.repeat(keep, grouped.shape[-1], axis=1)
