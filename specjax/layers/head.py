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
from specjax.layers.norm import Normed, Rows, plain


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


def best(x: Rows, table: Float[Array, "V D"], cap: Cap, lse: bool = False) -> Best:
    """Largest logit (float32), its id (int32, the lowest of equal ones) and, if asked for, the logsumexp of all.

    Rows [*N D] of another type than the head's are rounded to it. The largest is not finite where some logit is not a
    number, and the id then means nothing.
    """
    if not isinstance(x, Normed) or x.x.dtype != table.dtype:
        x = plain(x).astype(table.dtype)
    rows, norm, weights = (x.x, (x.eps, x.offset), (x.weight,)) if isinstance(x, Normed) else (x, None, ())
    wide = isinstance(x, Normed) and x.wide
    reference = functools.partial(_reference, cap=cap, lse=lse, norm=norm, wide=wide)
    run = dispatch.implementation("head", _facts(rows, table, cap, lse, norm), reference)
    top, token, sums = run(rows.reshape(-1, rows.shape[-1]), table, *weights)
    lead = rows.shape[:-1]
    return top.reshape(lead), token.reshape(lead), None if sums is None else sums.reshape(lead)


def _facts(x, table, cap: Cap, lse: bool, norm: tuple[float, bool] | None = None) -> tuple:
    rows = jax.ShapeDtypeStruct((math.prod(x.shape[:-1]), x.shape[-1]), x.dtype)
    return rows, table, cap, lse, norm


def _reference(
    x, table, *weights, cap: Cap, lse: bool, norm: tuple[float, bool] | None = None, wide: bool = False
) -> Best:
    x = x if norm is None else Normed(x, weights[0], *norm, wide).array()
    out = logits(x, table, cap)
    top, token = jnp.max(out, -1), jnp.argmax(out, -1).astype(jnp.int32)
    return top, token, jax.nn.logsumexp(out, -1) if lse else None
