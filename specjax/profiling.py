"""Where the time of a round goes: draft, verify, accept, commit, inject, the rest of the round, and the host.

Three measurements of the same decode, none of which changes what is decoded:

* the whole round: chunks of rounds back to back, as decoding runs them, without reading their records;
* its parts, each compiled and looped alone (:mod:`specjax.profiling_parts`); what the round takes beyond their sum is
  called the rest: records, random keys, and what parts cost each other (weights that no longer are in a cache);
* the decode itself by the clock; what it takes beyond its rounds is called the host.

Plain decoding of the same prompts is measured beside, so that tokens per round (tau) can be set against what a round
costs (R, in plain steps): tau / R is the expected gain.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from specjax.calls import Call, plan
from specjax.core.loop import host_state, padded, prefill_rows
from specjax.core.platform import enable_compilation_cache
from specjax.core.programs import Engine
from specjax.generate import decode
from specjax.metrics import Stats
from specjax.profiling_parts import PARTS, Parts
from specjax.progress import line
from specjax.turns import in_turn
from specjax.types import Params, State

if TYPE_CHECKING:
    from specjax.html import Html

#: Where in a decode the parts are measured: after these shares of its rounds.
PLACES = (0.25, 0.5, 0.75)
#: Seconds that the measurements of whole decodes should take together, and how many there are at most.
ENOUGH, MOST = 0.5, 20


@dataclasses.dataclass(frozen=True)
class Profile:
    """Seconds of one round and of its parts, for one batch.

    ``parts``: each measured alone; those that a drafter does not have are 0. ``round``: a whole round on the device.
    ``host``: what decoding takes per round beyond that (differences of a few percent are noise, also below 0).
    ``plain``: a step of plain decoding, and ``plain_host`` what it takes beyond; None without a drafter. ``widths``:
    rounds by the number of positions that the target verified. ``scopes``: device time of a round by named scope, read
    from the trace; None without one, empty where the device's trace does not name its operations.
    """

    target: str
    drafter: str
    device: str
    dtype: str
    rows: int
    k: int
    rounds: int
    widths: dict[int, int]
    parts: dict[str, float]
    round: float
    host: float
    plain: float | None
    plain_host: float | None
    stats: Stats
    compile_seconds: float
    trace: Path | None = None
    scopes: dict[str, float] | None = None

    @property
    def rest(self) -> float:
        """Seconds of a round beyond its parts. Negative where parts are cheaper together."""
        return self.round - sum(self.parts.values())

    @property
    def cost(self) -> float | None:
        """R: what a round costs, in steps of plain decoding, on the device."""
        return self.round / self.plain if self.plain else None

    @property
    def expected(self) -> float | None:
        """Gain over plain decoding that tau and R predict: tau / R."""
        return self.stats.tau / self.cost if self.cost else None

    @property
    def measured(self) -> float | None:
        """Gain by the clock, host included, prefill not: tau steps of plain decoding beside one round."""
        if self.plain is None or self.plain_host is None:
            return None
        return self.stats.tau * (self.plain + self.plain_host) / (self.round + self.host)

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "stats"}
        derived = {name: getattr(self, name) for name in ("rest", "cost", "expected", "measured")}
        trace = None if self.trace is None else str(self.trace)
        return own | derived | {"stats": self.stats.as_dict(), "trace": trace}

    def plot(self, path: str | Path | None = None) -> Any:
        """A matplotlib figure; written to ``path`` (PNG, PDF, SVG by its suffix) if one is given.

        Raises ImportError without the optional extra ``plot``.
        """
        from specjax import profiling_view

        return profiling_view.plot(self, path)

    def __str__(self) -> str:
        from specjax import profiling_view

        return profiling_view.text(self)

    __repr__ = __str__

    def __rich__(self) -> Any:
        from specjax import profiling_view

        return profiling_view.table(self)

    def _repr_html_(self) -> "Html":
        from specjax import profiling_view

        return profiling_view.page(self)


def profile(
    params: Params,
    prompt: Any,
    *,
    trace: str | Path | None = None,
    plain: bool = True,
    repeats: int = 3,
    **options: Any,
) -> Profile:
    """Where the time of a round goes, for one batch of prompts. What is decoded does not change by it.

    Args:
        params: from :func:`specjax.load`; without a drafter the steps of plain decoding are profiled.
        prompt: as for :func:`specjax.decode`; a list is one batch.
        trace: folder for a trace of up to 16 rounds, made by jax's profiler: ``perfetto_trace.json.gz`` in it opens in
            https://ui.perfetto.dev, the folder in TensorBoard. Operations are named by the parts of a round.
        plain: measure plain decoding of the same prompts beside (compiles it, too).
        repeats: measurements of each time, of which the least counts; short ones are repeated more often.
        **options: those of :func:`specjax.decode`; ``max_new_tokens`` decides how many rounds are run.

    Returns:
        :class:`Profile`: seconds by part; ``print`` it, show it in a notebook, or :meth:`Profile.plot` it.

    Raises:
        ValueError: more prompts than rows, stop strings, ``k="auto"``, or an option that ``decode`` refuses.
        OSError: the trace's folder cannot be written.
    """
    call = _checked(params, prompt, repeats, options)
    enable_compilation_cache()
    with line(options.get("verbose")) as say:
        say("profiling: whole rounds")
        whole = _Whole(params, prompt, options, call, repeats)
        say("profiling: parts of a round")
        parts = _parts(whole, repeats)
        beside = None
        if plain and params.meta.drafter is not None:
            say("profiling: plain decoding")
            beside = _plain(params, prompt, options, repeats)
        scopes = None
        if trace is not None:
            from specjax import profiling_trace

            say(f"profiling: tracing into {trace}")
            scopes = profiling_trace.record(whole, Path(trace))
    return Profile(
        target=params.meta.name or params.meta.family,
        drafter=params.meta.drafter or "none",
        device=jax.devices()[0].device_kind,
        dtype=call.program.dtype,
        rows=call.program.rows,
        k=call.program.k,
        rounds=whole.rounds,
        widths=whole.widths,
        parts=parts,
        round=whole.round,
        host=whole.clock - whole.round,
        plain=None if beside is None else beside.round,
        plain_host=None if beside is None else beside.clock - beside.round,
        stats=whole.stats,
        compile_seconds=whole.stats.compile_seconds,
        trace=None if trace is None else Path(trace),
        scopes=scopes,
    )


def _checked(params: Params, prompt: Any, repeats: Any, options: dict[str, Any]) -> Call:
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
        raise ValueError(f"repeats must be an integer of at least 1, got {repeats!r}")
    call = plan(params, prompt, **options)
    if call.program.auto:
        raise ValueError('a profile is that of one draft width: pass a number as k, not "auto"')
    if len(call.jobs) > call.program.rows:
        raise ValueError(
            f"a profile is that of one batch: {len(call.jobs)} sequences do not fit into rows={call.program.rows}"
        )
    if any(job.options.stop_strings for job in call.jobs):
        raise ValueError("profile takes stop ids only: stop strings are found on the host")
    if max(job.options.max_new_tokens for job in call.jobs) < 2:
        raise ValueError(
            "nothing to profile: the first token is the prefill's; ask for max_new_tokens of 2 or more"
        )
    return call


def _plain(params: Params, prompt: Any, options: dict[str, Any], repeats: int) -> "_Whole":
    from specjax.identity import without_drafter

    alone = {name: value for name, value in options.items() if name not in ("k", "rule")}
    params = without_drafter(params)
    return _Whole(params, prompt, alone, plan(params, prompt, **alone), repeats)


class _Whole:
    """A decode, run and timed: by the clock, and its rounds alone."""

    def __init__(self, params: Params, prompt: Any, options: dict[str, Any], call: Call, repeats: int):
        self.call, self.engine = call, call.engines()[0]
        self.stats = decode(params, prompt, **options).total
        self.widths = self._seen()
        self.rounds = sum(self.widths.values())
        if not self.rounds:
            raise ValueError(
                "nothing to profile: every answer ended with its first token; choose another prompt"
            )
        self._seconds()  # warms up
        self.clock = (
            _least(lambda: decode(params, prompt, **options).total.decode_seconds, repeats) / self.rounds
        )
        self.round = _least(self._seconds, repeats) / self.rounds

    def state(self, rounds: int = 0) -> State:
        """The state after prefill and some rounds, ready on the device."""
        host = host_state(self.call.program, padded(self.call.program, self.call.jobs))
        state = prefill_rows(self.engine, host, self.call.drive.prefill_chunk)[0]
        for n in _chunks(self.engine, rounds):
            state, _ = self.engine.chunk(state, n)
        return jax.block_until_ready(state)

    def _seen(self) -> dict[int, int]:
        """Rounds by the number of positions verified."""
        state, seen = self.state(), dict[int, int]()
        while not bool(state.done.all()):
            state, emit = self.engine.chunk(state, self.engine.program.rounds)
            for width in jax.device_get(emit.width).tolist():
                if width:
                    seen[width] = seen.get(width, 0) + 1
        return dict(sorted(seen.items()))

    def _seconds(self) -> float:
        state = self.state()
        began = time.perf_counter()
        for n in _chunks(self.engine, self.rounds):
            state, _ = self.engine.chunk(state, n)
        jax.block_until_ready(state)
        return time.perf_counter() - began


def _least(measure: Callable[[], float], repeats: int) -> float:
    """The least of so many measurements; of more while they are short, since these are disturbed the most."""
    seen = [measure() for _ in range(repeats)]
    while sum(seen) < ENOUGH and len(seen) < MOST:
        seen.append(measure())
    return min(seen)


def _chunks(engine: Engine, rounds: int) -> Iterator[int]:
    most = engine.program.rounds
    while rounds > 0:
        yield min(rounds, most)
        rounds -= most


def _parts(whole: _Whole, repeats: int) -> dict[str, float]:
    """Seconds per round of every part: the mean over places, and over widths as often as they occurred."""
    program, weights = whole.engine.program, whole.engine.weights
    places = sorted({int(share * whole.rounds) for share in PLACES})
    total = dict.fromkeys(PARTS, 0.0)
    for place in places:
        for width, times in whole.widths.items():
            timers = Parts(program, weights, whole.state(place), width - 1).timers()
            least = in_turn(timers, repeats, min)
            for name, seconds in least.items():
                total[name] += seconds * times / whole.rounds / len(places)
    return total
