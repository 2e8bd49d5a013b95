"""Which implementation an operation runs, and why: the one table of kernels.

A kernel is a module with

* ``ABOUT``: what it takes, in words;
* ``case(*arrays_and_settings)``: what decides about it, as a hashable value;
* ``refuse(case)``: why it cannot serve a case, or None;
* ``build(case, platform)``: compile it, raising whatever stands in the way;
* ``bind(case, reference)``: a function with the arguments and results of ``reference``, which needs no kernel;
* ``beyond(case)``, where there is such: whether the case has more rows than the kernel is made for, whatever is asked;
* ``interpreted(case)``, where it can be: such a function that runs anywhere, in Pallas' interpreter.

Whatever no kernel serves runs as the reference, compiled by XLA, and is told once (logger ``specjax.kernels``; a
warning where a kernel cannot be built). What is asked for is the option ``kernels`` of a call (part of what selects its
compiled programs), or else ``SPECJAX_KERNELS``: ``auto`` (the default), ``xla`` (or ``off``: always the reference),
``pallas`` (an error where the kernel cannot serve) or ``interpret`` (kernels in Pallas' interpreter, in any type: slow,
to see on a CPU what they do).
"""

import contextlib
import contextvars
import dataclasses
import functools
import importlib
import logging
import os
import warnings
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax.numpy as jnp

from specjax.core import platform
from specjax.kernels.building import told

#: Modules by operation, imported when a GPU asks for them; None where there is no kernel yet.
KERNELS: dict[str, str | None] = {
    "experts": "specjax.kernels.experts",
    "grouped_experts": "specjax.kernels.grouped_experts",
    "packed_attention": "specjax.kernels.packed_attention",
    "block_attention": "specjax.kernels.block_attention",
    "kv_injection": "specjax.kernels.kv_injection",
    "skinny": "specjax.kernels.skinny",
    "head": "specjax.kernels.head",
    "markov": "specjax.kernels.markov",
}

WANTED = ("auto", "pallas", "xla", "interpret")
_OFF = ("off", "0", "false", "none")

#: Cases whose kernel could not be built in this process, with the reason.
_failed: dict[tuple[str, Hashable], str] = {}
#: The same for cases that kernels do not take.
_refused: dict[tuple[str, Hashable], str] = {}
#: Operations whose kernel is switched off in this process, with the reason.
_disabled: dict[str, str] = {}
#: What the program that is being traced asks for.
_asked: contextvars.ContextVar[str | None] = contextvars.ContextVar("specjax_kernels", default=None)
_log = logging.getLogger("specjax.kernels")


@dataclasses.dataclass(frozen=True)
class Choice:
    """What one operation runs as, ``"kernel"``, ``"interpreter"`` or ``"reference"``, and the reason."""

    op: str
    implementation: str
    reason: str


def implementation(op: str, facts: tuple, reference: Callable, want: str | None = None) -> Callable:
    """The kernel bound to ``facts`` (what its ``case`` takes), or ``reference``.

    ``want``: one of ``WANTED``; None: what ``SPECJAX_KERNELS`` says. ValueError if ``"pallas"`` is wanted and the
    kernel cannot serve.
    """
    want = wanted(want)
    if want == "xla" or KERNELS[op] is None:
        return reference
    if want == "interpret":
        return _interpreted(op, facts, reference)
    choice = choose(op, *facts)
    if choice.implementation == "kernel":
        kernel = _module(op)
        return kernel.bind(kernel.case(*facts), reference)
    if want == "pallas" and not _beyond(op, facts):
        raise ValueError(
            f"{op}: the Pallas kernel is asked for and cannot serve: {choice.reason}. Ask for 'auto' or 'xla', "
            "or leave SPECJAX_KERNELS unset"
        )
    return reference


def _beyond(op: str, facts: tuple) -> bool:
    if platform.backend() not in ("cuda", "rocm"):
        return False
    kernel = _module(op)
    return hasattr(kernel, "beyond") and kernel.beyond(kernel.case(*facts))


def _interpreted(op: str, facts: tuple, reference: Callable) -> Callable:
    """The kernel in the interpreter, which computes in float32 as well; ``reference`` where it does not serve."""
    kernel = _module(op)
    if not hasattr(kernel, "interpreted"):
        return reference
    case = kernel.case(*facts)
    as_if = dataclasses.replace(case, dtype=jnp.dtype(jnp.bfloat16)) if case.dtype == jnp.float32 else case
    return reference if kernel.refuse(as_if) else kernel.interpreted(case)


@contextlib.contextmanager
def asking(want: str) -> Iterator[None]:
    """What is traced inside asks for ``want``, whatever ``SPECJAX_KERNELS`` says."""
    before = _asked.set(want)
    try:
        yield
    finally:
        _asked.reset(before)


def choose(op: str, *facts) -> Choice:
    """What ``op`` runs as in this case. A kernel is compiled once to see whether it can be; a warning says if not."""
    general = explain(op)
    if general.implementation == "reference":
        return general
    kernel = _module(op)
    case = kernel.case(*facts)
    reason = kernel.refuse(case)
    if reason is None:
        reason = _failure(op, case, platform.backend())
    elif (op, case) not in _refused:
        _refused[op, case] = reason
        _log.info("%s runs as the reference: %s (%s)", op, reason, case)
    return general if reason is None else Choice(op, "reference", reason)


def wanted(want: str | None = None) -> str:
    """What is asked for: ``want``, or else what the program that is being traced says, or else ``SPECJAX_KERNELS``, or
    else ``"auto"``. ValueError if it is none of ``WANTED``."""
    want = _asked.get() if want is None else want
    said = (os.environ.get("SPECJAX_KERNELS") or "auto").lower() if want is None else want
    if want is None and said in _OFF:
        return "xla"
    if said not in WANTED:
        name = "SPECJAX_KERNELS" if want is None else "kernels"
        raise ValueError(f"{name} must be one of {', '.join(WANTED)}, got {said!r}")
    return said


def explain(op: str) -> Choice:
    """What ``op`` runs as on this machine, as far as that can be said without a case."""
    backend = platform.backend()
    if KERNELS[op] is None:
        return Choice(op, "reference", "no kernel ships in this version; XLA compiles the reference")
    if wanted() == "interpret":
        return Choice(
            op, "interpreter", "Pallas' interpreter is asked for, where the operation has a kernel of Pallas"
        )
    if backend not in ("cuda", "rocm"):
        return Choice(op, "reference", f"the kernel needs a GPU and JAX runs on {backend}")
    if wanted() == "xla":
        return Choice(op, "reference", "switched off by SPECJAX_KERNELS")
    if op in _disabled:
        return Choice(op, "reference", _disabled[op])
    try:
        about = _module(op).ABOUT
    except ImportError as error:
        return Choice(op, "reference", f"this jax has no Pallas-Triton: {error}")
    of = lambda cases: [why for (name, _), why in cases.items() if name == op]  # noqa: E731
    if failed := of(_failed):
        about += f"; {len(failed)} case(s) could not be built and run as the reference, the last {failed[-1]}"
    if refused := of(_refused):
        about += f"; {len(refused)} case(s) ran as the reference, the last for {refused[-1]}"
    return Choice(op, "kernel", about)


def disable(op: str, reason: str) -> None:
    """Run ``op`` as the reference from now on; programs that are compiled already keep the kernel."""
    _disabled[op] = reason


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
        why = _failed[op, case] = f"not built for {backend}: {told(error)}"
        warnings.warn(f"kernel {op}: {why}; the reference runs instead, for {case}", stacklevel=2)
        return why
    return None
