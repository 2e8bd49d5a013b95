"""The Pallas-Triton kernel of DSpark's walk: one launch per draft and nothing between.

Every correction needs the token before it, so the chip has to agree on a token between two drafts; kernels have no
safe way to wait for each other, and a launch is that way. A program first finds, from what all programs of the launch
before have left, the token drafted last, and fetches its vector; then it multiplies that with its stretch of the table
``after``, adds the block's logits, and leaves the best of the stretch.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from specjax.kernels.configs import LEAST as CHUNK, Walk
from specjax.kernels.head_kernel import best_of, joined, store_column


@dataclasses.dataclass(frozen=True)
class Case:
    """What decides whether and how the kernel is built. ``rank`` R, ``vocab`` rows of ``before``, ``after`` rows of
    ``after``, ``size`` draft ids (columns of the logits); ``mapped``: target ids of draft ids are given."""

    batch: int
    drafts: int
    rank: int
    vocab: int
    after: int
    size: int
    dtype: Any
    mapped: bool


@dataclasses.dataclass(frozen=True)
class Plan:
    """``programs`` with ``each`` tiles of ``rows`` rows."""

    rows: int
    each: int
    programs: int
    warps: int
    stages: int


def plan(case: Case, tile: Walk) -> Plan:
    """As many programs as a program can look through at the start of the next launch."""
    rows = tile.rows
    while case.after % rows:
        rows //= 2
    tiles = case.after // rows
    each = -(-tiles // tile.programs)
    return Plan(rows, each, -(-tiles // each), tile.warps, tile.stages)


def launch(before, after, logits, anchor, ids=None, *, case: Case, plan: Plan, interpret: bool = False):
    """Target ids [B K] of the drafts. ``before`` [V R], ``after`` [U R], ``logits`` [B K S] float32, ``anchor`` [B]."""
    anchor, logits = anchor.astype(jnp.int32), logits.astype(jnp.float32)
    mapping = (ids.astype(jnp.int32),) if case.mapped else ()
    left, tokens = (), []
    for step in range(case.drafts):
        left = pl.pallas_call(
            functools.partial(_kernel, step=step, case=case, plan=plan),
            grid=(plan.programs,),
            out_shape=[
                jax.ShapeDtypeStruct((case.batch, plan.programs), d) for d in (jnp.float32, jnp.int32)
            ],
            compiler_params=triton.CompilerParams(num_warps=plan.warps, num_stages=plan.stages),
            interpret=interpret,
            name="markov",
        )(before, after, logits, *mapping, *(left or (anchor,)))
        tokens.append(left)
    top, best = (jnp.stack([x[i] for x in tokens], 1) for i in (0, 1))
    flat = lambda x: x.reshape(-1, plan.programs)  # noqa: E731
    found = joined(flat(top), flat(best))[1].reshape(case.batch, case.drafts)
    return ids[found].astype(jnp.int32) if case.mapped else found


def _kernel(before_ref, after_ref, logits_ref, *refs, step: int, case: Case, plan: Plan):
    *given, top_ref, best_ref = refs
    ids_ref, given = (given[0], given[1:]) if case.mapped else (None, given)
    program, precision = pl.program_id(0), jax.lax.Precision.HIGHEST if case.dtype == jnp.float32 else None
    chunks = range(-(-case.batch // CHUNK))
    drawn = [_drawn(given, ids_ref, chunk, step, case, plan) for chunk in chunks]
    vectors = [_vectors(before_ref, token, chunk, case) for chunk, token in zip(chunks, drawn, strict=True)]

    def one(i, best):
        row = (program * plan.each + i) * plan.rows
        inside = row < case.after
        weights = after_ref[pl.ds(jnp.where(inside, row, 0), plan.rows), pl.ds(0, case.rank)]
        column = row + jax.lax.broadcasted_iota(jnp.int32, (CHUNK, plan.rows), 1)
        found = []
        for chunk, x, (top, token) in zip(chunks, vectors, best, strict=True):
            more = triton.dot(x, weights, trans_b=True, precision=precision).astype(jnp.float32)
            batch = _batch(chunk, column.shape)
            known = (column < case.size) & (batch < case.batch) & inside
            at = (
                jnp.where(known, batch, 0),
                jnp.full(column.shape, step, jnp.int32),
                jnp.where(known, column, 0),
            )
            base = triton.load(logits_ref.at[at], mask=known, other=0.0)
            here, where = best_of(jnp.where(known, base + more, -jnp.inf), column)
            better = here > top  # equal ones keep the lower id
            found.append((jnp.where(better, here, top), jnp.where(better, where, token)))
        return found

    first = jnp.full((CHUNK,), -jnp.inf, jnp.float32), jnp.zeros((CHUNK,), jnp.int32)
    done = jax.lax.fori_loop(0, plan.each, one, [first] * len(chunks))
    for chunk, (top, token) in enumerate(done):
        store_column(top_ref, (chunk * CHUNK,), program, top, case.batch)
        store_column(best_ref, (chunk * CHUNK,), program, token, case.batch)


def _batch(chunk: int, shape):
    return chunk * CHUNK + jax.lax.broadcasted_iota(jnp.int32, shape, 0)


def _drawn(given, ids_ref, chunk: int, step: int, case: Case, plan: Plan):
    """Target ids [CHUNK] of the tokens before this draft."""
    row = chunk * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)
    there = row < case.batch
    row = jnp.where(there, row, 0)
    if not step:
        return triton.load(given[0].at[row], mask=there, other=0)
    width = 1 << (plan.programs - 1).bit_length()
    program = jax.lax.broadcasted_iota(jnp.int32, (CHUNK, width), 1)
    known = (program < plan.programs) & there[:, None]
    at = jnp.broadcast_to(row[:, None], known.shape), jnp.where(known, program, 0)
    top = triton.load(given[0].at[at], mask=known, other=-jnp.inf)
    best = triton.load(given[1].at[at], mask=known, other=jnp.iinfo(jnp.int32).max)
    largest = jnp.max(top, axis=1)
    token = jnp.min(jnp.where(top == largest[:, None], best, jnp.iinfo(jnp.int32).max), axis=1)
    token = jnp.where(there, token, 0)
    return token if ids_ref is None else triton.load(ids_ref.at[token], mask=there, other=0)


def _vectors(before_ref, token, chunk: int, case: Case):
    shape = (CHUNK, case.rank)
    known = _batch(chunk, shape) < case.batch
    # an index that is no row takes the last, as jnp has it
    token = jnp.broadcast_to(jnp.minimum(token, case.vocab - 1)[:, None], shape)
    return triton.load(
        before_ref.at[token, jax.lax.broadcasted_iota(jnp.int32, shape, 1)], mask=known, other=0
    )
