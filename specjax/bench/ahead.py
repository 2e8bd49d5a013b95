"""Everything that several rows of a drafter need, compiled side by side: on a machine with many cores that takes about
as long as the slowest program, where one row after the other would wait for each."""

import os
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax

from specjax import calls
from specjax.bench import alone
from specjax.bench.setting import Batches
from specjax.calls import Call
from specjax.core.loop import host_state, padded
from specjax.core.programs import Engine, fill_caches
from specjax.identity import without_drafter
from specjax.types import Params

Job = Callable[[], object]


def threads() -> int:
    """Programs to compile at once: XLA uses several cores for each."""
    return min(8, len(os.sched_getaffinity(0)) // 2 if hasattr(os, "sched_getaffinity") else 1)


def compile_ahead(
    params: Params, asked: Mapping[Hashable, tuple[Batches, int]], rule: str | None, parts: bool, at_once: int
) -> dict[Any, float]:
    """Compile what rows run, each given by its batches and k; seconds per row. Plain decoding and verification alone,
    which all drafters share, are compiled as well and told nowhere.

    Nothing is decoded. What is compiled already costs nothing.
    """
    target = without_drafter(params)
    work: dict[Any, tuple[Hashable, Job]] = {}
    for key, (made, k) in asked.items():
        call = calls.plan(params, made.ids[0], **made.options(0, k=k, rule=rule))
        plain = calls.plan(target, made.ids[0], **made.options(0))
        for name, job in programs_of(call, made.widths, parts).items():
            work.setdefault((call.program, name), (key, job))
        for name, job in programs_of(plain, made.widths).items():
            work.setdefault((plain.program, name), (None, job))
        for width in (*call.program.widths, k) if parts else ():
            part = alone.verifying(params, call.program, width)
            work.setdefault((part.engine.program, part.name), (None, partial(part.compiled, call.jobs)))
    seconds: dict[Any, float] = dict.fromkeys(asked, 0.0)
    with ThreadPoolExecutor(at_once, "specjax-compile") as pool:
        for key, spent in pool.map(lambda one: (one[0], _seconds(one[1])), work.values()):
            if key is not None:
                seconds[key] += spent
    return seconds


def _seconds(job: Job) -> float:
    began = time.perf_counter()
    job()
    return time.perf_counter() - began


def programs_of(call: Call, widths: Iterable[int], parts: bool = False) -> dict[str, Job]:
    """Functions that compile a program each: everything that a call runs whose prompts are prefilled in chunks of
    ``widths``, or with ``parts`` the drafter's pass alone instead of what fills the caches."""
    program, weights = call.program, (call.params.target, call.params.drafter)
    engine = Engine(program, weights)
    host = host_state(program, padded(program, call.jobs))
    state = jax.eval_shape(lambda: fill_caches(program, host))
    jobs: dict[str, Job] = {"rounds": partial(engine.compile_rounds, state, "device")}
    jobs |= {f"prefill {w}": partial(engine.compile_prefill, state, w) for w in widths}
    if parts:  # and what fills the caches
        return jobs | {"draft": partial(alone.drafting(call.params, program).compiled, call.jobs)}
    return jobs | {"init": partial(alone.compile_init, engine, host)}
