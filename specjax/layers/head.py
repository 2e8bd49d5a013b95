"""The best token of every row without keeping its logits: on a GPU a kernel streams the head (``head`` in
:mod:`specjax.kernels.dispatch`), elsewhere XLA computes all logits and looks for the largest."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.kernels import dispatch
from specjax.layers.linear import product


@dataclasses.dataclass(frozen=True)
class Cap:
    """How logits are made of products: times ``scale``, soft-capped, and of ``size`` ids (None: all rows of the head);
    later rows are padding."""

    scale: float = 1.0
    softcap: float | None = None
    size: int | None = None


Best = tuple[Float[Array, "*N"], Int[Array, "*N"], Float[Array, "*N"] | None]


def logits(x: Float[Array, "*N D"], table: Float[Array, "V D"], cap: Cap) -> Float[Array, "*N U"]:
    """float32."""
    out = product(x, table, jnp.float32)
    out = out if cap.scale == 1 else out * cap.scale
    out = out if cap.softcap is None else cap.softcap * jnp.tanh(out / cap.softcap)
    return out if cap.size is None else out[..., : cap.size]


def best(x: Float[Array, "*N D"], table: Float[Array, "V D"], cap: Cap, lse: bool = False) -> Best:
    """Largest logit (float32), its id (int32, the lowest of equal ones) and, if asked for, the logsumexp of all.

    The largest is not finite where some logit is not a number, and the id then means nothing.
    """
    run = dispatch.implementation(
        "head", _facts(x, table, cap, lse), functools.partial(_reference, cap=cap, lse=lse)
    )
    top, token, sums = run(x.reshape(-1, x.shape[-1]), table)
    lead = x.shape[:-1]
    return top.reshape(lead), token.reshape(lead), None if sums is None else sums.reshape(lead)


def _facts(x, table, cap: Cap, lse: bool) -> tuple:
    rows = jax.ShapeDtypeStruct((math.prod(x.shape[:-1]), x.shape[-1]), x.dtype)
    return rows, table, cap, lse


def _reference(x, table, *, cap: Cap, lse: bool) -> Best:
    out = logits(x, table, cap)
    top, token = jnp.max(out, -1), jnp.argmax(out, -1).astype(jnp.int32)
    return top, token, jax.nn.logsumexp(out, -1) if lse else None
