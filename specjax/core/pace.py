"""Pace: which width the next chunk of rounds has. Fixed, or tuned from the chunks that are over.

A tuned call (``k="auto"``) measures what it needs while it decodes: the seconds of a round at each width it has used,
and the chance of a draft by its place. Both are remembered per compiled program for as long as the process lives, so
the next call begins where the last one ended. What only costs time, to see whether another width has become the better
one, comes out of a budget: a hundredth of the time spent.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.config import Program
from specjax.core import width as choice

ROUNDS, PROBE = 8, 4  # rounds of a chunk that drafts, and of one that is there to measure
#: Weight of a round after one more: decisions follow about the last sixty rounds, and rest on the last thousand.
FAST, SLOW = 0.984, 0.999
#: Chance of a draft before anything is known, and how many rounds' weight this has.
PRIOR, PRIOR_WEIGHT, SLOW_WEIGHT = 0.7, 2.0, 4.0
BUDGET = 0.01  # share of the time that may be spent to look at other widths
STALE = 256  # rounds after which the seconds of a width that is not in use are measured again
NOISE, DRIFT = (
    0.1,
    0.03,
)  # relative deviations: of a chunk's seconds, and of what a round costs from chunk to chunk


@dataclasses.dataclass(frozen=True)
class Step:
    """How one chunk runs: drafts per round (0: plain), rounds, from which chance on a draft is verified
    (``width.thresholds``; empty: every one), how many plain rounds the drafter may take in at once."""

    width: int
    rounds: int
    cuts: tuple[float, ...] = ()
    room: int = 16


class Fixed:
    """Every chunk alike."""

    def __init__(self, program: Program, rounds: int):
        self._step = Step(program.k, rounds)

    timed = False

    def step(self) -> Step:
        """The next chunk."""
        return self._step

    def learn(self, step: Step, records: Sequence[Any], seconds: float) -> None:
        """Nothing."""


class Timing:
    """Seconds of a round by the drafts it verified, from chunks that mix them: a Kalman filter per drafted width."""

    def __init__(self, size: int):
        self.mean: np.ndarray = np.zeros(size)
        self.cov: np.ndarray = np.zeros((size, size))
        self.mix = np.zeros(size)  # rounds by drafts verified, the old ones fading
        self.chunks = 0

    def learn(self, rounds: np.ndarray, seconds: float) -> None:
        """A chunk of ``rounds[v]`` rounds that verified v drafts took so many seconds."""
        total = rounds.sum()
        self.mix = self.mix * FAST**total + rounds
        if self.chunks < 3:  # whatever happens beside makes it longer, never shorter
            self.mean[:] = min(self.mean[0] if self.chunks else np.inf, seconds / total)
            self.cov = np.diag(self.mean**2)
        else:
            self.cov += np.diag((DRIFT * self.mean) ** 2)
            expected = rounds @ self.mean
            seconds = min(seconds, 2 * expected)  # somebody else had the machine
            gain = self.cov @ rounds / (rounds @ self.cov @ rounds + (NOISE * expected) ** 2)
            self.mean = np.maximum(self.mean + gain * (seconds - expected), 1e-3 * seconds / total)
            self.cov -= np.outer(gain, rounds @ self.cov)
        self.chunks += 1

    @property
    def round(self) -> float:
        """Seconds of an average round."""
        return float(self.mix @ self.mean / self.mix.sum())

    def inner(self, widths: Sequence[int], plain: float) -> dict[int, float]:
        """Seconds of a round by the drafts it verified. Of widths that have hardly occurred it is assumed that half
        of what a round costs beyond a plain one grows with them."""
        widest, usual = widths[-1], self.mean[widths[-1]] if self.mix[widths[-1]] > 1 else self.round
        slope = 0.5 * max(usual - plain, 0.0) / widest
        return {
            v: float(self.mean[v]) if self.mix[v] > PROBE else usual - slope * (widest - v) for v in widths
        }


class Memory:
    """What is known of one program: chances of drafts by place, seconds by width."""

    def __init__(self, most: int):
        self.most = most
        self.reached, self.kept = np.zeros((2, most)), np.zeros((2, most))  # [fast, slow]
        self.timings: dict[int, Timing] = {}
        self.width: int | None = None  # in use when the last call ended
        self.since: dict[int, int] = {}  # rounds since a width was measured
        self.budget = 0.0

    @property
    def chances(self) -> tuple[float, ...]:
        """Chance that draft i is kept if those before it are: the last rounds', leaning on all rounds'."""
        before, out = (PRIOR, PRIOR), []
        for i in range(self.most):  # a place not seen yet is taken to be like the one before it
            slow = (self.kept[1, i] + before[1] * PRIOR_WEIGHT) / (self.reached[1, i] + PRIOR_WEIGHT)
            seen = min(self.reached[1, i] / PRIOR_WEIGHT, 1.0)
            prior = seen * slow + (1 - seen) * before[0]
            fast = (self.kept[0, i] + prior * SLOW_WEIGHT) / (self.reached[0, i] + SLOW_WEIGHT)
            before = (float(fast), float(slow))
            out.append(before[0])
        return tuple(out)

    @property
    def seconds(self) -> dict[int, float]:
        """Seconds of a round by width. The first chunk of a program takes longer than others: it alone says nothing."""
        return {w: timing.round for w, timing in self.timings.items() if timing.chunks > 1}

    def learn(self, step: Step, records: Sequence[Any], seconds: float) -> None:
        """Take in a chunk that is over."""
        verified = np.concatenate([np.atleast_1d(r.width) for r in records])
        verified = verified[verified > 0] - 1
        if not len(verified):
            return
        self._count(step.width, records, len(verified))
        for w in self.since:
            self.since[w] += len(verified)
        timing = self.timings.setdefault(step.width, Timing(self.most + 1))
        timing.learn(np.bincount(verified, minlength=self.most + 1).astype(float), seconds)
        self.since[step.width] = 0
        plain = self.seconds.get(0, 0.0)
        self.budget = min(self.budget + BUDGET * seconds, 4 * PROBE * plain)

    def _count(self, width: int, records: Sequence[Any], rounds: int) -> None:
        """Rounds that reached and that kept a draft, by its place. A draft that was not proposed was not kept; places
        beyond the width, and the last round of a row, say nothing."""
        fade = np.array([FAST, SLOW])[:, None] ** rounds
        self.reached[:1] *= fade[:1]
        self.kept[:1] *= fade[:1]
        if not width:
            return
        self.reached[1:, :width] *= fade[1:]
        self.kept[1:, :width] *= fade[1:]
        accepted = np.concatenate([r.accepted[(r.emitted > 0) & (r.reason == 0)] for r in records])
        at = np.arange(1, width + 1)
        self.reached[:, :width] += (accepted[:, None] >= at - 1).sum(0)
        self.kept[:, :width] += (accepted[:, None] >= at).sum(0)


@functools.lru_cache(maxsize=128)
def memory(program: Program) -> Memory:
    """What this process knows of a program."""
    return Memory(program.k)


class Tuned:
    """Widths chosen from the memory of a program, which every chunk adds to."""

    timed = True

    def __init__(self, program: Program, rounds: int, known: Memory | None = None):
        self.program, self.most = program, rounds
        self.memory = memory(program) if known is None else known
        own = min(program.pair.drafter_cfg.k, program.k)
        self.widths = choice.buckets(own, program.k)
        self._first = self.memory.width or own
        self._asked: set[int] = set()  # widths that run for the first time: their seconds are still to come
        self._plan: list[Step] = []

    def step(self) -> Step:
        """The next chunk."""
        if not self._plan:
            self._plan = self._next()
        first, *rest = self._plan
        room = 1 if self.most == 1 else self.program.rounds
        now = dataclasses.replace(first, rounds=min(first.rounds, self.most), room=room)
        left = dataclasses.replace(first, rounds=first.rounds - now.rounds)
        self._plan = [left, *rest] if left.rounds else rest
        return now

    def learn(self, step: Step, records: Sequence[Any], seconds: float) -> None:
        """Take in a chunk that is over."""
        self.memory.learn(step, records, seconds)
        self._asked -= self.memory.seconds.keys()

    def _next(self) -> list[Step]:
        known = self.memory
        measured = known.seconds
        missing = [w for w in (0, self._first) if w not in measured and w not in self._asked]
        if (
            missing
        ):  # without these two there is nothing to compare; in turn, so that a slow moment meets both
            return self._measure(*missing)
        if not measured.keys() >= {self._first, 0}:
            return [Step(0, PROBE)]
        current = self._first if known.width is None else known.width
        usable = [w for w in self.widths if w in measured or w not in self._asked]
        best = choice.choose(known.chances, measured, usable, current)
        if best not in measured:
            return self._measure(best)
        known.width = best
        return self._look(best) or [Step(best, ROUNDS if best else 2 * ROUNDS, self._cuts(best))]

    def _measure(self, *widths: int) -> list[Step]:
        self._asked |= set(widths)
        return [Step(width, rounds) for rounds in (2, PROBE) for width in widths]

    def _look(self, best: int) -> list[Step]:
        """A few rounds of another width, when its seconds are old (or, in plain decoding, chances are) and the
        budget allows what they are expected to cost."""
        known, measured = self.memory, self.memory.seconds
        age = STALE if best else PROBE * ROUNDS
        stale = [w for w in measured if w != best and known.since[w] >= age]
        if not stale:
            return []
        speed = choice.speeds(known.chances, measured, list(measured))
        width = max(stale, key=lambda w: speed[w])
        loss = PROBE * measured[width] * max(1 - speed[width] / speed[best], 0.0)
        if loss > known.budget:
            return []
        known.budget -= loss
        known.since[width] = 0
        return [Step(width, PROBE)]

    def _cuts(self, width: int) -> tuple[float, ...]:
        if not self.program.cuts or not width:
            return ()
        known = self.memory
        speed = choice.tokens(known.chances, width) / known.seconds[width]
        widths = [*(w for w in self.program.widths if w < width), width]
        inner = known.timings[width].inner(widths, known.seconds[0])
        return choice.thresholds(known.chances, inner, speed, width)


def pace(program: Program, rounds: int) -> Fixed | Tuned:
    """The pace of a call with at most ``rounds`` rounds per chunk."""
    return Tuned(program, rounds) if program.auto else Fixed(program, rounds)
