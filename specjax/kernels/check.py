"""Kernels against float64 on the device at hand: cases, what they must give, and the switch for one that is wrong.

Inputs are random and ragged (rows that see nothing, something and everything), and what nobody may see holds
not-a-number. ``python -m specjax.selftest`` runs all of it and tells; :func:`self_check` runs it quietly and switches a
wrong kernel off.
"""

import dataclasses
import importlib
import time
import warnings

import jax

from specjax.core import platform
from specjax.kernels import check_cases, dispatch
from specjax.kernels.building import told
from specjax.kernels.check_cases import Case

#: The largest relative error (Euclidean norm) that bfloat16 explains.
MOST = 1e-2
_CALLS, _TRIES = 16, 5  # in one program, and programs timed


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
        plain = dataclasses.replace(base, xla_error=_error(case, arrays, "xla"))
        error = _error(case, arrays, want)
        wrong = not error < MOST  # NaN is no error that is small enough
        problem = f"relative error {error:.1e} where {MOST:.0e} is allowed" if wrong else ""
        done = dataclasses.replace(plain, error=error, problem=problem)
        if timed:
            done = dataclasses.replace(
                done, kernel_us=_microseconds(case, arrays, want), xla_us=_microseconds(case, arrays, "xla")
            )
        return done
    except Exception as failure:  # of any compiler or device, for any reason: told, and the next case goes on
        return dataclasses.replace(base, error=float("inf"), problem=told(failure))


def _error(case: Case, arrays: tuple, want: str) -> float:
    given = case.clean(arrays) if want == "xla" else arrays
    # on a CPU compiling takes far longer than running
    options = {"xla_backend_optimization_level": "0"} if platform.backend() == "cpu" else None
    got = jax.device_get(jax.jit(case.apply(want), compiler_options=options)(*given))
    return float(case.judge(arrays, got))


def _microseconds(case: Case, arrays: tuple, want: str) -> float:
    """Of one call among several, each of which reads what the one before it wrote; the fastest of a few tries."""

    @jax.jit
    def many(*arrays):
        for _ in range(_CALLS):
            arrays = case.chain(arrays, case.apply(want)(*arrays))
        return arrays  # all of them, so that nothing of the last call is left out

    jax.block_until_ready(many(*arrays))
    times = []
    for _ in range(_TRIES):
        began = time.perf_counter()
        jax.block_until_ready(many(*arrays))
        times.append(time.perf_counter() - began)
    return min(times) / _CALLS * 1e6


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
