"""The one place where weights meet activations: precision, the CPU's one-row trap and the kernel for few rows are
decided here.

Products of few rows are a matter of reading weights. On a GPU a kernel does that (``skinny`` in
:mod:`specjax.kernels.dispatch`) for one weight, for several that read the same rows, and for the pair of a gated block;
a norm that stands before them may be left to it (:class:`specjax.layers.norm.Normed`), or several of rows side by side
(:class:`specjax.layers.norm.Joined`). Everywhere else, and for many rows, they are XLA's.
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
from specjax.layers.norm import Joined, Normed, Rows, plain

# XLA's CPU back end has a fast bfloat16 product only for four rows and more and a float32 result: padding
# rows and rounding afterwards is four to five times faster there, and never done elsewhere.
_CPU_BF16_ROWS = 4
#: Numbers in weights from which on reading them takes longer than starting a kernel does.
_LARGE = 1 << 18


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the kernel does besides multiplying: (eps, offset) of the norm before, the activation of a gate after.
    ``wide``: where XLA norms, it rounds once, as the kernel does. ``pieces`` of a row, each with its own norm."""

    out_dtype: Any = None
    norm: tuple[float, bool] | None = None
    activation: Callable | None = None
    wide: bool = False
    pieces: int = 1


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
        rows = plain(x)
        found = tuple(product(rows, w, out_dtype) for w in weights)
    biases = biases or (None,) * len(weights)
    return tuple(y if b is None else y + b.astype(y.dtype) for y, b in zip(found, biases, strict=True))


def gated(
    x: Rows, gate: Float[Array, "F D"], up: Float[Array, "F D"], activation: Callable
) -> Float[Array, "... F"]:
    """``activation(gate x) * up x``; in bfloat16 a kernel rounds it once, XLA after every step."""
    found = _few(x, (gate, up), None, activation)
    if found is None:
        rows = plain(x)
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
    parts = x.parts if isinstance(x, Joined) else (x,)
    arrays = [part.x if isinstance(part, Normed) else part for part in parts]
    norms = tuple(part.weight for part in parts if isinstance(part, Normed))
    lead, width = arrays[0].shape[:-1], sum(a.shape[-1] for a in arrays)
    tables = tuple(w.reshape(-1, w.shape[-1]) for w in weights)
    if dispatch.wanted() == "auto" and sum(w.size for w in tables) < _LARGE:
        return None
    norm, wide = _norm(parts[0])
    settings = Settings(out_dtype, norm, activation, wide, len(parts))
    facts = jax.ShapeDtypeStruct((math.prod(lead), width), arrays[0].dtype), tables, settings
    reference = functools.partial(_reference, count=len(tables), settings=settings)
    run = dispatch.implementation("skinny", facts, reference)
    if run is reference:
        return None
    # the lookup of an embedding or the sum of a residual stream is part of joining
    rows = arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, -1)
    found = run(rows.reshape(-1, width), *tables, *norms)
    shapes = [w.shape[:-1] for w in weights[: len(found)]]
    return tuple(y.reshape(*lead, *shape) for y, shape in zip(found, shapes, strict=True))


def _norm(part: Array | Normed) -> tuple[tuple[float, bool] | None, bool]:
    """``norm`` and ``wide`` of :class:`Settings`."""
    return ((part.eps, part.offset), part.wide) if isinstance(part, Normed) else (None, False)


def _reference(x, *arrays, count: int, settings: Settings) -> tuple:
    """What the kernel does, by XLA."""
    weights, norm = arrays[:count], arrays[count:]
    if settings.norm is not None:
        eps, offset = settings.norm
        parts = zip(jnp.split(x, settings.pieces, -1), norm, strict=True)
        x = Joined(tuple(Normed(part, w, eps, offset, settings.wide) for part, w in parts)).array()
    found = tuple(product(x, w, settings.out_dtype) for w in weights)
    return found if settings.activation is None else (settings.activation(found[0]) * found[1],)


def _cpu_bfloat16(dtype) -> bool:
    return dtype == jnp.bfloat16 and jax.default_backend() == "cpu"


def _pad_rows(x):
    if _cpu_bfloat16(x.dtype) and x.shape[0] < _CPU_BF16_ROWS:
        return jnp.pad(x, ((0, _CPU_BF16_ROWS - x.shape[0]), (0, 0)))
    return x
