"""Out of device memory: what needed how much, what there is, and what would fit.

The compiler and the allocator say how large the array was that did not fit, which helps nobody. Here their error
becomes an :class:`OutOfMemoryError` that speaks of rows and lengths. The arrays of the call that failed are let go
before it is raised, so that the process can go on.
"""

import bisect
import contextlib
import dataclasses
import re
import traceback
from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeVar

import jax

from specjax.calls import Call
from specjax.config import bounded_chunk, prefill_bucket, token_bucket
from specjax.core.loop import host_state
from specjax.core.programs import fill_caches
from specjax.estimate import transients
from specjax.types import tree_bytes

_SAID = re.compile(r"RESOURCE_EXHAUSTED|out of memory", re.IGNORECASE)
_Y, _R = TypeVar("_Y"), TypeVar("_R")


class OutOfMemoryError(MemoryError):
    """Device memory ran out. The message says what needed how much and what would fit; ``needs`` has the bytes."""

    def __init__(self, message: str, needs: "Needs | None" = None):
        super().__init__(message)
        self.needs = needs


@dataclasses.dataclass(frozen=True)
class Needs:
    """Bytes of a call: weights, state (caches above all), and what its largest program takes beside them."""

    weights: int
    state: int
    transient: int

    @property
    def total(self) -> int:
        return self.weights + self.state + self.transient


def guarded(jobs: Generator[_Y, None, _R], call: Call) -> Generator[_Y, None, _R]:
    """``jobs`` with :class:`OutOfMemoryError` in place of what XLA raises when memory runs out."""
    try:
        return (yield from jobs)
    except jax.errors.JaxRuntimeError as error:
        if (said := _exhausted(error)) is None:
            raise
    raise OutOfMemoryError(*_told(call, said))


def run(step: Callable[[], _R], call: Call) -> _R:
    """``step()``, likewise."""
    try:
        return step()
    except jax.errors.JaxRuntimeError as error:
        if (said := _exhausted(error)) is None:
            raise
    raise OutOfMemoryError(*_told(call, said))


@contextlib.contextmanager
def loading(what: str, size: Callable[[], int]) -> Iterator[None]:
    """Around placing weights on the device; ``size`` counts their bytes."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if (said := _exhausted(error)) is None:
            raise
        raise OutOfMemoryError(
            f"out of device memory while loading {what}: its weights take {_size(size())}, {_there(capacity(()))}. "
            "Load it with dtype='bfloat16' if it was asked for in float32, let go of other models, or take a smaller "
            f"one ({said})"
        ) from None


def _exhausted(error: BaseException) -> str | None:
    """The allocator's own words, or None for another error. Lets go of the arrays that the failed calls held."""
    text = str(error)
    if not _SAID.search(text):
        return None
    traceback.clear_frames(error.__traceback__)
    return next(line for line in text.splitlines() if _SAID.search(line))[:200]


def capacity(weights: Any) -> int | None:
    """Bytes of the devices that hold the weights; None where the platform does not say (a CPU)."""
    devices = set().union(*(x.devices() for x in jax.tree.leaves(weights) if hasattr(x, "devices")))
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices or jax.devices()[:1]]
    return None if None in limits else sum(limits)


def needs(
    call: Call, rows: int | None = None, tokens: int | None = None, transient: int | None = None
) -> Needs:
    """Bytes of a call, or of the same call with other rows and another token buffer. Traces its programs, unless the
    bytes of ``transient`` arrays at the call's own rows are given: they grow with the rows at most."""
    given = call.program
    program = dataclasses.replace(given, rows=rows or given.rows, tokens=tokens or given.tokens)
    weights = call.params.target, call.params.drafter
    host = host_state(program, [None] * program.rows)
    state = jax.eval_shape(lambda: fill_caches(program, host))
    if transient is None:
        longest = max(len(job.prompt) for job in call.jobs)
        width = prefill_bucket(longest, bounded_chunk(program, call.drive.prefill_chunk))
        transient = transients(program, weights, state, width)
    else:
        transient = -(-transient * program.rows // given.rows)
    return Needs(tree_bytes(weights), tree_bytes(state), transient)


def _told(call: Call, said: str) -> tuple[str, Needs]:
    program, there = call.program, capacity((call.params.target, call.params.drafter))
    found = needs(call)
    return (
        f"out of device memory: rows={program.rows} of max_len={program.tokens} need about {_size(found.total)} "
        f"(weights {_size(found.weights)}, caches and the rest of the state {_size(found.state)}, temporaries "
        f"{_size(found.transient)}), {_there(there)}. {_advice(call, found, there)} ({said})"
    ), found


def _advice(call: Call, found: Needs, there: int | None) -> str:
    """What to change: fewer rows, else a shorter buffer, as far as the requests allow."""
    rows, tokens = call.program.rows, call.program.tokens
    shorter = _buffers(max(job.limit for job in call.jobs), tokens)
    fewer = [rows >> i for i in range(1, rows.bit_length())]
    if there is None:
        half = next((t for t in shorter if t <= tokens // 2), None)
        ways = [f"rows={r}" for r in fewer[:1]] + ([f"max_len={half}"] if half else [])
        return f"Try {' or '.join(ways) or 'a shorter prompt or fewer new tokens'}"
    ways = [f"rows={r}" for r in fewer if needs(call, r, tokens, found.transient).total <= there][:1]
    if longest := _longest(call, rows, shorter, there):
        ways.append(f"max_len={longest}")
    if not ways and rows > 1 and (longest := _longest(call, 1, shorter, there)):
        ways = [f"rows=1 with max_len={longest}"]
    if found.total <= there:
        less = f", or try {' or '.join(ways)}" if ways else ""
        return f"That would fit alone: something else holds memory, or it is in pieces. Let go of other arrays{less}"
    if ways:
        return f"What would fit: {', or '.join(ways)}"
    if found.weights >= there:
        return "The weights alone do not fit: take a narrower dtype or a smaller model"
    least = f", nor one of max_len={shorter[-1]}" if shorter else ""
    return (
        f"Not even one row of this length fits{least}: ask for fewer new tokens, shorten the prompt or leave the "
        "drafter out"
    )


def _longest(call: Call, rows: int, buffers: list[int], there: int) -> int | None:
    """The longest of token buffers (longest first) with which ``rows`` fit. A few programs are traced: arrays beside
    the state shrink with the buffer by no simple rule."""
    at = bisect.bisect_left(buffers, True, key=lambda t: needs(call, rows, t).total <= there)
    return buffers[at] if at < len(buffers) else None


def _buffers(least: int, tokens: int) -> list[int]:
    """Shorter token buffers that every request fits in, the longest first, in steps of a sixteenth and then halves;
    sizes that programs have."""
    tries = [tokens * i // 16 for i in range(15, 0, -1)] + [
        tokens >> i for i in range(5, tokens.bit_length())
    ]
    sizes = {token_bucket(max(least, n)) for n in tries}
    return sorted((t for t in sizes if t < tokens), reverse=True)


def _there(size: int | None) -> str:
    return "and the device does not say how much it has" if size is None else f"the device has {_size(size)}"


def _size(n: int) -> str:
    return f"{n / 2**30:.1f} GiB" if n >= 2**29 else f"{n / 2**20:.1f} MiB"
