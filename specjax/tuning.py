"""``specjax.tune``: which drafter, how many drafts per round, how many rows, found with few runs.

A sweep decodes all prompts with every drafter at every N. Here a few prompts are decoded once per drafter, at its
widest: that tells how often drafts survive at every place, hence the tokens of a round for any N, and what a round of
that width costs. What a round of another N costs is estimated from there, the best N of the best drafters is tried, and
in the end these few settings are decoded beside plain decoding on more prompts, as far as a fifth of the sweep's runs
goes.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from specjax.core import width as choice

#: Drafts per round that a sweep would try, and those that are weighed here.
SWEPT = (1, 3, 5, 7, 11, 15)
WEIGHED = (1, 2, 3, 4, 5, 7, 9, 11, 13, 15)
#: Part of a sweep's runs that may be spent, and of those what the first readings take.
SHARE, FIRST = 0.2, 0.35
#: At most so many methods are looked at further, if they promise this part of the best.
FINALISTS, CLOSE = 3, 0.8
#: Another N is taken in the end if it promises this much more.
GAIN = 1.02


@dataclasses.dataclass(frozen=True)
class Reading:
    """Prompts decoded once. ``kept[i]``: rounds that kept at least i + 1 drafts; ``round_seconds``: of one round,
    all rows; ``speed``: tokens per second, all rows."""

    rounds: int
    kept: tuple[int, ...]
    round_seconds: float
    speed: float


#: ``read(method, k, prompts)``: method None is plain decoding.
Read = Callable[[str | None, int, Sequence[int]], Reading]


@dataclasses.dataclass
class Tried:
    """What was found of one drafter: rounds in plain steps by drafts per round (measured ones), ratios to plain
    decoding that were measured in the end, and rounds that reached and that kept a draft, by its place."""

    method: str
    own: int
    widest: int
    rounds: dict[int, float] = dataclasses.field(default_factory=lambda: {0: 1.0})
    verified: dict[int, float] = dataclasses.field(default_factory=dict)
    reached: list[int] = dataclasses.field(default_factory=list)
    kept: list[int] = dataclasses.field(default_factory=list)

    @property
    def chances(self) -> tuple[float, ...]:
        """Chance that a draft is kept if those before it are, by its place."""
        return tuple(kept / max(reached, 1) for kept, reached in zip(self.kept, self.reached, strict=True))

    @property
    def widths(self) -> tuple[int, ...]:
        """Drafts per round that are weighed."""
        return tuple(sorted({w for w in (*WEIGHED, self.own, self.widest) if w <= self.widest}))

    def predicted(self, k: int) -> float:
        """Speed at ``k`` drafts per round, in plain decoding's."""
        return choice.tokens(self.chances, k) / choice.seconds(self.rounds, k)

    @property
    def best(self) -> int:
        """Drafts per round with the highest predicted speed."""
        return max(self.widths, key=self.predicted)

    def learn(self, k: int, reading: Reading, plain: Reading) -> None:
        """Take in a reading at ``k`` and plain decoding's beside it."""
        self.rounds[k] = reading.round_seconds / plain.round_seconds
        more = [0] * (self.widest - k)  # places beyond k were not tried
        for total, new in ((self.reached, (reading.rounds, *reading.kept)[:k]), (self.kept, reading.kept)):
            total[:] = [a + b for a, b in zip(total or [0] * self.widest, [*new, *more], strict=True)]


@dataclasses.dataclass(frozen=True)
class Found:
    """The setting for one number of rows. ``k`` 0: plain decoding is faster than every drafter. ``ratio``: to plain
    decoding; ``speed``: tokens per second of all rows; ``runs``: times that all prompts were decoded with drafts, of
    ``sweep`` that a sweep takes."""

    rows: int
    method: str | None
    k: int
    ratio: float
    speed: float
    tried: tuple[Tried, ...]
    runs: float
    sweep: int

    def __str__(self) -> str:
        lines = [
            f"rows {self.rows}: {self.runs:.1f} runs over the prompts in place of a sweep's {self.sweep}"
        ]
        for one in sorted(self.tried, key=lambda one: -one.predicted(one.best)):
            chances = " ".join(f"{c:.2f}" for c in one.chances)
            costs = ", ".join(f"N {k}: {cost:.2f}" for k, cost in sorted(one.rounds.items()) if k)
            lines.append(f"  {one.method}: drafts kept, given those before: {chances}; a round costs {costs}")
            lines.append(f"    predicted best: N {one.best}, {one.predicted(one.best):.2f} x plain")
            lines += [
                f"    measured: N {k}, {ratio:.2f} x plain" for k, ratio in sorted(one.verified.items())
            ]
        if self.method is None:
            lines.append("  chosen: plain decoding, no drafter is faster")
        else:
            lines.append(
                f"  chosen: {self.method}, N {self.k}: {self.ratio:.2f} x plain, {self.speed:.1f} tokens/s"
            )
        return "\n".join(lines)


def search(methods: Mapping[str, tuple[int, int]], prompts: int, read: Read, rows: int = 1) -> Found:
    """The best setting at a number of rows. ``methods``: (own, widest) drafts per round of each; ``prompts``: how many
    there are (in units of what is decoded together); ``read`` decodes some of them."""
    tried = [Tried(name, own, widest) for name, (own, widest) in methods.items()]
    sweep = sum(len([w for w in SWEPT if w <= one.widest]) for one in tried)
    ledger = _Ledger(prompts, SHARE * sweep * prompts, read)
    sample = ledger.sample(max(2, int(FIRST * ledger.budget / len(tried))))
    for one in tried:
        ledger.learn(one, one.widest, sample)
    top = max(one.predicted(one.best) for one in tried)
    near = [one for one in tried if one.predicted(one.best) >= CLOSE * top]
    near = sorted(near, key=lambda one: -one.predicted(one.best))[:FINALISTS]
    for one in near:
        for _ in range(2):
            if one.best not in one.rounds and ledger.affords(len(sample)):
                ledger.learn(one, one.best, sample)
    ledger.verify(near)
    one = max(near, key=lambda one: max(one.verified.values(), default=one.predicted(one.best)))
    k = max(one.verified, key=lambda k: one.verified[k]) if one.verified else one.best
    ratio = one.verified.get(k, one.predicted(k))
    if one.predicted(one.best) > GAIN * one.predicted(k):
        k, ratio = one.best, ratio * one.predicted(one.best) / one.predicted(k)
    chosen, k = (one.method, k) if ratio > 1 else (None, 0)
    ratio = ratio if chosen else 1.0
    speed = ledger.plain_speed * ratio
    return Found(rows, chosen, k, ratio, speed, tuple(tried), ledger.spent / prompts, sweep)


class _Ledger:
    """Readings, and what they have cost in prompts decoded with drafts."""

    def __init__(self, prompts: int, budget: float, read: Read):
        self.prompts, self.budget, self.read = prompts, budget, read
        self.spent, self.plain_speed = 0, 0.0

    def sample(self, count: int) -> list[int]:
        """Numbers of prompts spread over all of them."""
        count = min(count, self.prompts)
        return [i * self.prompts // count for i in range(count)]

    def affords(self, count: int) -> bool:
        return self.spent + count <= self.budget

    def pair(self, method: str, k: int, sample: Sequence[int]) -> tuple[Reading, Reading]:
        """Drafted and plain, one after the other."""
        plain, drafted = self.read(None, 0, sample), self.read(method, k, sample)
        self.spent, self.plain_speed = self.spent + len(sample), plain.speed
        return drafted, plain

    def learn(self, one: Tried, k: int, sample: Sequence[int]) -> None:
        drafted, plain = self.pair(one.method, k, sample)
        one.learn(k, drafted, plain)

    def verify(self, tried: Sequence[Tried]) -> None:
        """Decode the best setting of every method on as many prompts as are left to spend."""
        close = list(tried)
        while len(close) > 1 and (self.budget - self.spent) / len(close) < min(self.prompts, 4):
            close.pop()
        count = min(int((self.budget - self.spent) / len(close)), self.prompts)
        if count < 1:
            return
        sample = self.sample(count)
        for one, k in [(one, one.best) for one in close]:
            drafted, plain = self.pair(one.method, k, sample)
            one.learn(k, drafted, plain)
            one.verified[k] = drafted.speed / plain.speed
