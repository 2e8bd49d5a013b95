"""Parts of a round timed apart: turns of one part in a loop inside one program, as rounds run.

Two things are measured so. A profile (:mod:`specjax.profiling_parts`) takes a round of a decode apart, at its own
states, into draft, verify, accept, commit and inject. A comparison (:mod:`specjax.bench.alone`) wants what a number of
drafts costs whatever drafter gave them: all that follows drafting as one part, over caches that nothing was written to.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from specjax.config import Program
from specjax.core import round as rnd
from specjax.kernels import dispatch

#: Seconds that the turns of one measurement should take together, and how many there are at most.
ENOUGH, MOST = 0.05, 4096


def turning(
    program: Program, step: Callable, weights: rnd.Weights, turns: Any, carry: Any, *given: Any
) -> Any:
    """``turns`` turns of ``step(program, weights, turn, carry, *given)``, which gives the next carry, with the kernels
    that the program asks for. A step must leave no turn to be left out: something of what it makes goes into the next
    one's input."""
    with dispatch.asking(program.kernels):
        weights = rnd.ready(program.pair, weights)
        one = lambda i, carry: step(program, weights, i, carry, *given)  # noqa: E731
        return jax.lax.fori_loop(0, turns, one, carry)


class Timer:
    """Seconds of one turn. ``run(turns)`` gives arrays to wait for; it is called to find how many turns take long
    enough. What a call without a turn takes is not counted."""

    def __init__(self, run: Callable[[int], Any]):
        self._run = run
        least = lambda turns: min(self._seconds(turns) for _ in range(3))  # noqa: E731
        self._seconds(0)  # compiles
        self.empty, self.turns = least(0), 1
        while (took := least(self.turns)) < ENOUGH and self.turns < MOST:
            self.turns = min(MOST, self.turns * max(2, min(16, round(ENOUGH / max(took, 1e-6)))))

    def _seconds(self, turns: int) -> float:
        began = time.perf_counter()
        jax.block_until_ready(self._run(turns))
        return time.perf_counter() - began

    def __call__(self) -> float:
        """Measure."""
        return max(self._seconds(self.turns) - self.empty, 0.0) / self.turns


def in_turn(
    timers: Mapping[Any, Timer], repeats: int, of: Callable[[list[float]], float] = statistics.median
) -> dict[Any, float]:
    """``of`` so many measurements of each, in turn: whatever else the machine does falls on all of them."""
    found: dict[Any, list[float]] = {name: [] for name in timers}
    for _ in range(repeats):
        for name, timer in timers.items():
            found[name].append(timer())
    return {name: of(values) for name, values in found.items()}
