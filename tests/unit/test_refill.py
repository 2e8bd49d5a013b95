"""Rows that fall free are refilled in groups: the same ids, few programs, little work on the host."""

import itertools

import numpy as np
import pytest
from hypothesis import given, strategies as st
from tiny_models import greedy, target, uncompiled

import specjax
from specjax import calls
from specjax.config import REFILL_SIZES, refill_groups
from specjax.core import loop, programs

ROWS, COUNT = 16, 40


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(70, 110, rng.integers(1, 20)).tolist() for _ in range(COUNT)]


def budgets() -> list[int]:
    """Long ones, then many that end together, some of them with nothing to say."""
    return [24] * 4 + [5] * 12 + [0, 3] * 6 + [9] * 12


def served(**options):
    """Jobs by index, and the sizes of the groups they were prefilled in."""
    call = calls.plan(target(), prompts(), max_new_tokens=budgets(), rows=ROWS, ignore_eos=True, **options)
    engines, sizes = call.engines(), []
    prefill = programs.Engine.prefill

    def counted(self, *args):
        sizes.append(self.program.rows)
        return prefill(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs.Engine, "prefill", counted)
        list(loop.serve(*engines, call.jobs, call.drive))
    return call.jobs, sizes


@given(st.integers(0, 300), st.sampled_from([1, 3, 8, 15, 16, 64, 127, 128, 1024]))
def test_groups(n, rows):
    """Every prompt finds a place; groups are of few sizes, none larger than half the batch, and half full."""
    groups = refill_groups(n, rows)
    assert set(groups) <= set(REFILL_SIZES)
    assert sum(groups) >= n
    assert all(size == 1 or 2 * size <= rows for size in groups)
    left = n
    for size in groups:
        assert left > 0
        assert 2 * min(left, size) >= size
        left -= size


def test_groups_give_the_same_ids():
    """KVR.6, BAT.1, BAT.3: rows refilled together hold what they would hold alone; several at once go in groups."""
    jobs, sizes = served()
    for job, prompt, budget in zip(jobs, prompts(), budgets(), strict=True):
        assert job.tokens == greedy(prompt, budget)[0]
        assert job.reason == "length"
    assert sizes[0] == ROWS
    assert 8 in sizes
    assert len(sizes) < (COUNT - ROWS) / 2
    before = programs.compile_count()
    again, _ = served()
    assert [job.tokens for job in again] == [job.tokens for job in jobs]
    assert programs.compile_count() == before


@pytest.mark.long
def test_sampled_groups():
    """BAT.3, I6: seeds belong to requests, not to rows or groups."""
    options = {"temperature": 8.0, "seed": list(range(COUNT))}
    jobs, _ = served(**options)
    some = [5, 20, 31, 39]
    alone = specjax.decode(
        target(),
        [prompts()[i] for i in some],
        rows=2,
        max_new_tokens=[budgets()[i] for i in some],
        ignore_eos=True,
        temperature=8.0,
        seed=some,
    )
    assert [jobs[i].tokens for i in some] == alone.tokens


def test_jobs_are_made_as_rows_fall_free():
    """A queue may be longer than memory: jobs are taken when there is a row; new ones may come while others run."""
    call = calls.plan(target(), prompts()[:ROWS], max_new_tokens=6, rows=4, ignore_eos=True)
    taken, open_jobs, most = [], set(), 0

    def jobs():
        for job in call.jobs:
            taken.append(job.index)
            open_jobs.add(job.index)
            yield job

    queue = loop.Queue(jobs())
    more = loop.Job(99, np.asarray(prompts()[20], np.int32), call.jobs[0].options, call.jobs[0].key)
    done = {}
    for job in loop.serve(*call.engines(), queue, call.drive):
        most = max(most, len(open_jobs))
        if job.reason:
            done[job.index] = job.tokens
            open_jobs.discard(job.index)
            if len(done) == 3:
                queue.put(more)
    assert most <= 2 * 4
    assert taken == list(range(ROWS))
    assert done.pop(99) == greedy(prompts()[20], 6)[0]
    assert done == {i: greedy(p, 6)[0] for i, p in enumerate(prompts()[:ROWS])}


def test_a_job_that_comes_last_of_all():
    """Nothing waits any more when the last row ends, but its end brings another job."""
    call = calls.plan(target(), prompts()[:2], max_new_tokens=6, rows=2, ignore_eos=True)
    queue, left = loop.Queue(call.jobs), 3
    seen = []
    for job in loop.serve(*call.engines(), queue, call.drive):
        if job.reason:
            seen.append(job.tokens)
            if left:
                left -= 1
                queue.put(loop.Job(10 + left, job.prompt, job.options, job.key))
    assert len(seen) == 5
    assert seen.count(greedy(prompts()[0], 6)[0]) + seen.count(greedy(prompts()[1], 6)[0]) == 5


def test_insert_drops_the_spare_rows_of_a_group():
    """Rows of a group that serve nobody go nowhere; the others land where they were sent."""
    params = uncompiled(target(), 31)
    call = calls.plan(params, prompts()[:ROWS], max_new_tokens=4, rows=ROWS, ignore_eos=True)
    main, one = call.engines()
    state, _ = loop.prefill_rows(main, loop.host_state(main.program, call.jobs), 64)
    before = [np.asarray(x) for x in (state.tokens, state.request_id, state.length)]
    group = one.sized(8)
    jobs = [
        loop.Job(50 + i, np.arange(3 + i) + 70, call.jobs[0].options, np.zeros(2, np.uint32))
        for i in range(3)
    ]
    part, _ = loop.prefill_rows(group, loop.host_state(group.program, [*jobs, *[None] * 5]), 64)
    state = main.insert(state, [9, 2, 15], part)
    after = [np.asarray(x) for x in (state.tokens, state.request_id, state.length)]
    assert after[1][[9, 2, 15]].tolist() == [50, 51, 52]
    assert after[2][[9, 2, 15]].tolist() == [4, 5, 6]
    kept = [b for b in range(ROWS) if b not in (9, 2, 15)]
    for x, y in zip(before, after, strict=True):
        np.testing.assert_array_equal(x[kept], y[kept])
    assert one.compile_seconds > 0
    assert main.compile_seconds > 0


def test_records_of_many_rows_are_read_row_by_row():
    """The vectorised reading of a record equals a plain loop over rounds and rows."""
    rng = np.random.default_rng(0)
    for _, rounds in itertools.product(range(30), (1, 5)):
        emit = record(rng, rounds, rows=6, width=3)
        got = dict(loop._pieces(emit))
        want = plain(emit)
        assert got.keys() == want.keys()
        for owner, piece in got.items():
            assert (piece.tokens, piece.drafted, piece.logprobs, piece.rounds, piece.reason) == want[owner]


def record(rng, rounds: int, rows: int, width: int):
    """A random record: rows that end at any round, some with logits that are not finite, idle rows."""
    shape = (rounds, rows)
    emitted, reason = rng.integers(0, width + 1, shape), np.zeros(shape, int)
    for b in range(rows):
        end = rng.integers(0, rounds + 2)
        if end < rounds:
            kind = rng.integers(1, 4)
            reason[end:, b] = kind
            emitted[end, b] = 0 if kind == loop.NONFINITE and rng.random() < 0.5 else max(emitted[end, b], 1)
            emitted[end + 1 :, b] = 0
    return loop.Emit(
        tokens=rng.integers(0, 99, (*shape, width)),
        emitted=emitted,
        accepted=rng.integers(0, width, shape),
        proposed=rng.integers(0, width, shape),
        source=rng.integers(0, 2, shape),
        reason=reason,
        request_id=np.broadcast_to(rng.permutation(rows) * 10, shape),
        width=np.full(rounds, width if rng.random() < 0.8 else 0),
        logprobs=rng.random((*shape, width)) if rng.random() < 0.5 else None,
    )


def plain(emit) -> dict:
    """Oracle: round by round, row by row."""
    out: dict = {}
    for r in range(emit.emitted.shape[0]):
        for b in range(emit.emitted.shape[1]):
            n, reason = int(emit.emitted[r, b]), int(emit.reason[r, b])
            owner = int(emit.request_id[r, b])
            if not (n > 0 or reason == loop.NONFINITE) or (owner in out and out[owner][4]):
                continue
            tokens, drafted, logprobs, rounds, _ = out.get(owner, ([], [], [], [], 0))
            accepted = int(emit.accepted[r, b])
            turn = (int(emit.proposed[r, b]), accepted, n, int(emit.source[r, b]))
            out[owner] = (
                tokens + emit.tokens[r, b, :n].tolist(),
                drafted + [i < accepted for i in range(n)],
                logprobs + (emit.logprobs[r, b, :n].tolist() if emit.logprobs is not None else []),
                rounds + ([turn] if emit.width[r] else []),
                reason,
            )
    return out
