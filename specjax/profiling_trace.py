"""A trace of one chunk of rounds, for Perfetto and TensorBoard, and its device time by named scope.

The program that is traced is the one that decodes. Operations are told apart by the scopes that the parts of a round
have (:mod:`specjax.core.round`), which the compiler keeps as the operations' metadata.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from specjax.profiling_parts import PARTS

if TYPE_CHECKING:
    from specjax.profiling import _Whole

#: What only holds other operations: its time is theirs.
HOLDERS = ("while", "conditional", "call")
#: Device time outside of any scope: records, loop counters, copies.
OTHER = "other"

_LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*?\)?\s([\w\-]+)\(")
_NAME = re.compile(r'metadata=\{[^}]*op_name="([^"]*)"')


def record(whole: "_Whole", folder: Path) -> dict[str, float]:
    """Trace a chunk into ``folder``; seconds of a round by scope, empty where the trace names no operations
    or the program was compiled without their names.

    Raises OSError when the folder cannot be written. Times of operations that run at the same time are added.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before = set(_planes(folder))
    engine, state = whole.engine, whole.state()
    rounds = min(whole.rounds, engine.program.rounds)
    program = engine.compile_chunk(state)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # else the host's own calls fill the trace
    with jax.profiler.trace(str(folder), create_perfetto_trace=True, profiler_options=options):
        jax.block_until_ready(engine.chunk(state, rounds))
    text = program.as_text() or ""
    found = by_scope(_operations(set(_planes(folder)) - before, _module(text)), scopes_of(text))
    if not any(name in found for name in PARTS):
        return {}
    return {name: seconds / rounds for name, seconds in found.items()}


def files(folder: str | Path) -> list[Path]:
    """Traces in a folder that https://ui.perfetto.dev opens, oldest first."""
    return sorted(Path(folder).glob("plugins/profile/*/perfetto_trace.json.gz"))


def _planes(folder: Path) -> Iterator[Path]:
    return folder.glob("plugins/profile/*/*.xplane.pb")


def _module(text: str) -> str:
    found = re.match(r"HloModule ([\w.\-]+)", text)
    return found.group(1) if found else ""


def scopes_of(text: str) -> dict[str, str]:
    """Scope by name of the operation, from a compiled program's text; holders are left out."""
    found = {}
    for line in text.splitlines():
        if (match := _LINE.match(line)) and match.group(2) not in HOLDERS:
            named = _NAME.search(line)
            path = named.group(1).split("/") if named else []
            found[match.group(1)] = next((part for part in path if part in PARTS), OTHER)
    return found


def _operations(paths: set[Path], module: str) -> Iterator[tuple[str, float]]:
    """Name and seconds of every operation of a module in traces."""
    for path in paths:
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for one in plane.lines:
                for event in one.events:
                    stats: dict[str, Any] = {k: v for k, v in event.stats if k in ("hlo_op", "hlo_module")}
                    if stats.get("hlo_module") == module and "hlo_op" in stats:
                        yield str(stats["hlo_op"]), 1e-9 * event.duration_ns


def by_scope(operations: Iterator[tuple[str, float]], scopes: Mapping[str, str]) -> dict[str, float]:
    """Seconds summed by scope, in the order of a round; operations that the program's text lacks are left out."""
    total: dict[str, float] = {}
    for name, seconds in operations:
        if name in scopes:
            total[scopes[name]] = total.get(scopes[name], 0.0) + seconds
    return {name: total[name] for name in (*PARTS, OTHER) if name in total}
