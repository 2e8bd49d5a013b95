"""What a measurement says: one :class:`Row` per setting. Every figure follows from times and counters by the
functions of this file, which need no model; docs/benchmarks.md works one example by hand.
"""

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from specjax import metrics
from specjax.metrics import Stats


class Timed(NamedTuple):
    """One batch of prompts, decoded once. Seconds are those of the batch; ``rounds`` has one entry per prompt."""

    tokens: int  # returned, the prefill's token of every prompt included
    emitted: int  # of rounds
    rounds: tuple[int, ...]
    prefill_seconds: float
    decode_seconds: float

    @classmethod
    def of(cls, stats: Sequence[Stats]) -> "Timed":
        """From the counters of a batch's prompts, which share the clock."""
        whole = metrics.merge(stats, concurrent=True)
        rounds = tuple(s.rounds for s in stats)
        return cls(whole.new_tokens, whole.emitted, rounds, whole.prefill_seconds, whole.decode_seconds)

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + self.decode_seconds


class Spread(NamedTuple):
    """A median with the smallest and the largest value."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))


@dataclasses.dataclass(frozen=True)
class Costs:
    """Milliseconds, each timed in a device loop of its own (:mod:`specjax.bench.alone`).

    ``plain_ms``: a round of plain decoding. ``round_ms``: a round with drafts. ``widths``: how many drafts the target
    verified, and in which share of the rounds. ``verify_ms``: the target's pass over the drafts and acceptance, mean
    over ``widths``. ``draft_ms``: the drafter's pass for ``k`` drafts. None: not timed.
    """

    plain_ms: float
    round_ms: float
    widths: tuple[tuple[int, float], ...] = ()
    verify_ms: float | None = None
    draft_ms: float | None = None

    @property
    def round(self) -> float:
        """R: a round in plain steps."""
        return self.round_ms / self.plain_ms

    @property
    def verify(self) -> float | None:
        """c(N+1), in plain steps."""
        return None if self.verify_ms is None else self.verify_ms / self.plain_ms

    @property
    def draft(self) -> float | None:
        """D(N), in plain steps."""
        return None if self.draft_ms is None else self.draft_ms / self.plain_ms

    @property
    def other(self) -> float | None:
        """o: what the round takes beyond both, in plain steps: taking in the target's features, keys, records. Below 0
        where a part alone is slower than inside the round."""
        if self.verify is None or self.draft is None:
            return None
        return self.round - self.verify - self.draft


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One method at one setting on one set of prompts, beside plain decoding of the same prompts in the same run.

    What was measured:
        ``method``, ``drafter`` (name or files), ``dataset``, ``checksum`` (of its prompts' ids), ``prompts``, ``k``,
        ``batch``, ``temperature``, ``rule`` (as applied), ``max_new_tokens``, ``ignore_eos``, ``chat_template``
        ("model", "none" or a digest), ``dtype``, ``max_len``, ``repeats``.
    Acceptance (:mod:`specjax.metrics`; of one repeat):
        ``stats``, and ``finished``: share of answers that ended by themselves.
    Speed (median, smallest and largest over repeats; compilation excluded):
        ``speed`` and ``plain_speed``: tokens per second, prefill included; ``ratio`` of the two. ``decode_ratio``: the
        same of tokens from rounds and the seconds of rounds alone. ``by_prompt``: quartiles of the batches' ratios.
        ``first_token_ms``, ``plain_first_token_ms``: time to first token, median over batches. ``call_ms``,
        ``plain_call_ms``: a round as decoding takes it, the host's part included (``costs`` has the device's).
        ``busy``, ``plain_busy``: share of a batch's rows that were still decoding, mean over its rounds (1 at batch
        1). ``drift``: time that plain decoding of a batch took in this row by the time it took when it was answered.
    Cost model:
        ``costs``; ``predicted``: tau / R, times busy / plain_busy; ``gap`` to ``decode_ratio``.
    Identity with plain decoding:
        ``checked``: how prompts were compared ("greedy", or with equal samples: "match"; "law": only the distribution
        is kept, ids may differ); ``identical``; ``near_ties`` and ``largest_gap``: of prompts that differ, the float32
        gap of the two candidates' logits; ``unexplained``: of those, whose gap was not looked at or does not exist.
    Memory in bytes:
        ``target_bytes``, ``drafter_bytes``, ``state_bytes`` (caches and all), ``peak_bytes`` (of the process so far,
        from the device; None where it does not tell).
    ``compile_seconds``, ``plain_compile_seconds``: spent in this row. ``seconds``: the whole row took. ``notes``: what
    to know before quoting the row. ``facts``: device, versions, commit.
    """

    method: str
    drafter: str
    dataset: str
    checksum: str
    prompts: int
    k: int | str  # or "auto"
    batch: int
    temperature: float
    rule: str
    max_new_tokens: int
    ignore_eos: bool
    chat_template: str
    dtype: str
    max_len: int
    repeats: int
    stats: Stats
    finished: float
    speed: Spread
    plain_speed: Spread
    ratio: Spread
    decode_ratio: Spread
    by_prompt: tuple[float, float, float]
    first_token_ms: float
    plain_first_token_ms: float
    call_ms: float
    plain_call_ms: float
    busy: float
    plain_busy: float
    drift: Spread
    costs: Costs | None
    checked: str
    identical: int
    near_ties: int
    largest_gap: float
    unexplained: int
    target_bytes: int
    drafter_bytes: int
    state_bytes: int
    peak_bytes: int | None
    compile_seconds: float
    plain_compile_seconds: float
    seconds: float
    notes: tuple[str, ...] = ()
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def tau(self) -> float:
        return self.stats.tau

    @property
    def predicted(self) -> float | None:
        """Speed-up of decoding that tau and R give."""
        return (
            None if self.costs is None else predicted(self.tau, self.costs.round, self.busy, self.plain_busy)
        )

    @property
    def gap(self) -> float | None:
        """Predicted by measured, less one."""
        return None if self.predicted is None else self.predicted / self.decode_ratio.median - 1

    def as_dict(self) -> dict[str, Any]:
        """Fields and what follows from them, ready for JSON; :meth:`from_dict` reads it back."""
        out = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        out["stats"] = self.stats.as_dict()
        out |= {name: getattr(self, name)._asdict() for name in SPREADS}
        if self.costs is not None:
            derived = {name: getattr(self.costs, name) for name in ("round", "verify", "draft", "other")}
            out["costs"] = dataclasses.asdict(self.costs) | derived
        return json.loads(json.dumps(out | {"predicted": self.predicted, "gap": self.gap}))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Row":
        """Row of :meth:`as_dict`'s dict."""
        values = {f.name: data[f.name] for f in dataclasses.fields(cls)}
        values |= {name: Spread(**data[name]) for name in SPREADS}
        values["stats"] = _rebuilt(Stats, data["stats"])
        values["costs"] = None if data["costs"] is None else _rebuilt(Costs, data["costs"])
        return cls(**{key: _tuples(v) if isinstance(v, list) else v for key, v in values.items()})


SPREADS = ("speed", "plain_speed", "ratio", "decode_ratio", "drift")


def _rebuilt(cls: type, data: Mapping[str, Any]) -> Any:
    return cls(**{f.name: _tuples(data[f.name]) for f in dataclasses.fields(cls)})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def speed(batches: Sequence[Timed]) -> float:
    """Tokens per second, prefill included."""
    return _by(sum(t.tokens for t in batches), sum(t.seconds for t in batches))


def decode_speed(batches: Sequence[Timed]) -> float:
    """Tokens from rounds per second of rounds."""
    return _by(sum(t.emitted for t in batches), sum(t.decode_seconds for t in batches))


def call_ms(batches: Sequence[Timed]) -> float:
    """Milliseconds per round of a batch."""
    return 1e3 * _by(sum(t.decode_seconds for t in batches), sum(max(t.rounds) for t in batches))


def busy(batches: Sequence[Timed]) -> float:
    """Share of a batch's rows that were still decoding, mean over its rounds: prompts of a batch start together, and
    the batch ends with its longest."""
    whole = sum(len(t.rounds) * max(t.rounds) for t in batches)
    return sum(sum(t.rounds) for t in batches) / whole if whole else 1.0


def scaled(batches: Sequence[Timed], now: Mapping[int, Timed]) -> list[Timed]:
    """Times of ``batches`` as they would be now: those of ``now`` (by index) say how much slower or faster the machine
    has become, for prefill and decoding apart."""
    then = [batches[i] for i in now]
    prefill = _by(sum(t.prefill_seconds for t in now.values()), sum(t.prefill_seconds for t in then), 1.0)
    decode = _by(sum(t.decode_seconds for t in now.values()), sum(t.decode_seconds for t in then), 1.0)
    return [
        t._replace(prefill_seconds=t.prefill_seconds * prefill, decode_seconds=t.decode_seconds * decode)
        for t in batches
    ]


def predicted(tau: float, cost: float, rows: float = 1.0, plain_rows: float = 1.0) -> float:
    """Speed-up from tokens per round and the cost of a round in plain steps. Where rows of a batch end early, each side
    is as fast as its rows are busy."""
    return tau / cost * rows / plain_rows


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile."""
    if len(values) < 2:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def _by(part: float, whole: float, otherwise: float = 0.0) -> float:
    return part / whole if whole else otherwise
