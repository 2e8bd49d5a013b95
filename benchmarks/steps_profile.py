"""Which kernels a round's time goes to, and the bytes that each has to move."""

import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from steps_run import Contender

from specjax import profiling_kernels
from specjax.profiling_trace import scope


def profile(contender: Contender, rounds: int = 8, most: int = 25) -> list[dict[str, Any]]:
    """Kernels of a round, the longest first (:func:`specjax.profiling_kernels.rows`)."""
    engine = contender.engine
    program = engine.compile_traced(contender.shapes)
    state, _ = program(engine.weights, contender.state(), np.int32(2))
    jax.block_until_ready(state)
    with tempfile.TemporaryDirectory() as folder:
        found = profiling_kernels.traced(
            lambda: program(engine.weights, state, np.int32(rounds)), Path(folder)
        )
    operations = profiling_kernels.Operations(program.as_text() or "")
    return profiling_kernels.rows(found, operations, scope, rounds, most)
