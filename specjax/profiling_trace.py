"""A trace of one chunk of rounds, for Perfetto and TensorBoard, and its device time by named scope.

The program that is traced is the one that decodes; on a GPU it is compiled once more, without command buffers, whose
kernels a trace cannot tell apart (:mod:`specjax.profiling_kernels`): kernels take as long, between them is more time.
Operations are told apart by the scopes that the parts of a round have (:mod:`specjax.core.round`), which the compiler
keeps as the operations' metadata; a fusion counts for the part that its result belongs to.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from specjax import profiling_kernels
from specjax.profiling_kernels import Operations
from specjax.profiling_parts import PARTS

if TYPE_CHECKING:
    from specjax.profiling import _Whole

#: Device time outside of any scope: records, loop counters, copies.
OTHER = "other"


def record(whole: "_Whole", folder: Path) -> dict[str, float]:
    """Trace a chunk into ``folder``; seconds of a round by scope, empty where the trace names no operations
    or the program was compiled without their names.

    Raises OSError when the folder cannot be written. Times of operations that run at the same time are added.
    """
    engine, state = whole.engine, whole.state()
    rounds = min(whole.rounds, engine.program.rounds)
    program = engine.compile_traced(state)
    run = lambda: program(engine.weights, state, np.int32(rounds))  # noqa: E731
    found = profiling_kernels.traced(run, folder, perfetto=True)
    total = profiling_kernels.by_scope(found, Operations(program.as_text() or ""), scope, OTHER)
    if not any(name in total for name in PARTS):
        return {}
    return {name: total[name] / rounds for name in (*PARTS, OTHER) if name in total}


def files(folder: str | Path) -> list[Path]:
    """Traces in a folder that https://ui.perfetto.dev opens, oldest first."""
    return sorted(Path(folder).glob("plugins/profile/*/perfetto_trace.json.gz"))


def scope(path: str) -> str:
    """The outermost part of a round in an operation's path."""
    return next((part for part in path.split("/") if part in PARTS), OTHER)
