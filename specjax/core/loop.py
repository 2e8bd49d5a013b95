"""The driver: prefill, chunks of rounds, refill of finished rows. The host is in control between chunks.

The host reads chunk i while chunk i+1 runs, one device-to-host read per chunk. Its decisions (a stop
string, a refill) apply to the newest state; ``request_id`` in the record credits late chunks correctly.
"""

import collections
import concurrent.futures
import dataclasses
import itertools
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from specjax.config import Options, Program, bounded_chunk, prefill_bucket, refill_groups
from specjax.core.pace import Step, pace
from specjax.core.programs import Engine
from specjax.types import NONFINITE, REASONS, RUNNING, Counts, Emit, Sampling, State

EMPTY = -1  # request_id of a row that serves nobody
STOP_STRING = "stop_string"


@dataclasses.dataclass
class Job:
    """One request on the host: its prompt, its options, and what has come back so far."""

    index: int
    prompt: np.ndarray
    options: Options
    key: np.ndarray  # raw key data, uint32 [2]
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    drafted: list[bool] = dataclasses.field(default_factory=list)
    #: proposed, accepted, emitted, index of the drafter that spoke
    rounds: list[tuple[int, int, int, int]] = dataclasses.field(default_factory=list)
    reason: str | None = None
    began: float = 0.0  # times of the engines' clock, which stands still while compiling
    first: float = 0.0  # first token
    latest: float = 0.0  # last update
    #: Asked after every update; a number of tokens to keep ends the request there (stop strings).
    check: Callable[["Job"], int | None] | None = None

    @property
    def limit(self) -> int:
        """Length at which the budget is spent."""
        return len(self.prompt) + self.options.max_new_tokens


@dataclasses.dataclass(frozen=True)
class Driving:
    """How the loop is driven (never what it computes)."""

    loop: Literal["device", "host"] = "device"
    rounds: int = 16  # rounds per chunk
    prefill_chunk: int = 512


class Queue:
    """Jobs that wait for a row, made as they are asked for; ``put`` adds one that goes first."""

    def __init__(self, jobs: Iterable[Job] = ()):
        self._first: collections.deque[Job] = collections.deque()
        self._rest = iter(jobs)

    def put(self, job: Job) -> None:
        """Let a job wait that nobody knew of before."""
        self._first.append(job)

    def take(self, most: int) -> list[Job]:
        """The next jobs, at most ``most`` of them."""
        taken = [self._first.popleft() for _ in range(min(most, len(self._first)))]
        return taken + list(itertools.islice(self._rest, most - len(taken)))


def serve(
    engine: Engine, one: Engine, jobs: Iterable[Job] | Queue, drive: Driving
) -> Generator[Job, None, State | None]:
    """Decode every job, yielding a job whenever it has new tokens or has ended.

    ``engine`` runs ``program.rows`` rows; further jobs enter rows as they fall free, several at once when several
    are free (``one`` in other sizes prefills them). Jobs with a budget of 0 never reach the device. Returns the
    last state.
    """
    queue = jobs if isinstance(jobs, Queue) else Queue(jobs)
    waiting: list[Job] = []
    while len(waiting) < engine.program.rows and (taken := queue.take(engine.program.rows - len(waiting))):
        waiting += yield from _with_budget(taken)
    if not waiting:
        return None
    rows: list[Job | None] = [*waiting, *[None] * (engine.program.rows - len(waiting))]
    for job in waiting:
        job.began = clock(engine, one)
    state, records = prefill_rows(engine, host_state(engine.program, rows), drive.prefill_chunk)
    records = read(records)
    yield from credit(records, rows, clock(engine, one))
    return (yield from run_rounds(engine, one, state, rows, queue, drive))


def _with_budget(jobs: list[Job]) -> Generator[Job, None, list[Job]]:
    """The jobs that have something to decode; the others have ended."""
    for job in jobs:
        if job.options.max_new_tokens == 0:
            job.reason = "length"
            yield job
    return [job for job in jobs if not job.reason]


def run_rounds(
    engine: Engine, one: Engine, state: State, rows: list[Job | None], queue: Queue, drive: Driving
) -> Generator[Job, None, State]:
    """Chunks of rounds over a prefilled state until every row and the queue are finished.

    A chunk runs in a thread of its own: where the loop's condition is read back by the host (GPUs), the call
    returns only when the chunk is over, and this thread credits the one before meanwhile.
    """
    with concurrent.futures.ThreadPoolExecutor(1, "specjax-chunk") as beside:
        return (yield from _rounds(engine, one, state, rows, queue, drive, beside))


def _rounds(engine, one, state, rows, queue, drive, beside) -> Generator[Job, None, State]:
    behind: list[Emit] = []
    pacing = pace(engine.program, min(drive.rounds, engine.program.rounds))
    past: tuple[Step, list[Emit], float] | None = None  # a chunk that is over and not learned from
    while True:
        free = [b for b, job in enumerate(rows) if job is None or job.reason]
        entering: list[Job] = []
        while len(entering) < len(free) and (taken := queue.take(len(free) - len(entering))):
            entering += yield from _with_budget(taken)
        state, refilled = _refill(engine, one, state, free, entering, rows, drive)
        if all(job is None or job.reason for job in rows):
            return state
        step = pacing.step()
        engine.compile_rounds(
            state, drive.loop, step
        )  # here: a thread does not see the caller's settings of jax
        if refilled and pacing.timed:  # the chunk's time must not hold theirs
            jax.block_until_ready(state)
        running = beside.submit(_advance, engine, state, drive, step, pacing.timed)
        records = read(behind)
        yield from credit(records, rows, clock(engine, one))
        if past is not None:
            pacing.learn(past[0], records[-len(past[1]) :], past[2])
        state, newest, seconds = running.result()
        behind, past = [*refilled, *newest], (step, newest, seconds)
        cut = np.array([bool(job and job.reason == STOP_STRING) for job in rows])
        if cut.any():  # a stop string: the device does not know yet
            state = engine.finish(state, cut)


def _advance(
    engine: Engine, state: State, drive: Driving, step: Step, timed: bool
) -> tuple[State, list[Emit], float]:
    """One chunk and its seconds, which mean something if ``timed``: then it is over when this returns."""
    began, emits = time.perf_counter(), []
    if drive.loop == "device":
        state, emit = engine.chunk(state, step.rounds, step)
        emits.append(emit)
    else:
        for _ in range(step.rounds):
            state, emit = engine.round(state, step)
            emits.append(emit)
    if timed:
        jax.block_until_ready(emits)
    return state, emits, time.perf_counter() - began


def _refill(engine: Engine, one: Engine, state: State, free, entering, rows, drive: Driving):
    """Put jobs into free rows, in groups that are prefilled together. Other free rows that had a job lose it."""
    records: list[Emit] = []
    for b, job in itertools.zip_longest(free, entering):
        rows[b] = job
    for size in refill_groups(len(entering), engine.program.rows):
        jobs, entering = entering[:size], entering[size:]
        places, free = free[:size][: len(jobs)], free[size:]
        for job in jobs:
            job.began = clock(engine, one)
        group = one.sized(size)
        host = host_state(group.program, [*jobs, *[None] * (size - len(jobs))])
        part, emits = prefill_rows(group, host, drive.prefill_chunk)
        state = engine.insert(state, places, part)
        records += emits
    return state, records


def prefill_rows(
    engine: Engine, host: State, chunk: int, start: int = 0, state: State | None = None
) -> tuple[State, list[Emit]]:
    """Prefill every row from position ``start``; ``state`` continues an existing one (conversations)."""
    longest = int(np.max(host.prompt_len))
    width = prefill_bucket(longest - start, bounded_chunk(engine.program, chunk))
    state = engine.init(host) if state is None else jax.device_put(state)
    records = []
    for at in range(start, longest, width):
        begin = jnp.full((engine.program.rows,), at, jnp.int32)
        state, emit = engine.prefill(state, begin, width)
        records.append(emit)
    return state, records


def host_state(program: Program, rows: list[Job | None]) -> State:
    """State of a batch as numpy arrays, caches left empty. None = a row that serves nobody."""
    b, jobs = len(rows), [job or _idle() for job in rows]
    tokens = np.zeros((b, program.tokens), np.int32)
    stops = np.full((b, program.n_stop), -1, np.int32)
    for i, job in enumerate(jobs):
        tokens[i, : len(job.prompt)] = job.prompt
        stops[i, : len(job.options.stop_ids)] = job.options.stop_ids
    lengths = np.array([len(job.prompt) for job in jobs], np.int32)
    sampling = host_sampling(program, [job.options for job in jobs])
    return State(
        tokens=tokens,
        length=lengths,
        prompt_len=lengths.copy(),
        limit=np.array([job.limit for job in jobs], np.int32),
        done=np.array([job is None for job in rows]),
        reason=np.zeros(b, np.int32),
        request_id=np.array([job.index for job in jobs], np.int32),
        stop_ids=stops,
        key_data=None if sampling.greedy else np.stack([job.key for job in jobs]),
        sampling=sampling,
        counts=_host_counts(program, jobs) if sampling.penalised else None,
        target=(),
        drafter=(),
    )


def padded(program: Program, jobs: Sequence[Job]) -> list[Job | None]:
    """Jobs in the rows of a program; rows without one hold None."""
    rows: list[Job | None] = list(jobs[: program.rows])
    return rows + [None] * (program.rows - len(rows))


def _idle() -> Job:
    return Job(EMPTY, np.zeros(1, np.int32), Options(max_new_tokens=1), np.zeros(2, np.uint32))


def host_sampling(program: Program, options: list[Options]) -> Sampling:
    """Per-row sampling arrays for exactly the options the program was built with."""
    on = program.flags
    column = lambda name, dtype=np.float32: np.array([getattr(o, name) for o in options], dtype)  # noqa: E731
    return Sampling(
        temperature=column("temperature") if "temperature" in on else None,
        top_k=column("top_k", np.int32) if "top_k" in on else None,
        top_p=column("top_p") if "top_p" in on else None,
        min_p=column("min_p") if "min_p" in on else None,
        repetition=column("repetition_penalty") if "repetition_penalty" in on else None,
        presence=column("presence_penalty") if "presence_penalty" in on else None,
        frequency=column("frequency_penalty") if "frequency_penalty" in on else None,
        bias=_host_bias(program, options) if "logit_bias" in on else None,
    )


def _host_bias(program: Program, options: list[Options]) -> np.ndarray:
    bias = np.zeros((len(options), program.pair.target_cfg.vocab_size), np.float32)
    for row, option in zip(bias, options, strict=True):
        for token, value in option.logit_bias:
            row[token] = value
    return bias


def _host_counts(program: Program, jobs: list[Job]) -> Counts:
    shape = (len(jobs), program.pair.target_cfg.vocab_size)
    prompt = np.zeros(shape, bool)
    for row, job in zip(prompt, jobs, strict=True):
        row[job.prompt] = True
    return Counts(prompt, np.zeros(shape, np.int32))


def read(records: list[Emit]) -> list[Any]:
    """The one device-to-host read of a chunk."""
    return jax.device_get(records) if records else []


def clock(engine: Engine, one: Engine) -> float:
    """Seconds that do not pass while a program is being compiled."""
    compiling = engine.compile_seconds + (one.compile_seconds if one is not engine else 0.0)
    return time.perf_counter() - compiling


def credit(records: list[Any], rows: list[Job | None], now: float) -> Iterator[Job]:
    """Hand each row's tokens to the job that owned it; yields the jobs that changed."""
    owners = {job.index: job for job in rows if job is not None}
    changed: dict[int, Job] = {}
    for emit in records:
        for owner, piece in _pieces(emit):
            job = owners.get(owner)
            if job is not None and job.reason is None:
                _take(job, piece, now)
                changed[owner] = job
    for job in changed.values():
        keep = job.check(job) if job.check else None
        if keep is not None:
            job.reason = STOP_STRING
            job.tokens[keep:] = []
        yield job


@dataclasses.dataclass
class _Piece:
    """What a record holds for one row: the same fields as in :class:`Job`."""

    tokens: list[int]
    drafted: list[bool]
    logprobs: list[float]
    rounds: list[tuple[int, int, int, int]]
    reason: int


def _pieces(emit) -> Iterator[tuple[int, _Piece]]:
    """(request, piece) of every row that took part in a record.

    Arrays become lists for all rows at once: with a thousand rows a call per row and round would take longer than
    the device.
    """
    emitted, accepted, reason, proposed, source, owner = (
        np.asarray(x).T
        for x in (emit.emitted, emit.accepted, emit.reason, emit.proposed, emit.source, emit.request_id)
    )  # [B R]
    live = (emitted > 0) | (reason == NONFINITE)
    over = np.cumsum(live & (reason != RUNNING), 1) - (live & (reason != RUNNING))
    live &= over == 0  # a row's last round, and none after it
    at = np.arange(emit.tokens.shape[2])
    real = live[:, :, None] & (at < emitted[:, :, None])
    flat = lambda x: x.swapaxes(0, 1)[real].tolist()  # noqa: E731
    tokens, drafted = flat(emit.tokens), (at < accepted[:, :, None])[real].tolist()
    logprobs = flat(emit.logprobs) if emit.logprobs is not None else []
    was_round = live & (emit.width > 0)  # the prefill's token is no round
    rounds = list(zip(*(x[was_round].tolist() for x in (proposed, accepted, emitted, source)), strict=True))
    ends, turns = np.cumsum(real.sum((1, 2))).tolist(), np.cumsum(was_round.sum(1)).tolist()
    last = np.where(live, np.arange(live.shape[1]), -1).max(1)
    for b in np.flatnonzero(last >= 0).tolist():
        part = slice(ends[b - 1] if b else 0, ends[b])
        turn = slice(turns[b - 1] if b else 0, turns[b])
        yield (
            int(owner[b, last[b]]),
            _Piece(tokens[part], drafted[part], logprobs[part], rounds[turn], int(reason[b, last[b]])),
        )


def _take(job: Job, piece: _Piece, now: float) -> None:
    job.latest = now
    if not piece.rounds:
        job.first = now
    job.tokens += piece.tokens
    job.drafted += piece.drafted
    job.logprobs += piece.logprobs
    job.rounds += piece.rounds
    if piece.reason != RUNNING:
        job.reason = REASONS[piece.reason]
