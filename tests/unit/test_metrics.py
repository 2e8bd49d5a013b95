"""Every figure of Stats, on the traces that docs/metrics.md works by hand."""

import itertools
import json
import math
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from specjax.metrics import DERIVED, RoundRecord, Stats, merge, truncate

#: The docs' trace: the last round drafted 4, the target agreed with 3, the second of them is EOS.
TRACE = [(4, 4, 5), (4, 1, 2), (0, 0, 1), (2, 0, 1), (4, 2, 2)]


def test_worked_trace():
    """MET.1, MET.2, MET.3: a stop inside the last block; these numbers are in docs/metrics.md."""
    s = Stats.from_rounds(
        TRACE, new_tokens=12, prefill_seconds=0.5, decode_seconds=1.0, compile_seconds=9.0, seed=3
    )
    assert (s.rounds, s.proposed, s.accepted, s.emitted, s.new_tokens) == (5, 14, 7, 11, 12)
    assert s.drafting_rounds == 4
    assert s.tau == 11 / 5
    assert s.mean_acceptance_length == 1 + 7 / 4
    assert s.acceptance_rate == 7 / 14
    assert s.proposed_at == (4, 4, 3, 3)
    assert s.accepted_at == (3, 2, 1, 1)
    assert s.reached_at == (4, 3, 2, 1)
    assert s.accepted_per_position == (3 / 4, 2 / 4, 1 / 3, 1 / 3)
    assert s.conditional_per_position == (3 / 4, 2 / 3, 1 / 2, 1 / 1)
    assert s.tokens_per_second == 12 / 1.5
    assert s.seed == 3


def test_docs_hold_the_worked_trace():
    """The page and the test above cannot drift apart."""
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    for line in (
        "| 5 | 4 | 2 | 2 |",
        "11 / 5 = 2.2",
        "1 + 7 / 4 = 2.75",
        "7 / 14 = 0.5",
        "3/4, 2/4, 1/3, 1/3",
        "3/4, 2/3, 1/2, 1/1",
        "12 / 1.5 = 8",
    ):
        assert line in page


def test_vllm_example():
    """MET.2: three steps (drafted, generated) = (3, 4), (3, 1), (2, 2)."""
    s = Stats.from_rounds([(k, made - 1, made) for k, made in [(3, 4), (3, 1), (2, 2)]])
    assert (s.drafting_rounds, s.proposed, s.accepted) == (3, 8, 4)
    assert s.accepted_at == (2, 1, 1)
    assert s.mean_acceptance_length == pytest.approx(2.3333, abs=1e-4)
    assert s.acceptance_rate == 0.5
    assert [a / s.drafting_rounds for a in s.accepted_at] == pytest.approx([0.667, 0.333, 0.333], abs=1e-3)
    assert s.accepted_per_position == (2 / 3, 1 / 3, 1 / 2)  # only two rounds proposed a third token


def test_nothing_decoded_gives_plain_numbers():
    s = Stats.from_rounds([])
    assert (s.tau, s.mean_acceptance_length, s.acceptance_rate, s.tokens_per_second) == (0.0, 1.0, 0.0, 0.0)
    assert s.accepted_per_position == s.conditional_per_position == ()


def test_plain_rounds_count_nothing_as_drafted():
    """NGR.2: rounds without a match are rounds, but no drafts."""
    s = Stats.from_rounds([(0, 0, 1)] * 3)
    assert (s.rounds, s.proposed, s.drafting_rounds, s.tau, s.mean_acceptance_length) == (3, 0, 0, 1.0, 1.0)


def test_idle_rounds_of_a_finished_row_are_left_out():
    assert Stats.from_rounds([(2, 1, 2), (0, 0, 0), (0, 0, 0)]) == Stats.from_rounds([(2, 1, 2)])


@pytest.mark.parametrize("record", [(2, 3, 4), (2, 1, 3), (2, 2, 1), (2, -1, 0)])
def test_impossible_records_are_refused(record):
    with pytest.raises(ValueError, match="no round gives"):
        Stats.from_rounds([record])


def test_drafters_of_a_chain():
    """MET.2: who proposed and who was right; a source that only ever proposed nothing is no entry."""
    s = Stats.from_rounds([(4, 4, 5, 0), (2, 1, 2, 1), (0, 0, 1, 0), (3, 0, 1, 1)])
    assert (s.proposed_by, s.accepted_by) == ((4, 5), (4, 1))
    other = Stats.from_rounds([(0, 0, 1, 2), (2, 2, 3)])
    assert (other.proposed_by, other.accepted_by) == ((2,), (2,))
    assert merge([s, other]).accepted_by == (6, 1)
    assert truncate([(2, 1, 2, 1)], 1) == [(2, 1, 1, 1)]


def test_truncate_in_the_middle_of_a_round():
    """LGP.2, MET.1: emitted is cut, accepted follows, what was proposed stays, later rounds vanish."""
    rounds = lambda keep: [r[:3] for r in truncate(TRACE, keep)]  # noqa: E731
    assert rounds(4) == [(4, 4, 4)]
    assert rounds(6) == [(4, 4, 5), (4, 1, 1)]
    assert rounds(7) == [(4, 4, 5), (4, 1, 2)]
    assert rounds(0) == []
    assert rounds(99) == TRACE
    with pytest.raises(ValueError, match="negative"):
        truncate(TRACE, -1)


def test_merge_sums_counters_and_weights_ratios():
    a = Stats.from_rounds([(4, 4, 5)], prefill_seconds=1.0, decode_seconds=2.0, seed=0)
    b = Stats.from_rounds([(1, 0, 1), (1, 1, 2)], prefill_seconds=3.0, decode_seconds=1.0, seed=0)
    both = Stats.from_rounds(
        [(4, 4, 5), (1, 0, 1), (1, 1, 2)], prefill_seconds=4.0, decode_seconds=3.0, seed=0
    )
    assert merge([a, b]) == both
    assert merge([a, b], concurrent=True).prefill_seconds == 3.0
    assert merge([a, Stats(seed=5)]).seed is None
    assert merge([]) == merge([], concurrent=True) == Stats()


def test_as_dict_is_json():
    data = json.loads(json.dumps(Stats.from_rounds(TRACE).as_dict()))
    assert set(DERIVED) < set(data)
    assert data["tau"] == 2.2


@st.composite
def _record(draw):
    proposed = draw(st.integers(0, 5))
    accepted = draw(st.integers(0, proposed))
    return RoundRecord(proposed, accepted, accepted + draw(st.integers(0, 1)) if accepted else 1)


@given(records=st.lists(_record(), max_size=12), keep=st.integers(0, 40))
def test_counters_are_consistent(records, keep):
    """MET.3: positions sum to the totals, rates are finite and in range, a cut never invents tokens."""
    for kept in (records, truncate(records, keep)):
        s = Stats.from_rounds(kept)
        assert sum(s.accepted_at) == s.accepted
        assert sum(s.proposed_at) == s.proposed
        assert len(s.proposed_at) == max((r.proposed for r in kept), default=0)
        assert all(a <= r <= p for a, r, p in zip(s.accepted_at, s.reached_at, s.proposed_at, strict=True))
        rates = s.accepted_per_position + s.conditional_per_position + (s.acceptance_rate,)
        assert all(math.isfinite(x) and 0 <= x <= 1 for x in rates)
    assert s.emitted == min(keep, sum(r.emitted for r in records))


@given(parts=st.lists(st.lists(_record(), max_size=6), min_size=1, max_size=4))
def test_merge_equals_counting_at_once(parts):
    assert merge([Stats.from_rounds(p) for p in parts]) == Stats.from_rounds(itertools.chain(*parts))
