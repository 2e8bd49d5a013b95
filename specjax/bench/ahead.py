"""Everything that several rows of a drafter need, compiled side by side: on a machine with many cores that takes about
as long as the slowest program, where one row after the other would wait for each."""

import functools
import os
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

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
    params: Params, asked: Mapping[Hashable, tuple[Batches, int]], rule: str | None, parts: bool, at_once: int
) -> dict[Any, float]:
    """Compile what rows run, each given by its batches and k; seconds per row, verification alone aside (all drafters
    share it).

    Nothing is decoded. What is compiled already costs nothing.
    """
    work: list[tuple[Hashable, Job]] = []
    shared: dict[Any, Job] = {}
    for key, (made, k) in asked.items():
        call = calls.plan(params, made.ids[0], **made.options(0, k=k, rule=rule))
        work += [(key, job) for job in _jobs(call, made, parts)]
        for width in (*call.program.widths, k) if parts else ():
            part = alone.verifying(params, call.program, width)
            shared[(part.name, part.engine.program)] = functools.partial(part.compiled, call.jobs)
    work += [(None, job) for job in shared.values()]
    seconds: dict[Any, float] = dict.fromkeys(asked, 0.0)
    with ThreadPoolExecutor(at_once, "specjax-compile") as pool:
        for key, spent in pool.map(lambda one: (one[0], _seconds(one[1])), work):
            if key is not None:
                seconds[key] += spent
    return seconds


def _seconds(job: Job) -> float:
    began = time.perf_counter()
    job()
    return time.perf_counter() - began


def _jobs(call: Call, made: Batches, parts: bool) -> list[Job]:
    """Functions that compile one program each."""
    program, weights = call.program, (call.params.target, call.params.drafter)
    engine = Engine(program, weights)
    host = host_state(program, alone.padded(program, call.jobs))
    state = jax.eval_shape(lambda: fill_caches(program, host))
    jobs: list[Job] = [functools.partial(engine.compile_rounds, state, "device")]
    jobs += [functools.partial(engine.compile_prefill, state, width) for width in made.widths]
    if parts:  # and what fills the caches
        return [*jobs, functools.partial(alone.drafting(call.params, program).compiled, call.jobs)]
    return [*jobs, functools.partial(alone.compile_init, engine, host)]
