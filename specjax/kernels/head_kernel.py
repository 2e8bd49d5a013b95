"""The Pallas-Triton kernel of a head of which only the best id of every row is wanted: logits stay in registers.

A program multiplies the rows with some rows of the head and keeps, for each, the largest logit, its id and, where
probabilities are asked for, the sum of exponentials below it. A norm before the head costs no pass of its own, as in
:mod:`specjax.kernels.skinny_kernel`. ``jax.numpy`` joins the programs' results.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from specjax.kernels.configs import LEAST as CHUNK, Head


@dataclasses.dataclass(frozen=True)
class Case:
    """What decides whether and how the kernel is built. Logits are scaled, capped and, from id ``size`` on, padding.
    ``normed``: rows pass an RMS norm first, whose weight is ``offset`` by one or not."""

    rows: int
    width: int
    vocab: int
    size: int
    dtype: Any
    scale: float = 1.0
    softcap: float | None = None
    lse: bool = False
    normed: bool = False
    eps: float = 0.0
    offset: bool = False

    @property
    def chunks(self) -> int:
        return -(-self.rows // CHUNK)


def fit(tile: Head, case: Case) -> Head:
    """The tile with sizes halved until they divide the head's."""
    rows, depth = tile.rows, tile.depth
    while case.vocab % rows:
        rows //= 2
    while case.width % depth:
        depth //= 2
    return dataclasses.replace(tile, rows=rows, depth=depth)


def launch(x, table, *norm, case: Case, tile: Head, interpret: bool = False):
    """``norm``: its weight, if there is one.

    Largest logit, its id (the lowest of equal ones) and, if asked for, the logarithm of the sum of exponentials:
    float32 [rows], int32 [rows], float32 [rows] or None. Where a logit is not a number, the largest is infinite.
    """
    tile = fit(tile, case)
    tiles = case.vocab // tile.rows
    kinds = (jnp.float32, jnp.int32, jnp.float32)[: 2 + case.lse]
    top, ids, *sums = pl.pallas_call(
        functools.partial(_kernel, case=case, tile=tile),
        grid=(tiles,),
        out_shape=[jax.ShapeDtypeStruct((case.rows, tiles), kind) for kind in kinds],
        compiler_params=triton.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="head",
    )(x, table, *norm)
    best, token = joined(top, ids)
    return best, token, logsumexp(top, sums[0], best) if sums else None


def joined(top, ids):
    """The best of all programs: they are in the order of ids, and the first of equal ones wins."""
    at = jnp.argmax(top, axis=1)[:, None]
    return jnp.max(top, axis=1), jnp.take_along_axis(ids, at, 1)[:, 0]


def logsumexp(top, sums, best):
    """Of all programs, from sums of exponentials below their own best."""
    base = jnp.where(jnp.isfinite(best), best, 0)
    return base + jnp.log(jnp.sum(sums * jnp.exp(top - base[:, None]), axis=1))


def best_of(logits, column):
    """Largest of each row and the lowest column that has it; what is not a number counts as infinite."""
    logits = jnp.where(logits == logits, logits, jnp.inf)
    top = jnp.max(logits, axis=1)
    return top, jnp.min(jnp.where(logits == top[:, None], column, jnp.iinfo(jnp.int32).max), axis=1)


def store_column(ref, at: tuple, column, values, rows: int):
    """``values`` of one chunk of rows (``at``: what stands before a row's index, and the first row) at a column."""
    *before, first = at
    row = first + jnp.arange(CHUNK, dtype=jnp.int32)
    # padding points past the end: the interpreter would write it back where it points
    index = (*before, jnp.where(row < rows, row, rows), jnp.full(row.shape, column, jnp.int32))
    triton.store(ref.at[index], values, mask=row < rows)


def load_rows(x_ref, first: int, start, depth: int, rows: int):
    """A chunk of rows, zero beyond the last, and ``depth`` columns from ``start`` on: [CHUNK, depth]."""
    at = pl.ds(start, depth)
    if first + CHUNK <= rows:
        return x_ref[pl.ds(first, CHUNK), at]
    token = first + jax.lax.broadcasted_iota(jnp.int32, (CHUNK, depth), 0)
    if not first:
        return triton.load(x_ref.at[pl.ds(0, CHUNK), at], mask=token < rows, other=0)
    # a slice that begins inside and ends outside is moved by the interpreter
    column = start + jax.lax.broadcasted_iota(jnp.int32, (CHUNK, depth), 1)
    return triton.load(x_ref.at[jnp.minimum(token, rows - 1), column], mask=token < rows, other=0)


def _kernel(x_ref, table_ref, *refs, case: Case, tile: Head):
    norm_ref, outs = (refs[0], refs[1:]) if case.normed else (None, refs)
    top_ref, ids_ref, *sums_ref = outs
    program = pl.program_id(0)
    row = program * tile.rows
    precision = jax.lax.Precision.HIGHEST if case.dtype == jnp.float32 else None

    def step(i, carry):
        start, after = i * tile.depth, []
        weights = table_ref[pl.ds(row, tile.rows), pl.ds(start, tile.depth)]
        for chunk, (sums, squares) in enumerate(carry):
            x = load_rows(x_ref, chunk * CHUNK, start, tile.depth, case.rows)
            if case.normed:
                wide = x.astype(jnp.float32)
                scale = norm_ref[pl.ds(start, tile.depth)].astype(jnp.float32) + case.offset
                squares, x = squares + wide * wide, (wide * scale[None, :]).astype(case.dtype)
            more = triton.dot(x, weights, trans_b=True, precision=precision).astype(jnp.float32)
            after.append((sums + more, squares))
        return after

    zero = jnp.zeros((CHUNK, tile.rows), jnp.float32)
    none = jnp.zeros((CHUNK, tile.depth if case.normed else 1), jnp.float32)
    column = row + jax.lax.broadcasted_iota(jnp.int32, (CHUNK, tile.rows), 1)
    done = jax.lax.fori_loop(0, case.width // tile.depth, step, [(zero, none)] * case.chunks)
    for chunk, (total, squares) in enumerate(done):
        if case.normed:
            total *= jax.lax.rsqrt(jnp.sum(squares, axis=1) / case.width + case.eps)[:, None]
        logits = total * case.scale if case.scale != 1 else total
        logits = logits if case.softcap is None else case.softcap * jnp.tanh(logits / case.softcap)
        logits = logits if case.size == case.vocab else jnp.where(column < case.size, logits, -jnp.inf)
        top, ids = best_of(logits, column)
        at = (chunk * CHUNK,)
        store_column(top_ref, at, program, top, case.rows)
        store_column(ids_ref, at, program, ids, case.rows)
        if case.lse:
            base = jnp.where(top > -jnp.inf, top, 0.0)
            store_column(
                sums_ref[0], at, program, jnp.sum(jnp.exp(logits - base[:, None]), axis=1), case.rows
            )
