"""The two Pallas-Triton kernels of block attention.

The work is a flat list of tiles: for every row of the batch and every key/value head, the tiles of keys that the row's
block can see, the block's own keys last. Programs are as many as the chip holds at once, and each takes an equal
stretch of the list, so that a long row is no tail and nothing depends on how lengths are spread. The list is never
written down: every program works out its stretch from ``start`` and ``end``. A program that has all tiles of a row and
head writes their output. The others leave what they have (weighted values, maximum, sum; float32), at most two such
parts each, and the second kernel joins them.

Queries that share a key/value head are rows of one matrix: row m is position ``m // R`` of the block and head ``m % R``
of the group. Tiles that every row sees whole are read without masks. Base-2 exponentials.
"""

import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from specjax.kernels.block_attention_op import View
from specjax.kernels.block_attention_plan import Case, Plan, listed_tiles, tiles_of
from specjax.kernels.configs import LEAST
from specjax.kernels.sizes import power

NEVER = -1e30  # a score that no real one reaches, and finite: differences of two such are not NaN
_PEELED = 128  # wider heads have no registers left for loops of their own over tiles without masks
_JOINED = 4096  # numbers that the second kernel holds at a time


def launch(q, keys, values, start, end, block=None, positions=None, *, plan: Plan, interpret: bool = False):
    """Both kernels: [B N H C]."""
    case, slots = plan.case, 2 * plan.programs
    row = lambda *more: jax.ShapeDtypeStruct((slots, plan.rows, *more), jnp.float32)  # noqa: E731
    some = [start.astype(jnp.int32), end.astype(jnp.int32)]
    some += [positions.astype(jnp.int32)] if case.ring else []
    shape = jax.ShapeDtypeStruct(q.shape, q.dtype)
    out, *parts = pl.pallas_call(
        lambda *refs: _attend(*_named(refs, case), plan=plan),
        grid=(plan.programs,),
        out_shape=[shape, row(case.padded), row(), row()],
        compiler_params=triton.CompilerParams(num_warps=plan.tile.warps, num_stages=plan.tile.stages),
        interpret=interpret,
        name="block_attention",
    )(*some, q, keys, values, *(block if case.own else ()))
    if plan.programs == 1:
        return out
    # parts that a line has if all are alike, read at once; as many query rows as fit beside them
    many = min(32, power(plan.programs // (case.batch * plan.lines) + 2, 4))
    chunk = min(plan.rows, max(1, _JOINED // many // case.padded))
    return pl.pallas_call(
        lambda *refs: _join(*refs, plan=plan, chunk=chunk, many=many),
        grid=(case.batch * plan.lines, plan.rows // chunk),
        out_shape=shape,
        input_output_aliases={2: 0},
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="block_attention_join",
    )(*some[:2], out, *parts)


def _named(refs, case: Case):
    """(start, end), positions, queries, keys, values, own block, outputs."""
    refs = list(refs)
    bounds, refs = refs[:2], refs[2:]
    positions = refs.pop(0) if case.ring else None
    q, k, v, *refs = refs
    own, outs = (refs[:2], refs[2:]) if case.own else (None, refs)
    return bounds, positions, q, k, v, own, outs


# The first kernel.


def _attend(bounds, pos_ref, q_ref, k_ref, v_ref, own, outs, *, plan: Plan):
    listed = listed_tiles(bounds[0], bounds[1], plan)
    program = pl.program_id(0)
    begin = program * listed.share
    stop = jnp.minimum(begin + listed.share, listed.total)

    def serve(flat):
        b = listed.row(flat)
        before, each = listed.line(b)
        line = (flat - before) // each
        t0 = flat - before - line * each
        t1 = jnp.minimum(each, t0 + stop - flat)
        sums = _line(bounds, pos_ref, q_ref, k_ref, v_ref, own, b, line, t0, t1, plan=plan)
        whole = (t0 == 0) & (t1 == each)

        @pl.when(whole)
        def finish():
            _store(outs[0], b, line, 0, sums[0] / jnp.maximum(sums[2], 1e-30)[:, None], plan)

        @pl.when(jnp.logical_not(whole))
        def leave():
            part = 2 * program + (flat > begin).astype(jnp.int32)
            for ref, x in zip(outs[1:], sums, strict=True):
                ref[(part, *(pl.ds(0, n) for n in x.shape))] = x

        return flat + t1 - t0

    jax.lax.while_loop(lambda flat: flat < stop, serve, begin)


def _line(bounds, pos_ref, q_ref, k_ref, v_ref, own, b, line, t0, t1, *, plan: Plan):
    """Weighted values [M C], maxima [M] and sums [M] over tiles t0 to t1 of one line."""
    case, keys = plan.case, plan.tile.keys
    start, end = bounds[0][b], jnp.minimum(bounds[1][b], case.slots)
    first, whole, until, stop = tiles_of(plan, start, end)
    head = line // plan.stacks
    n, place = _rows(line, 0, plan.rows, plan)
    q = _load(q_ref, (b, n, place), n < case.rows, case)

    def past(t, sums, masked):
        at = t * keys
        if not masked:
            return _add(
                q,
                _slice(k_ref, b, head, at, keys, case),
                _slice(v_ref, b, head, at, keys, case),
                None,
                sums,
                case,
            )
        slot = at + jnp.arange(keys, dtype=jnp.int32)
        there = slot < end
        held = slot if pos_ref is None else triton.load(pos_ref.at[b, slot], mask=there, other=-1)
        some, ok = _seen(case.view, held, there & (held >= 0), start, n, case.rows)
        k = _load(k_ref, (b, head, slot), there, case)
        v = _load(v_ref, (b, head, slot), some, case)
        return _add(q, k, v, ok, sums, case)

    def over(lo, hi, sums, masked):
        lo, hi = jnp.maximum(lo, first + t0), jnp.minimum(hi, first + t1)
        return jax.lax.fori_loop(lo, hi, lambda t, s: past(t, s, masked), sums)

    sums = (
        jnp.zeros((plan.rows, case.padded), jnp.float32),
        jnp.full((plan.rows,), NEVER, jnp.float32),
        jnp.zeros((plan.rows,), jnp.float32),
    )
    if case.ring or case.view.window is not None or case.padded > _PEELED:
        sums = over(first, whole if case.padded <= _PEELED else stop, sums, True)
    if not case.ring and case.padded <= _PEELED:
        sums = over(whole, until, sums, False)
        sums = over(until, stop, sums, True)
    if own is None:
        return sums

    def block(_, sums):
        other = jnp.arange(power(case.rows, LEAST), dtype=jnp.int32)
        k, v = (_load(ref, (b, other, head), other < case.rows, case) for ref in own)
        return _add(q, k, v, _own(case.view, other, n, case.rows), sums, case)

    return jax.lax.fori_loop(0, (first + t1 > stop).astype(jnp.int32), block, sums)


def _seen(view: View, held, there, start, n, rows: int):
    """Which keys at positions ``held`` [K] any row sees, and which each row at ``start + n`` [M] sees."""
    some, ok = there, None
    both = lambda a, x: x if a is None else a & x  # noqa: E731
    if view.causal:
        some = some & (held <= start + rows - 1)
        ok = both(ok, held[None, :] <= start + n[:, None])
    if view.window is not None and view.window_from == "row":
        some = some & (held > start - view.window)
        ok = both(ok, held[None, :] > start + n[:, None] - view.window)
    elif view.window is not None:
        some = some & (held >= start - view.window)
    every = jnp.broadcast_to(some[None, :], (n.shape[0], held.shape[0]))
    return some, every if ok is None else every & ok


def _own(view: View, other, n, rows: int):
    ok = jnp.broadcast_to((other < rows)[None, :], (n.shape[0], other.shape[0]))
    if view.causal:
        ok = ok & (other[None, :] <= n[:, None])
    if view.window is not None and view.window_from == "row":
        # no absolute value: of integers it is another function on CUDA than on ROCm
        ok = ok & (other[None, :] > n[:, None] - view.window) & (other[None, :] < n[:, None] + view.window)
    return ok


def _add(q, k, v, ok, sums, case: Case):
    """One tile of keys into the running sums; ``ok`` None: all seen."""
    total, top, weight = sums
    scores = triton.dot(q, k, trans_b=True).astype(jnp.float32)
    cap, scale = case.view.softcap, case.view.scale
    if cap is None:
        scores = scores * (scale * math.log2(math.e))
    else:
        scores = jnp.tanh(scores * (scale / cap)) * (cap * math.log2(math.e))
    if ok is not None:
        scores = jnp.where(ok, scores, NEVER)
    new = jnp.maximum(top, jnp.max(scores, axis=1))
    p = jnp.exp2(scores - new[:, None])
    if ok is not None:
        p = jnp.where(ok, p, 0.0)
    fade = jnp.exp2(top - new)
    mixed = triton.dot(p.astype(v.dtype), v).astype(jnp.float32)
    return total * fade[:, None] + mixed, new, weight * fade + jnp.sum(p, axis=1)


# The second kernel.


def _join(start_ref, end_ref, before_ref, *refs, plan: Plan, chunk: int, many: int):
    del before_ref  # the output so far, which is written in place
    total_ref, top_ref, weight_ref, out_ref = refs
    listed = listed_tiles(start_ref, end_ref, plan)
    b, line = pl.program_id(0) // plan.lines, pl.program_id(0) % plan.lines
    row0 = pl.program_id(1) * chunk
    before, each = listed.line(b)
    begin = before + line * each
    low, high = begin // listed.share, (begin + each - 1) // listed.share
    size = plan.case.padded
    rows = row0 + jnp.arange(chunk, dtype=jnp.int32)

    def some(i, sums):
        total, top, weight = sums
        program = low + i * many + jnp.arange(many, dtype=jnp.int32)
        # only the first of them may have begun with another line
        part = 2 * program + (program * listed.share < begin).astype(jnp.int32)
        two = (many, chunk)
        at = tuple(jnp.broadcast_to(x, two) for x in (part[:, None], rows[None, :]))
        ok = jnp.broadcast_to((program <= high)[:, None], two)
        tops = triton.load(top_ref.at[at], mask=ok, other=NEVER)
        weights = triton.load(weight_ref.at[at], mask=ok, other=0.0)
        three = (many, chunk, size)
        column = jnp.arange(size, dtype=jnp.int32)
        at3 = tuple(
            jnp.broadcast_to(x, three)
            for x in (part[:, None, None], rows[None, :, None], column[None, None, :])
        )
        ok3 = jnp.broadcast_to((program <= high)[:, None, None], three)
        totals = triton.load(total_ref.at[at3], mask=ok3, other=0.0)
        new = jnp.maximum(top, jnp.max(tops, axis=0))
        share, fade = jnp.exp2(tops - new[None, :]), jnp.exp2(top - new)
        total = total * fade[:, None] + jnp.sum(totals * share[:, :, None], axis=0)
        return total, new, weight * fade + jnp.sum(weights * share, axis=0)

    @pl.when((high > low) & (line % plan.stacks * plan.rows + row0 < plan.case.packed))
    def join():
        zero = jnp.zeros((chunk,), jnp.float32)
        sums = jnp.zeros((chunk, size), jnp.float32), zero + NEVER, zero
        total, _, weight = jax.lax.fori_loop(0, (high - low) // many + 1, some, sums)
        _store(out_ref, b, line, row0, total / jnp.maximum(weight, 1e-30)[:, None], plan)


# Loads and stores.


def _rows(line, row0, count: int, plan: Plan):
    """Position in the block and head of ``count`` packed rows of a line from ``row0`` on."""
    group = plan.case.group
    m = line % plan.stacks * plan.rows + row0 + jnp.arange(count, dtype=jnp.int32)
    return m // group, line // plan.stacks * group + m % group


def _load(ref, index, ok, case: Case):
    """[M C] of a four-dimensional array whose last axis is the head: indices are scalars or vectors [M]."""
    shape = (ok.shape[0], case.padded)
    column = jnp.broadcast_to(jnp.arange(case.padded, dtype=jnp.int32)[None, :], shape)
    spread = lambda x: jnp.broadcast_to(x[:, None], shape) if jnp.ndim(x) else x  # noqa: E731
    ok = jnp.broadcast_to(ok[:, None], shape)
    if case.padded != case.size:
        ok = ok & (column < case.size)
    return triton.load(ref.at[(*map(spread, index), column)], mask=ok, other=0)


def _slice(ref, b, head, at, count: int, case: Case):
    """``count`` slots of a cache from ``at`` on, all of them there."""
    if case.padded == case.size:
        return ref[b, head, pl.ds(at, count), pl.ds(0, case.size)]
    slot = at + jnp.arange(count, dtype=jnp.int32)
    return _load(ref, (b, head, slot), slot >= 0, case)


def _store(ref, b, line, row0, x, plan: Plan):
    case = plan.case
    n, head = _rows(line, row0, x.shape[0], plan)
    # rows of padding point past the end: the interpreter would write them back where they point
    n = jnp.minimum(n, case.rows)
    column = jnp.broadcast_to(jnp.arange(case.padded, dtype=jnp.int32)[None, :], x.shape)
    ok = jnp.broadcast_to((n < case.rows)[:, None], x.shape)
    if case.padded != case.size:
        ok, column = ok & (column < case.size), jnp.minimum(column, case.size)
    n, head = (jnp.broadcast_to(i[:, None], x.shape) for i in (n, head))
    triton.store(ref.at[b, n, head, column], x.astype(ref.dtype), mask=ok)
