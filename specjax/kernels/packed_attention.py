"""Attention of packed rows as one cuDNN flash kernel: the scores of all queries of a row are never written down.

The mask is dense and given by the caller: it says what causality, windows and documents leave visible.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.core import platform

ABOUT = "cuDNN, for packed rows: bfloat16 or float16 on NVIDIA, head sizes up to 256 that are multiples of 8"
_LARGEST, _MULTIPLE = 256, 8


@dataclasses.dataclass(frozen=True)
class Case:
    """What decides whether and how cuDNN is asked."""

    rows: int
    length: int
    heads: int
    kv_heads: int
    size: int
    value_size: int
    dtype: jnp.dtype
    scale: float
    softcap: float | None


def case(
    q: Float[Array, "R T H C"],
    keys: Float[Array, "R G T C"],
    values: Float[Array, "R G T Cv"],
    scale: float,
    softcap: float | None,
) -> Case:
    """The case of these arguments."""
    rows, length, heads, size = q.shape
    return Case(
        rows, length, heads, keys.shape[1], size, values.shape[-1], jnp.dtype(q.dtype), scale, softcap
    )


def refuse(case: Case) -> str | None:
    """Why cuDNN cannot serve this case; None if it can be tried."""
    if platform.backend() != "cuda":
        return f"cuDNN runs on NVIDIA, and JAX on {platform.backend()}"
    if case.dtype not in (jnp.bfloat16, jnp.float16):
        return f"{jnp.dtype(case.dtype).name}: XLA computes it at full precision"
    if case.softcap is not None:
        return "scores have a soft cap"
    if case.size != case.value_size or case.size > _LARGEST or case.size % _MULTIPLE:
        return f"heads of {case.size} and {case.value_size} channels: not alike, above {_LARGEST}, or no multiple of 8"
    return None


def build(case: Case, platform: str) -> None:
    """Compile for the current device; raises whatever stands in the way."""
    del platform
    x = jax.ShapeDtypeStruct
    key = x((case.rows, case.kv_heads, case.length, case.size), case.dtype)
    query = x((case.rows, case.length, case.heads, case.size), case.dtype)
    visible = x((case.rows, case.length, case.length), jnp.bool_)
    jax.jit(functools.partial(launch, case=case)).lower(query, key, key, visible).compile()


def bind(case: Case, reference: Callable) -> Callable:
    """A function of (q [R T H C], keys and values [R G T C], visible [R T T]) giving [R T H C].

    ``reference`` is such a function too; it serves programs that are compiled for another back end. They differ in
    rounding, and where a query sees nothing (padding): the kernel gives a mean of values there instead of zeros.
    """
    fast = functools.partial(launch, case=case)
    return lambda *arrays: jax.lax.platform_dependent(*arrays, cuda=fast, default=reference)


def launch(q, keys, values, visible, *, case: Case):
    """One call of the kernel."""
    return jax.nn.dot_product_attention(
        q,
        keys.swapaxes(1, 2),
        values.swapaxes(1, 2),
        mask=visible[:, None],
        scale=case.scale,
        implementation="cudnn",
    )
