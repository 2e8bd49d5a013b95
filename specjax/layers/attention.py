"""Grouped-query attention of a block over cached keys; what is visible follows from positions."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.core.cache import Filled, positions
from specjax.kernels import dispatch
from specjax.kernels.block_attention_op import View, attend_block
from specjax.layers.softmax import attend_parts

__all__ = ["attend", "attend_parts", "causal"]


def attend(
    q: Float[Array, "B Q H C"],
    keys: Float[Array, "B G S C"],
    values: Float[Array, "B G S C"],
    q_pos: Int[Array, "B Q"],
    key_pos: Filled | Int[Array, "B S"] | Int[Array, "B Q S"],
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Float[Array, "B Q H C"]:
    """Causal attention: a key is visible when ``0 <= key_pos <= q_pos`` (and ``key_pos > q_pos - window``).

    ``key_pos`` is what a cache's ``extend`` says of its keys; ``q_pos`` are consecutive within a row. Positions may be
    each query's own, as in packed rows: those are whole texts, for which there is another kernel.
    """
    view, start = View(scale, causal=True, window=window, softcap=softcap), q_pos[:, 0]
    if isinstance(key_pos, Filled):
        return attend_block(q, keys, values, start, key_pos.end, view=view)
    if key_pos.ndim == 2:
        end = jnp.full_like(start, keys.shape[2])
        return attend_block(q, keys, values, start, end, positions=key_pos, view=view)
    run = lambda q, k, v, visible: attend_parts(q, ((k, v, visible),), scale, softcap)  # noqa: E731
    run = dispatch.implementation("packed_attention", (q, keys, values, scale, softcap), run)
    return run(q, keys, values, causal(q_pos, key_pos, window))


def causal(
    q_pos: Int[Array, "B Q"],
    key_pos: Filled | Int[Array, "B S"] | Int[Array, "B Q S"],
    window: int | None = None,
) -> Bool[Array, "B Q S"]:
    """Which keys each query sees. Negative key positions are empty slots; positions may be each query's own."""
    key_pos = positions(key_pos)
    q, key = q_pos[:, :, None], key_pos if key_pos.ndim == 3 else key_pos[:, None, :]
    ok = (key >= 0) & (key <= q)
    return ok if window is None else ok & (key > q - window)
