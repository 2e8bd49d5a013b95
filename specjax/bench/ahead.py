"""Everything that several N of a drafter need, compiled side by side: on a machine with many cores that takes about as
long as the slowest program, where one row after the other would wait for each."""

import functools
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax

from specjax import calls
from specjax.bench import alone
from specjax.bench.setting import Batches
from specjax.calls import Call
from specjax.core.loop import host_state
from specjax.core.programs import Engine, fill_caches
from specjax.types import Params

Job = Callable[[], object]


def threads() -> int:
    """Programs to compile at once: XLA uses several cores for each."""
    return min(8, len(os.sched_getaffinity(0)) // 2 if hasattr(os, "sched_getaffinity") else 1)


def compile_ahead(
    params: Params, made: Batches, ks: Sequence[int], rule: str | None, parts: bool, at_once: int
) -> dict[int, float]:
    """Compile what rows of ``ks`` drafts run; seconds per k, verification alone aside (all drafters share it).

    Nothing is decoded. What is compiled already costs nothing.
    """
    planned = {k: calls.plan(params, made.ids[0], **made.options(0, k=k, rule=rule)) for k in ks}
    work: list[tuple[int | None, Job]] = [(k, job) for k in ks for job in _jobs(planned[k], made, parts)]
    if parts:
        widths = {w: call for call in planned.values() for w in (*call.program.widths, call.program.k)}
        work += [(None, functools.partial(_verifying, call, w)) for w, call in widths.items()]
    seconds = dict.fromkeys(ks, 0.0)
    with ThreadPoolExecutor(at_once, "specjax-compile") as pool:
        for k, spent in pool.map(lambda one: (one[0], _seconds(one[1])), work):
            if k is not None:
                seconds[k] += spent
    return seconds


def _seconds(job: Job) -> float:
    began = time.perf_counter()
    job()
    return time.perf_counter() - began


def _jobs(call: Call, made: Batches, parts: bool) -> list[Job]:
    """Functions that compile one program each."""
    program, weights = call.program, (call.params.target, call.params.drafter)
    host = host_state(program, alone.padded(program, call.jobs))
    state = jax.eval_shape(lambda: fill_caches(program, host))
    engine = Engine(program, weights)
    jobs: list[Job] = [functools.partial(engine.compile_rounds, state, "device")]
    jobs += [functools.partial(engine.compile_prefill, state, width) for width in made.widths]
    if parts:
        return [*jobs, lambda: alone.drafting(call.params, program, call.jobs)]
    return [*jobs, lambda: engine.init(host)]


def _verifying(call: Call, width: int) -> None:
    alone.verifying(call.params, call.program, call.jobs, width)
