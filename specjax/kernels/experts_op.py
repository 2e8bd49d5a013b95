"""Mixture of experts as an operation: its case, its arguments, and shares of weights. Both of its kernels, for few
tokens and for many, take these."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from specjax.kernels.building import differentiable
from specjax.kernels.configs import LEAST
from specjax.kernels.sizes import divisor


@dataclasses.dataclass(frozen=True)
class Case:
    """What decides whether and how the kernels are built."""

    tokens: int
    per_token: int
    experts: int
    width: int
    size: int
    dtype: jnp.dtype
    activation: Callable

    @property
    def choices(self) -> int:
        return self.tokens * self.per_token


AnyCase = TypeVar("AnyCase", bound=Case)


@dataclasses.dataclass(frozen=True)
class Tile:
    """One program's share of an expert's weight matrix: ``rows`` of it, read ``depth`` columns at a time by ``warps``
    warps with ``stages`` reads under way. ``rows`` and ``depth`` are powers of two and are halved until they divide the
    size."""

    rows: int
    depth: int
    warps: int
    stages: int

    def fit(self, rows: int, depth: int):
        return dataclasses.replace(self, rows=divisor(rows, self.rows), depth=divisor(depth, self.depth))


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Shares of ``gate`` and ``up``, and of ``down``."""

    up: Tile
    down: Tile


def case(
    kind: type[AnyCase],
    x: Float[Array, "N D"],
    ids: Int[Array, "N k"],
    gate: Float[Array, "E F D"],
    activation: Callable,
) -> AnyCase:
    """The case of these arguments."""
    (tokens, per_token), (count, size, width) = ids.shape, gate.shape
    return kind(tokens, per_token, count, width, size, jnp.dtype(x.dtype), activation)


def refuse(case: Case) -> str | None:
    """Why neither kernel can serve this case, whatever the tokens; None if they can."""
    if case.dtype not in (jnp.bfloat16, jnp.float16):
        return f"{jnp.dtype(case.dtype).name}: XLA computes it at full precision"
    if case.width % LEAST or case.size % LEAST:
        return f"width {case.width} and expert size {case.size} must be multiples of {LEAST}"
    return None


def shapes(case: Case) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Of x, ids, gate, up and down."""
    s, e = jax.ShapeDtypeStruct, case.experts
    ids = s((case.tokens, case.per_token), jnp.int32)
    wide, deep = s((e, case.size, case.width), case.dtype), s((e, case.width, case.size), case.dtype)
    return s((case.tokens, case.width), case.dtype), ids, wide, wide, deep


def bound(kernels: Mapping[str, Callable], reference: Callable) -> Callable:
    """A function of (x [N D], ids [N k], gate, up [E F D], down [E D F], activation) giving the output of every expert
    that every token chose: float32 [N, k, D].

    ``kernels``: by platform, functions of the arrays alone. ``reference`` takes the activation too; it serves programs
    that are compiled for another back end, and its gradients are the kernels'.
    """
    return lambda *given: differentiable(kernels, lambda *arrays: reference(*arrays, given[-1]))(*given[:-1])


def dot(rows: jax.Array, weights: jax.Array) -> jax.Array:
    """``rows @ weights.T`` in float32, within a kernel."""
    return triton.dot(rows, weights, trans_b=True).astype(jnp.float32)
