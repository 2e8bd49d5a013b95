"""Kernels against float64 on the device at hand: cases, what they must give, and the switch for one that is wrong.

Inputs are random and ragged (rows that see nothing, something and everything), and what nobody may see holds
not-a-number. ``python -m specjax.selftest`` runs all of it and tells; :func:`self_check` runs it quietly and switches a
wrong kernel off.
"""

import dataclasses
import functools
import importlib
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import jax

from specjax.core import platform
from specjax.kernels import check_cases, dispatch
from specjax.kernels.building import told
from specjax.kernels.check_cases import Case

#: The largest relative error (Euclidean norm) that bfloat16 explains.
MOST = 1e-2
_AT_ONCE, _TRIES = 8, 3  # programs started before one is waited for, and times that is done


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One case on this device. ``error``: relative, of the kernel against float64 (infinite where it does not run);
    ``xla_error``: of the reference. Times of one call in microseconds with warm caches, None where not timed;
    ``bytes``: what a call must read at least. ``skipped``: why the kernel did not run although nothing is wrong."""

    op: str
    case: str
    error: float | None = None
    xla_error: float | None = None
    kernel_us: float | None = None
    xla_us: float | None = None
    bytes: int = 0
    problem: str = ""
    skipped: str = ""

    @property
    def passed(self) -> bool:
        return not self.problem

    def __str__(self) -> str:
        if self.skipped:
            return f"skipped: {self.skipped}"
        if self.problem:
            return f"FAILED: {self.problem}"
        text = f"error {self.error:.1e} (XLA {self.xla_error:.1e})"
        if self.kernel_us is None or self.xla_us is None:
            return text
        speed = self.bytes / self.kernel_us * 1e-6
        return f"{text}, {self.kernel_us:.1f} us ({speed:.2f} TB/s), XLA {self.xla_us:.1f} us"


def run(case: Case, want: str, timed: bool = False) -> Outcome:
    """One case: ``want`` is ``"pallas"`` (compiled for this device) or ``"interpret"``. Never raises."""
    base = Outcome(case.op, case.name)
    try:
        arrays = case.arrays()
        base = dataclasses.replace(base, bytes=case.reads(arrays))
        given = {"xla": case.clean(arrays), want: arrays}
        with ThreadPoolExecutor(len(given)) as pool:  # the oracle takes as long as the compiler
            waiting = {way: pool.submit(c) for way, c in _compilers(case, given, case.calls if timed else 1)}
            judge = case.judge(arrays)
            programs = {way: one.result() for way, one in waiting.items()}
        error = lambda way: float(judge(jax.device_get(programs[way](*given[way]))))  # noqa: E731
        base = dataclasses.replace(base, xla_error=error("xla"))
        found = error(want)
        wrong = not found < MOST  # NaN is no error that is small enough
        problem = f"relative error {found:.1e} where {MOST:.0e} is allowed" if wrong else ""
        done = dataclasses.replace(base, error=found, problem=problem)
        if not timed:
            return done
        us = {way: _microseconds(programs[way], given[way]) / case.calls for way in given}
        return dataclasses.replace(done, kernel_us=us[want], xla_us=us["xla"])
    except Exception as failure:  # of any compiler or device, for any reason: told, and the next case goes on
        return dataclasses.replace(base, error=float("inf"), problem=told(failure))


def _compilers(
    case: Case, given: dict[str, tuple], calls: int
) -> Iterator[tuple[str, Callable[[], Callable]]]:
    """By implementation: what compiles some calls one after the other, the result being that of each."""

    def several(one: Callable, *arrays):
        for _ in range(calls - 1):
            arrays = case.chain(arrays, one(*arrays))
        return one(*arrays)

    # on a CPU compiling takes far longer than running
    options = {"xla_backend_optimization_level": "0"} if platform.backend() == "cpu" else None
    for way, arrays in given.items():
        lowered = jax.jit(functools.partial(several, case.apply(way))).lower(*arrays)
        yield way, functools.partial(lowered.compile, compiler_options=options)


def _microseconds(program: Callable, arrays: tuple) -> float:
    """Of one run among several, each of which is started before the one before it is over; the fastest of a few."""
    jax.block_until_ready(program(*arrays))
    times = []
    for _ in range(_TRIES):
        began = time.perf_counter()
        for _ in range(_AT_ONCE):
            last = program(*arrays)
        jax.block_until_ready(last)
        times.append(time.perf_counter() - began)
    return min(times) / _AT_ONCE * 1e6


def way(op: str) -> tuple[str, str]:
    """How the kernel of ``op`` runs on this device, ``"pallas"`` or ``"interpret"``; or "" and why it does not."""
    if platform.backend() in ("cuda", "rocm"):
        choice = dispatch.explain(op)
        return ("pallas", "") if choice.implementation == "kernel" else ("", choice.reason)
    module = importlib.import_module(str(dispatch.KERNELS[op]))
    return ("interpret", "") if hasattr(module, "interpreted") else ("", module.ABOUT)


def self_check() -> dict[str, float]:
    """Relative errors of the kernels that run on this device (none on a CPU); wrong ones are switched off."""
    errors: dict[str, float] = {}
    for case in check_cases.small():
        if way(case.op)[0] != "pallas":
            continue
        found = run(case, "pallas")
        errors[case.op] = max(errors.get(case.op, 0.0), float("inf") if found.error is None else found.error)
        if found.problem:
            dispatch.disable(case.op, f"switched off by its self-check: {found.problem}")
            warnings.warn(
                f"kernel {case.op} is switched off by its self-check: {found.problem}", stacklevel=2
            )
    return errors
