"""How widths are chosen: the pure choice, and whole calls on made-up machines and texts (no clock is read)."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from told import PROMPTS, model, told

import specjax
from specjax import calls
from specjax.core import pace, width as choice
from specjax.core.pace import Step


def test_buckets():
    assert choice.buckets(5, 15) == (1, 3, 5, 7, 15)
    assert choice.buckets(4, 4) == (1, 3, 4)
    assert choice.buckets(1, 1) == (1,)


#: chances, seconds of a round by width, width in use -> width to go on with
TABLE = {
    "drafts are right: as many as there are": ([0.9] * 7, {0: 1.0, 3: 1.3, 7: 1.6}, 3, 7),
    "drafts are wrong: none": ([0.1] * 7, {0: 1.0, 3: 1.3, 7: 1.6}, 7, 0),
    "the first is right, the others are not": ([0.9, *[0.1] * 6], {0: 1.0, 1: 1.2, 3: 1.5, 7: 2.0}, 7, 1),
    "wide rounds are dear": ([0.8] * 7, {0: 1.0, 1: 1.3, 3: 2.4, 7: 4.0}, 7, 1),
    "a little better is not enough to change": ([0.8] * 7, {0: 1.0, 3: 1.5, 7: 2.08}, 3, 3),
    "slower than plain is left even so": ([0.4] * 7, {0: 1.0, 1: 1.41, 3: 2.0, 7: 2.5}, 1, 0),
    "a width nobody measured, if it promises more": ([0.9] * 7, {0: 1.0, 3: 1.2}, 3, 7),
    "and not if it promises little": ([0.5] * 7, {0: 1.0, 3: 1.2}, 3, 3),
}


@pytest.mark.parametrize("case", TABLE.values(), ids=TABLE)
def test_choice(case):
    chances, seconds, current, expected = case
    assert choice.choose(chances, seconds, (1, 3, 7) if 1 in seconds else (3, 7), current) == expected


chance, second = st.floats(0, 1), st.floats(1e-4, 1e2)


@settings(deadline=None)
@given(
    st.lists(chance, min_size=15, max_size=15),
    st.dictionaries(st.sampled_from(choice.BUCKETS), second, min_size=1),
    second,
    st.sampled_from((0, *choice.BUCKETS)),
)
def test_never_a_width_below_plain(chances, measured, plain, current):
    """PRF.1: whatever is known, the width chosen is predicted to be at least as fast as plain decoding."""
    measured = {**measured, 0: plain}
    best = choice.choose(chances, measured, choice.BUCKETS, current)
    speed = choice.speeds(chances, measured, choice.BUCKETS)
    assert speed[best] >= speed[0]
    assert 1 <= choice.tokens(chances, best) <= best + 1


def test_seconds_of_widths_that_were_not_measured():
    assert choice.seconds({0: 1.0, 4: 2.0}, 2) == pytest.approx(1.5)
    assert choice.seconds({0: 1.0, 4: 2.0}, 8) == pytest.approx(2.0 + 4 * 0.25 * choice.SLOPE_BEYOND)
    assert choice.seconds({3: 1.4}, 7) == choice.seconds({3: 1.4}, 1) == 1.4


def test_thresholds():
    """Drafts that a wider verification adds must pay for it together."""
    cut = choice.thresholds([0.5] * 7, {0: 1.0, 3: 1.4, 7: 2.0}, 1.2, 7)
    first, second = 0.4 * 1.2 / (1 + 0.5 + 0.25), 0.6 * 1.2 / (1 + 0.5 + 0.25 + 0.125)
    assert cut == pytest.approx((first, 0, 0, second, 0, 0, 0))
    assert choice.thresholds([0.5] * 3, {0: 1.0, 3: 0.9}, 1.2, 3) == (0, 0, 0)  # wider costs nothing


def test_seconds_are_told_apart_by_what_was_verified():
    """Chunks that mix verified widths give the seconds of each, within a few percent."""
    timing, true, rng = pace.Timing(8), np.array([1, 0, 0, 1.5, 0, 0, 0, 2.2]), np.random.default_rng(0)
    for _ in range(60):
        rounds = np.bincount(rng.choice([0, 3, 7], 8, p=rng.dirichlet([1, 1, 1])), minlength=8).astype(float)
        timing.learn(rounds, float(rounds @ true))
    inner = timing.inner([0, 3, 7], 1.0)
    assert inner == pytest.approx({0: 1.0, 3: 1.5, 7: 2.2}, rel=0.05)


def test_what_was_kept_is_counted_by_place():
    """A draft beyond the width says nothing, one that was not proposed was not kept, and a row's last round is out."""
    memory = pace.Memory(7)
    kept = np.array([[3, 0], [1, 2], [2, 1]])
    record = SimpleNamespace(
        width=np.array([4, 4, 4]), accepted=kept, emitted=kept + 1, reason=np.array([[0, 0], [0, 0], [2, 0]])
    )
    memory.learn(Step(3, 3), [record], 1.0)
    assert memory.reached[1].tolist() == [5, 4, 2, 0, 0, 0, 0]
    assert memory.kept[1].tolist() == [4, 2, 1, 0, 0, 0, 0]
    assert memory.chances[6] == pytest.approx(memory.chances[3])  # not seen: like the last place that was


# ---------------------------------------------------------------- whole calls on made-up machines


def verified(width: int) -> float:
    """Cost of verifying ``width`` drafts on a CPU in float32, in plain steps."""
    return float(np.interp(width, [0, 1, 3, 7, 15], [1, 1.36, 1.77, 2.26, 2.6]))


#: Seconds of a round by width: drafts one by one or in one pass, on a machine that computes or one that reads.
MACHINES = {
    "cpu, one by one": lambda w: verified(w) + 0.15 * w,
    "cpu, one pass": lambda w: verified(w) + (0.45 if w else 0),
    "gpu, one by one": lambda w: 1 + (0.05 + 0.05 * w if w else 0),
    "gpu, one pass": lambda w: 1 + (0.25 + 0.005 * w if w else 0),
    "large batch": lambda w: 1 + (0.1 + 0.25 * w if w else 0),
}
TEXTS = {
    "never right": [0.0] * 15,
    "bad": [0.15] * 15,
    "poor": [0.45] * 15,
    "fair": [0.7, 0.65, 0.6, 0.6, 0.55, *[0.5] * 10],
    "good": [0.9] * 15,
}


def decode(machine, chances_at, total: int, seed=0, answer=96, noise=0.05):
    """Answers of ``answer`` tokens until ``total``; (seconds per token, rounds by width). The loop is a chunk ahead of
    what it learns from, the first chunk of a width takes half as long again, and times are noisy to one side."""
    program = SimpleNamespace(
        pair=SimpleNamespace(drafter_cfg=SimpleNamespace(k=7)), k=15, cuts=False, rounds=16, widths=()
    )
    memory, rng, seconds, tokens, used = pace.Memory(15), np.random.default_rng(seed), 0.0, 0, {}
    while tokens < total:
        tuned, past, done = pace.Tuned(program, 16, memory), None, 0
        while done < answer:
            step = tuned.step()
            if past:
                tuned.learn(*past)
            draws = rng.random((step.rounds, max(step.width, 1))) < np.array(
                chances_at(tokens)[: max(step.width, 1)]
            )
            kept = np.cumprod(draws, 1).sum(1)[:, None] if step.width else np.zeros((step.rounds, 1), int)
            took = machine(step.width) * step.rounds * (1 + noise * abs(rng.standard_normal()))
            took *= 1 if step.width in used else 1.5
            used[step.width] = used.get(step.width, 0) + step.rounds
            done, tokens, seconds = (
                done + int((kept + 1).sum()),
                tokens + int((kept + 1).sum()),
                seconds + took,
            )
            width = np.full(step.rounds, step.width + 1)
            past = (
                step,
                [SimpleNamespace(width=width, accepted=kept, emitted=kept + 1, reason=0 * kept)],
                took,
            )
        tuned.learn(*past)
    return seconds / tokens, used


def best(machine, chances, noise=0.05):
    """Seconds per token of every fixed width."""
    usual = 1 + noise * np.sqrt(2 / np.pi)
    return {w: machine(w) * usual / choice.tokens(chances, w) for w in (0, 1, 3, 5, 7, 11, 15)}


#: A text per machine in the quick tests, each once.
QUICK = set(zip(MACHINES, TEXTS, strict=True))
PAIRS = [
    pytest.param(m, t, id=f"{m}, {t}", marks=() if (m, t) in QUICK else pytest.mark.long)
    for m in MACHINES
    for t in TEXTS
]


@pytest.mark.parametrize(("machine", "text"), PAIRS)
def test_a_call_is_as_fast_as_its_best_width(machine, text):
    """PRF.1: over 3,000 tokens from nothing known, at least 0.97 of plain decoding and 0.95 of the best fixed width
    (mean of three texts), and few widths are ever compiled."""
    machine, text = MACHINES[machine], TEXTS[text]
    fixed = best(machine, text)
    runs = [decode(machine, lambda _: text, 3000, seed) for seed in range(3)]
    mean = np.mean([took for took, _ in runs])
    assert mean <= fixed[0] / 0.97
    assert mean <= min(fixed.values()) / 0.95
    assert all(len(used) <= 5 for _, used in runs)


def test_it_recovers_after_plain_decoding():
    """A text that turns from hopeless to good is drafted for again, and back."""
    turning = lambda at: TEXTS["never right"] if (at // 3000) % 2 == 0 else TEXTS["good"]  # noqa: E731
    machine = MACHINES["cpu, one by one"]
    took, _ = decode(machine, turning, 12_000)
    ideal = (best(machine, TEXTS["never right"])[0] + min(best(machine, TEXTS["good"]).values())) / 2
    assert took <= ideal / 0.9


def test_one_round_at_a_time_keeps_to_the_plan():
    """A stream's chunks are one round: what is measured is the same number of rounds, and the drafter takes in one
    plain round at once."""
    program = SimpleNamespace(
        pair=SimpleNamespace(drafter_cfg=SimpleNamespace(k=3)), k=7, cuts=False, rounds=16, widths=()
    )
    tuned = pace.Tuned(program, 1, pace.Memory(7))
    steps = [tuned.step() for _ in range(6)]
    assert [(s.width, s.rounds, s.room) for s in steps] == [(0, 1, 1)] * 2 + [(3, 1, 1)] * 2 + [(0, 1, 1)] * 2


@pytest.mark.parametrize(
    ("k", "said"), [("fast", "'auto'"), ("7", "'auto'"), (0, "at least 1"), (True, "integer")]
)
def test_other_widths_are_refused(k, said):
    with pytest.raises(ValueError, match=said):
        calls.plan(told(["ALWAYS_RIGHT"] * len(PROMPTS)), PROMPTS, k=k)


def test_auto_needs_a_drafter():
    with pytest.raises(ValueError, match="no drafter"):
        specjax.decode(model(), PROMPTS[0], k="auto")
