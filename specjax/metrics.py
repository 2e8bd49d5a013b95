"""Counters of a decode and every figure derived from them. One definition each; docs/metrics.md works one
trace by hand and says what vLLM, transformers and papers call the same thing.

Everything is computed on the host from one :class:`RoundRecord` per row and round, after the output has
been cut at its stop: no counter ever includes a token that the caller does not get.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple


class RoundRecord(NamedTuple):
    """What one round did for one row.

    ``proposed``: drafts the target checked. ``accepted``: drafts that were kept *and emitted*.
    ``emitted``: tokens the row got: accepted + 1, or less when a stop or the budget ended the row. ``source``:
    which drafter of a chain spoke, 0 for the first or only one.
    """

    proposed: int
    accepted: int
    emitted: int
    source: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats:
    """Raw counters of one or several rows (fields) and what follows from them (properties).

    ``rounds`` counts every round of a live row, also those that proposed nothing; the prefill is no round.
    Tuples have one entry per draft position i = 1, 2, ...: ``proposed_at`` rounds that proposed at least
    i, ``accepted_at`` rounds that accepted at least i, ``reached_at`` rounds that proposed at least i and
    accepted at least i-1. ``proposed_by`` and ``accepted_by`` have one entry per drafter of a chain that
    proposed anything, up to the last. ``new_tokens`` is everything returned, the prefill's token included. Seconds
    are wall-clock; ``compile_seconds`` is in neither of the other two.
    """

    rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    emitted: int = 0
    proposed_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()
    reached_at: tuple[int, ...] = ()
    proposed_by: tuple[int, ...] = ()
    accepted_by: tuple[int, ...] = ()
    new_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    compile_seconds: float = 0.0
    seed: int | None = None

    @classmethod
    def from_rounds(
        cls,
        records: Iterable[RoundRecord | tuple[int, ...]],
        *,
        new_tokens: int | None = None,
        prefill_seconds: float = 0.0,
        decode_seconds: float = 0.0,
        compile_seconds: float = 0.0,
        seed: int | None = None,
    ) -> "Stats":
        """Count a row's rounds. ``new_tokens`` defaults to what the rounds emitted.

        All-zero records (rounds that ran for other rows after this one ended) are left out. Raises
        ValueError for a record that no round can produce.
        """
        rounds = [_checked(RoundRecord(*r)) for r in records]
        rounds = [r for r in rounds if r[:3] != (0, 0, 0)]
        emitted = sum(r.emitted for r in rounds)
        positions = range(1, max((r.proposed for r in rounds), default=0) + 1)
        count = lambda holds: tuple(sum(holds(r, i) for r in rounds) for i in positions)  # noqa: E731
        sources = range(1 + max((r.source for r in rounds if r.proposed), default=-1))
        by = lambda name: tuple(sum(getattr(r, name) for r in rounds if r.source == s) for s in sources)  # noqa: E731
        return cls(
            rounds=len(rounds),
            proposed=sum(r.proposed for r in rounds),
            accepted=sum(r.accepted for r in rounds),
            emitted=emitted,
            proposed_at=count(lambda r, i: r.proposed >= i),
            accepted_at=count(lambda r, i: r.accepted >= i),
            reached_at=count(lambda r, i: r.proposed >= i and r.accepted >= i - 1),
            proposed_by=by("proposed"),
            accepted_by=by("accepted"),
            new_tokens=emitted if new_tokens is None else new_tokens,
            prefill_seconds=prefill_seconds,
            decode_seconds=decode_seconds,
            compile_seconds=compile_seconds,
            seed=seed,
        )

    @property
    def drafting_rounds(self) -> int:
        """Rounds that proposed at least one token."""
        return self.proposed_at[0] if self.proposed_at else 0

    @property
    def tau(self) -> float:
        """Tokens emitted per round, over all rounds: the target's own token and an EOS are in, the
        prefill's token and everything after a stop are not. 0.0 without rounds."""
        return _ratio(self.emitted, self.rounds)

    @property
    def mean_acceptance_length(self) -> float:
        """``1 + accepted / drafting_rounds``, vLLM's figure on tokens that were emitted. 1.0 if nothing
        was drafted. Differs from ``tau`` by rounds without drafts and by rounds cut at a stop."""
        return 1.0 + _ratio(self.accepted, self.drafting_rounds)

    @property
    def acceptance_rate(self) -> float:
        """``accepted / proposed``; 0.0 if nothing was proposed."""
        return _ratio(self.accepted, self.proposed)

    @property
    def accepted_per_position(self) -> tuple[float, ...]:
        """Unconditional: of the rounds that proposed at least i drafts, the share that accepted i."""
        return _ratios(self.accepted_at, self.proposed_at)

    @property
    def conditional_per_position(self) -> tuple[float, ...]:
        """The same share among rounds that also accepted the first i-1; 0.0 where none got there."""
        return _ratios(self.accepted_at, self.reached_at)

    @property
    def tokens_per_second(self) -> float:
        """``new_tokens / (prefill_seconds + decode_seconds)``; compilation excluded. 0.0 if not timed."""
        return _ratio(self.new_tokens, self.prefill_seconds + self.decode_seconds)

    def as_dict(self) -> dict[str, Any]:
        """Fields and derived figures, ready for JSON."""
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in DERIVED}

    def _repr_html_(self) -> str:
        from specjax import views

        return views.stats_html(self)

    def __rich__(self) -> Any:
        from specjax import views

        return views.stats_table(self)


COLUMNS = ("proposed_at", "accepted_at", "reached_at", "proposed_by", "accepted_by")
DERIVED = (
    "drafting_rounds",
    "tau",
    "mean_acceptance_length",
    "acceptance_rate",
    "accepted_per_position",
    "conditional_per_position",
    "tokens_per_second",
)


def merge(parts: Sequence[Stats], *, concurrent: bool = False) -> Stats:
    """Counters summed: every ratio of the result is weighted by rounds or tokens, not averaged per row.

    Seconds are summed as well; with ``concurrent`` (rows of one batch, which share the clock) the largest
    counts. ``seed`` survives if all parts agree. No parts give empty Stats.
    """
    total = lambda name: sum(getattr(p, name) for p in parts)  # noqa: E731
    clock = lambda name: float((max if concurrent else sum)([getattr(p, name) for p in parts] or [0.0]))  # noqa: E731
    columns = lambda name: tuple(map(sum, zip_longest(*(getattr(p, name) for p in parts), fillvalue=0)))  # noqa: E731
    seeds = {p.seed for p in parts}
    return Stats(
        **{name: total(name) for name in ("rounds", "proposed", "accepted", "emitted", "new_tokens")},
        **{name: columns(name) for name in COLUMNS},
        **{name: clock(name) for name in ("prefill_seconds", "decode_seconds", "compile_seconds")},
        seed=seeds.pop() if len(seeds) == 1 else None,
    )


def truncate(records: Iterable[RoundRecord | tuple[int, ...]], keep_tokens: int) -> list[RoundRecord]:
    """Records as if the row had ended after ``keep_tokens`` tokens of its rounds (a stop string).

    The prefill's token is not among them. The round in which the cut falls keeps what it proposed;
    ``accepted`` becomes at most its shortened ``emitted``. Rounds after the cut vanish.
    """
    if keep_tokens < 0:
        raise ValueError(f"keep_tokens must not be negative, got {keep_tokens}")
    kept: list[RoundRecord] = []
    for record in (RoundRecord(*r) for r in records):
        if keep_tokens == 0:
            break
        emitted = min(record.emitted, keep_tokens)
        kept.append(record._replace(accepted=min(record.accepted, emitted), emitted=emitted))
        keep_tokens -= emitted
    return kept


def _checked(record: RoundRecord) -> RoundRecord:
    proposed, accepted, emitted, _ = record
    if not (0 <= accepted <= proposed and accepted <= emitted <= accepted + 1):
        raise ValueError(
            f"no round gives {record[:3]}: needs 0 <= accepted <= proposed and emitted = accepted (+ 1)"
        )
    return record


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _ratios(parts: tuple[int, ...], wholes: tuple[int, ...]) -> tuple[float, ...]:
    return tuple(_ratio(p, w) for p, w in zip(parts, wholes, strict=True))
