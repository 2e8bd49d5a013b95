"""The one place where weights meet activations: precision, the CPU's one-row trap and the kernel for few rows are
decided here.

Products of few rows are a matter of reading weights. On a GPU a kernel does that (``skinny`` in
:mod:`specjax.kernels.dispatch`) for one weight, for several that read the same rows, and for the pair of a gated block;
a norm that stands before them may be left to it (:class:`specjax.layers.norm.Normed`). Everywhere else, and for many
rows, they are XLA's.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.kernels import dispatch
from specjax.layers.norm import Normed

# XLA's CPU back end has a fast bfloat16 product only for four rows and more and a float32 result: padding
# rows and rounding afterwards is four to five times faster there, and never done elsewhere.
_CPU_BF16_ROWS = 4
#: Numbers in weights from which on reading them takes longer than starting a kernel does.
_LARGE = 1 << 18

Rows = Array | Normed


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the kernel does besides multiplying: (eps, offset) of the norm before, the activation of a gate after.
    ``wide``: where XLA norms, it rounds once, as the kernel does."""

    out_dtype: Any = None
    norm: tuple[float, bool] | None = None
    activation: Callable | None = None
    wide: bool = False


def precision_of(dtype) -> jax.lax.Precision | None:
    """float32 asks for full precision (GPUs default to TF32); lower precisions keep the default."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def linear(
    x: Rows,
    w: Float[Array, "*F D"],
    bias: Float[Array, "*F"] | None = None,
    out_dtype=None,
) -> Float[Array, "..."]:
    """``x @ w.T`` over the last axis of both; ``w`` may have several leading (head) axes.

    ``out_dtype`` sets the accumulator and result type (float32 for logits); default: that of ``x``.
    """
    return linears(x, (w,), (bias,), out_dtype)[0]


def linears(
    x: Rows, weights: Sequence[Array], biases: Sequence[Array | None] | None = None, out_dtype=None
) -> tuple[Float[Array, "..."], ...]:
    """:func:`linear` for several weights that read the same rows: one kernel where there is one."""
    found = _few(x, weights, out_dtype)
    if found is None:
        rows = x.array() if isinstance(x, Normed) else x
        found = tuple(product(rows, w, out_dtype) for w in weights)
    biases = biases or (None,) * len(weights)
    return tuple(y if b is None else y + b.astype(y.dtype) for y, b in zip(found, biases, strict=True))


def gated(
    x: Rows, gate: Float[Array, "F D"], up: Float[Array, "F D"], activation: Callable
) -> Float[Array, "... F"]:
    """``activation(gate x) * up x``; in bfloat16 a kernel rounds it once, XLA after every step."""
    found = _few(x, (gate, up), None, activation)
    if found is None:
        rows = x.array() if isinstance(x, Normed) else x
        return activation(product(rows, gate)) * product(rows, up)
    return found[0]


def product(x: Float[Array, "*N D"], w: Float[Array, "*F D"], out_dtype=None) -> Float[Array, "..."]:
    """:func:`linear` by XLA, whatever the shapes."""
    lead, features = x.shape[:-1], w.shape[:-1]
    rows = _pad_rows(x.reshape(-1, x.shape[-1]))
    y = jax.lax.dot_general(
        rows,
        w.reshape(-1, w.shape[-1]),
        (((1,), (1,)), ((), ())),
        precision=precision_of(x.dtype),
        preferred_element_type=out_dtype or (jnp.float32 if _cpu_bfloat16(x.dtype) else x.dtype),
    ).astype(out_dtype or x.dtype)
    return y[: max(1, math.prod(lead))].reshape(*lead, *features)


def _few(x: Rows, weights: Sequence[Array], out_dtype, activation: Callable | None = None) -> tuple | None:
    """Products by the kernel, None where there is none for them."""
    rows, norm = (x.x, (x.eps, x.offset)) if isinstance(x, Normed) else (x, None)
    settings = Settings(out_dtype, norm, activation, isinstance(x, Normed) and x.wide)
    flat = rows.reshape(-1, rows.shape[-1])
    tables = tuple(w.reshape(-1, w.shape[-1]) for w in weights)
    if dispatch.wanted() == "auto" and sum(w.size for w in tables) < _LARGE:
        return None
    reference = functools.partial(_reference, count=len(tables), settings=settings)
    run = dispatch.implementation("skinny", (flat, tables, settings), reference)
    if run is reference:
        return None
    found = run(flat, *tables, *((x.weight,) if isinstance(x, Normed) else ()))
    lead, shapes = rows.shape[:-1], [w.shape[:-1] for w in weights[: len(found)]]
    return tuple(y.reshape(*lead, *shape) for y, shape in zip(found, shapes, strict=True))


def _reference(x, *arrays, count: int, settings: Settings) -> tuple:
    """What the kernel does, by XLA."""
    weights, norm = arrays[:count], arrays[count:]
    if settings.norm is not None:
        eps, offset = settings.norm
        x = Normed(x, norm[0], eps, offset, settings.wide).array()
    found = tuple(product(x, w, settings.out_dtype) for w in weights)
    return found if settings.activation is None else (settings.activation(found[0]) * found[1],)


def _cpu_bfloat16(dtype) -> bool:
    return dtype == jnp.bfloat16 and jax.default_backend() == "cpu"


def _pad_rows(x):
    if _cpu_bfloat16(x.dtype) and x.shape[0] < _CPU_BF16_ROWS:
        return jnp.pad(x, ((0, _CPU_BF16_ROWS - x.shape[0]), (0, 0)))
    return x
