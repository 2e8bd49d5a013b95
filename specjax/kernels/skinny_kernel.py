"""The Pallas-Triton kernel of products of few rows with large weights: all time goes into reading weights once.

A program has some rows of a weight and one of ``parts`` stretches of its columns, so that programs fill the chip. Rows
of the block are taken in chunks of 16, the fewest that matrix units take, each with sums of its own: what a row gets
does not depend on how many others there are, to the last bit, and a verified position equals a plain step. The norm
before a product costs no pass of its own: the weight of the norm goes into the rows as they are read, squares are
summed on the way, and the factor multiplies the sums. Rows may be of several pieces with a norm each: a part lies
within one, whose factor multiplies it. Parts are added in order by ``jax.numpy``, which XLA joins with what follows.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from specjax.kernels.configs import LEAST as CHUNK, Product
from specjax.kernels.head_kernel import load_rows


@dataclasses.dataclass(frozen=True)
class Case:
    """What decides whether and how the kernel is built. ``outs``: rows of each weight; with an ``activation`` there are
    two, gate and up. ``normed``: rows pass an RMS norm first, whose weight is ``offset`` by one or not; each of their
    ``pieces``, which are of one width, has its own."""

    rows: int
    width: int
    outs: tuple[int, ...]
    dtype: Any
    out_dtype: Any
    normed: bool = False
    eps: float = 0.0
    offset: bool = False
    activation: Callable | None = None
    pieces: int = 1

    @property
    def chunks(self) -> int:
        return -(-self.rows // CHUNK)

    @property
    def jobs(self) -> list[tuple[int, ...]]:
        """Weights that a program reads side by side."""
        return [(0, 1)] if self.activation is not None else [(i,) for i in range(len(self.outs))]


@dataclasses.dataclass(frozen=True)
class Plan:
    """``rows`` of a weight and ``depth`` columns at a time, in ``parts`` along the columns."""

    rows: int
    depth: int
    parts: int
    warps: int
    stages: int


def plan(case: Case, tile: Product, processors: int) -> Plan:
    """The grid for a chip. Parts and depth, which decide how a sum is rounded, do not depend on the block's rows."""
    rows, parts, depth = tile.rows // len(case.jobs[0]), case.pieces, tile.depth
    most = tile.fill * processors
    while any(n % rows for n in case.outs):
        rows //= 2
    tiles = sum(case.outs[job[0]] // rows for job in case.jobs)
    even = lambda n: case.width >= n * tile.least and case.width % (n * min(depth, 64)) == 0  # noqa: E731
    while 2 * parts * tiles <= most and even(2 * parts):
        parts *= 2
    while 2 * parts * tiles <= most and rows > CHUNK:  # small weights
        rows, tiles = rows // 2, 2 * tiles
    while case.width // parts % depth:
        depth //= 2
    return Plan(rows, depth, parts, tile.warps, tile.stages)


def launch(x, *arrays, case: Case, plan: Plan, interpret: bool = False):
    """``arrays``: the weights [N_i K], then the norms' weights if there are any. Gives a tuple of [rows N_i], or of one
    [rows N] with an activation."""
    weights, norms = arrays[: len(case.outs)], arrays[len(case.outs) :]
    out = pl.pallas_call(
        functools.partial(_kernel, case=case, plan=plan),
        grid=(sum(case.outs[job[0]] // plan.rows for job in case.jobs), plan.parts),
        out_shape=_shapes(case, plan),
        compiler_params=triton.CompilerParams(num_warps=plan.warps, num_stages=plan.stages),
        interpret=interpret,
        name="skinny",
    )(x, *norms, *weights)
    return tuple(out) if plan.parts == 1 else _joined(out, case, plan)


def _shapes(case: Case, plan: Plan) -> list:
    if plan.parts == 1:
        return [jax.ShapeDtypeStruct((case.rows, case.outs[job[0]]), case.out_dtype) for job in case.jobs]
    sums = [jax.ShapeDtypeStruct((plan.parts, case.rows, n), jnp.float32) for n in case.outs]
    return sums + [jax.ShapeDtypeStruct((plan.parts, case.rows), jnp.float32)] * case.normed


def _joined(out, case: Case, plan: Plan) -> tuple:
    add, each = functools.partial(functools.reduce, operator.add), plan.parts // case.pieces
    pieces = [range(first, first + each) for first in range(0, plan.parts, each)]
    sums = [[add([x[i] for i in piece]) for piece in pieces] for x in out[: len(case.outs)]]
    if case.normed:
        factors = [_factor(add([out[-1][i] for i in piece]), case)[:, None] for piece in pieces]
        sums = [[s * f for s, f in zip(x, factors, strict=True)] for x in sums]
    return tuple(_finished([add(sums[i]) for i in job], None, case) for job in case.jobs)


def _factor(squares, case: Case):
    return jax.lax.rsqrt(squares / (case.width // case.pieces) + case.eps)


def _finished(sums, factor, case: Case):
    sums = sums if factor is None else [s * factor for s in sums]
    out = sums[0] if case.activation is None else case.activation(sums[0]) * sums[1]
    return out.astype(case.out_dtype)


def _kernel(*refs, case: Case, plan: Plan):
    (x_ref, *rest), norms = refs, case.pieces if case.normed else 0
    norm_refs, rest = rest[:norms], rest[norms:]
    weights, outs = rest[: len(case.outs)], rest[len(case.outs) :]
    (tile, part), first = (pl.program_id(0), pl.program_id(1)), 0
    for number, job in enumerate(case.jobs):
        last = first + case.outs[job[0]] // plan.rows
        given = [outs[number]] if plan.parts == 1 else [outs[i] for i in job]
        squares_ref = outs[-1] if case.normed and plan.parts > 1 and number == 0 else None
        mine = [weights[i] for i in job]
        at = (tile - first) * plan.rows, part
        run = functools.partial(_tile, x_ref, norm_refs, mine, given, squares_ref, at, case, plan)
        # a program branches to its weight: they stay arrays of their own
        run() if len(case.jobs) == 1 else pl.when((tile >= first) & (tile < last))(run)
        first = last


def _tile(x_ref, norm_refs, weights, outs, squares_ref, at, case: Case, plan: Plan):
    """One program's rows of one weight, or of gate and up; the very first also gives the rows' sums of squares."""
    (row, part), share = at, case.width // plan.parts
    scaled = squares_ref is not None or (case.normed and plan.parts == 1)
    precision = jax.lax.Precision.HIGHEST if case.dtype == jnp.float32 else None

    def step(i, carry):
        start = part * share + i * plan.depth
        at = pl.ds(start, plan.depth)
        tiles = [w[pl.ds(row, plan.rows), at] for w in weights]
        scale = _scale(norm_refs, part, i, case, plan) if case.normed else None
        after = []
        for chunk, (sums, squares) in enumerate(carry):
            x = load_rows(x_ref, chunk * CHUNK, start, plan.depth, case.rows)
            if scale is not None:
                wide = x.astype(jnp.float32)
                squares = squares + wide * wide if scaled else squares
                x = (wide * scale[None, :]).astype(case.dtype)
            more = [triton.dot(x, w, trans_b=True, precision=precision).astype(jnp.float32) for w in tiles]
            after.append(([s + m for s, m in zip(sums, more, strict=True)], squares))
        return after

    zero = [jnp.zeros((CHUNK, plan.rows), jnp.float32)] * len(weights)
    none = jnp.zeros((CHUNK, plan.depth if scaled else 1), jnp.float32)
    done = jax.lax.fori_loop(0, share // plan.depth, step, [(zero, none)] * case.chunks)
    for chunk, (sums, squares) in enumerate(done):
        if plan.parts == 1:
            factor = _factor(jnp.sum(squares, axis=1), case)[:, None] if scaled else None
            sums = [_finished(sums, factor, case)]
        for ref, values in zip(outs, sums, strict=True):
            _store(ref, (part,) if plan.parts > 1 else (), chunk, row, values, case)
        if squares_ref is not None:
            at = chunk * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)
            inside = (at < case.rows) & (row == 0)
            at = jnp.where(inside, at, case.rows)
            triton.store(squares_ref.at[part, at], jnp.sum(squares, axis=1), mask=inside)


def _scale(norm_refs, part, step, case: Case, plan: Plan):
    """What the norm multiplies the columns of a step by. A part lies within one piece of a row."""
    each = plan.parts // case.pieces
    at = pl.ds((part % each) * (case.width // plan.parts) + step * plan.depth, plan.depth)
    scale = norm_refs[0][at]
    for piece, ref in enumerate(norm_refs[1:], 1):
        scale = jnp.where(part // each == piece, ref[at], scale)
    return scale.astype(jnp.float32) + case.offset


def _store(ref, at: tuple, chunk: int, column, values, case: Case):
    shape = values.shape
    row = chunk * CHUNK + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    inside = row < case.rows
    # padding points past the end: the interpreter would write it back where it points
    index = (*at, jnp.where(inside, row, case.rows), column + jax.lax.broadcasted_iota(jnp.int32, shape, 1))
    triton.store(ref.at[index], values, mask=inside)
