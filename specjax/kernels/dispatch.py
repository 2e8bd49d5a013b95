"""Which implementation an operation runs, and why: the one table of kernels.

A kernel is a module with

* ``ABOUT``: what it takes, in words;
* ``case(*arrays_and_settings)``: what decides about it, as a hashable value;
* ``refuse(case)``: why it cannot serve a case, or None;
* ``build(case, platform)``: compile it, raising whatever stands in the way;
* ``bind(case, reference)``: a function with the arguments and results of ``reference``, which needs no kernel.

Whatever no kernel serves runs as the reference, compiled by XLA; ``SPECJAX_KERNELS=off`` makes that the rule.
"""

import dataclasses
import functools
import importlib
import os
import warnings
from collections.abc import Callable, Hashable
from typing import Any

from specjax.core import platform

#: Modules by operation, imported when a GPU asks for them; None where there is no kernel yet.
KERNELS: dict[str, str | None] = {
    "experts": "specjax.kernels.experts",
    "packed_attention": "specjax.kernels.packed_attention",
    "block_attention": None,
    "kv_inject": None,
}

#: Cases whose kernel could not be built in this process, with the reason.
_failed: dict[tuple[str, Hashable], str] = {}


@dataclasses.dataclass(frozen=True)
class Choice:
    """What one operation runs as, ``"kernel"`` or ``"reference"``, and the reason."""

    op: str
    implementation: str
    reason: str


def implementation(op: str, facts: tuple, reference: Callable) -> Callable:
    """The kernel bound to ``facts`` (what its ``case`` takes), or ``reference``."""
    if choose(op, *facts).implementation == "reference":
        return reference
    kernel = _module(op)
    return kernel.bind(kernel.case(*facts), reference)


def choose(op: str, *facts) -> Choice:
    """What ``op`` runs as in this case. A kernel is compiled once to see whether it can be; a warning says if not."""
    general = explain(op)
    if general.implementation == "reference":
        return general
    kernel = _module(op)
    case = kernel.case(*facts)
    reason = kernel.refuse(case) or _failure(op, case, platform.backend())
    return general if reason is None else Choice(op, "reference", reason)


def explain(op: str) -> Choice:
    """What ``op`` runs as on this machine, as far as that can be said without a case."""
    backend = platform.backend()
    if KERNELS[op] is None:
        return Choice(op, "reference", "no kernel ships in this version; XLA compiles the reference")
    if backend not in ("cuda", "rocm"):
        return Choice(op, "reference", f"the kernel needs a GPU and JAX runs on {backend}")
    if os.environ.get("SPECJAX_KERNELS", "").lower() in ("off", "0", "false", "none"):
        return Choice(op, "reference", "switched off by SPECJAX_KERNELS")
    try:
        about = _module(op).ABOUT
    except ImportError as error:
        return Choice(op, "reference", f"this jax has no Pallas-Triton: {error}")
    failed = [why for (name, _), why in _failed.items() if name == op]
    if failed:
        about += f"; {len(failed)} case(s) could not be built and run as the reference, the last {failed[-1]}"
    return Choice(op, "kernel", about)


def report() -> tuple[Choice, ...]:
    """``explain`` of every operation that has a kernel or will have one."""
    return tuple(explain(op) for op in KERNELS)


def _module(op: str) -> Any:
    return importlib.import_module(str(KERNELS[op]))


@functools.lru_cache(maxsize=1024)
def _failure(op: str, case: Hashable, backend: str) -> str | None:
    try:
        _module(op).build(case, backend)
    except Exception as error:  # of any compiler, for any reason: the reference always works
        first = (str(error).strip() or "no message").splitlines()[0]
        why = _failed[op, case] = f"not built for {backend}: {type(error).__name__}: {first[:200]}"
        warnings.warn(f"kernel {op}: {why}; the reference runs instead, for {case}", stacklevel=2)
        return why
    return None
