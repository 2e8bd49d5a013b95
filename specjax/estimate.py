"""Explain a call without running it: what selects the compiled program, buckets, bytes."""

import dataclasses
from typing import Any

import jax
import numpy as np

from specjax import calls
from specjax.config import Program, bounded_chunk, prefill_bucket
from specjax.core.accept import LOGIT_BYTES
from specjax.core.liveness import peak_bytes
from specjax.core.loop import host_state
from specjax.core.programs import Engine, chunk_program, fill_caches, prefill_program
from specjax.core.recurrent import Held, held
from specjax.progress import line
from specjax.types import Params, tree_bytes


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a call would do.

    Bytes of weights, caches and the rest of the state are exact. ``transient_bytes`` is what the largest
    program needs beside them: an estimate from its trace (:mod:`specjax.core.liveness`), or the compiler's own figure
    when the call was compiled. Estimated and compiled totals are within 5 % of each other.
    ``logit_bytes`` are the float32 logits of a round (never more than a limit at once). ``recurrent`` is the part of
    the caches that recurrent states take: the states, the tapes that rejected drafts are taken back with, and what a
    copy of the state per verified position would take instead (which is not there).
    """

    program: Program
    prompt_tokens: list[int]
    prefill_width: int
    target_bytes: int
    drafter_bytes: int
    cache_bytes: int
    drafter_state_bytes: int
    other_state_bytes: int
    recurrent: Held
    logit_bytes: int
    transient_bytes: int
    compiled: bool

    @property
    def total_bytes(self) -> int:
        return (
            self.target_bytes
            + self.drafter_bytes
            + self.cache_bytes
            + self.drafter_state_bytes
            + self.other_state_bytes
            + self.transient_bytes
        )

    def __str__(self) -> str:
        p = self.program
        mb = lambda n: f"{n / 2**20:.1f} MiB"  # noqa: E731
        drafter = p.pair.drafter or "none (plain decoding)"
        widths = ", ".join(str(w + 1) for w in (*p.widths, p.k))
        source = "compiled" if self.compiled else "estimated"
        states, tape, copies = map(mb, self.recurrent)
        tapes = f"recurrent states {states}, tapes to take drafts back {tape} (copies per position: {copies})"
        return "\n".join(
            [
                f"target {p.pair.family}, drafter {drafter}, dtype {p.dtype}",
                f"rows {p.rows}, token buffer {p.tokens}, cache slots {p.slots}, "
                f"k {f'up to {p.k}, as many as pay' if p.auto else p.k}",
                f"verified widths: {widths}; prefill width {self.prefill_width}; {p.rounds} rounds per chunk at most",
                f"rule {p.rule or 'auto'}, sampling options compiled in: {', '.join(p.flags) or 'none (greedy)'}",
                f"weights: target {mb(self.target_bytes)}, drafter {mb(self.drafter_bytes)}",
                f"caches: target {mb(self.cache_bytes)}, drafter {mb(self.drafter_state_bytes)}; "
                f"rest of the state {mb(self.other_state_bytes)}",
                *([tapes] if self.recurrent.state else []),
                f"transients ({source}): {mb(self.transient_bytes)}, with logits of a round {mb(self.logit_bytes)}; "
                f"total {mb(self.total_bytes)}",
                "recompiles on: another row count, token bucket, k, prefill width, rule, logprobs, or a sampling "
                "option switched on or off; never on prompt length within a bucket, seeds, stop ids or values",
            ]
        )


def explain(params: Params, prompt: Any, *, compile: bool = False, **options: Any) -> Explanation:
    """See :func:`specjax.explain`."""
    call = calls.plan(params, prompt, **options)
    program = call.program
    rows: list[Any] = list(call.jobs[: program.rows])
    rows += [None] * (program.rows - len(rows))
    host = host_state(program, rows)
    state = jax.eval_shape(lambda: fill_caches(program, host))
    lengths = [len(job.prompt) for job in call.jobs]
    width = prefill_bucket(int(np.max(lengths)), bounded_chunk(program, call.drive.prefill_chunk))
    weights = (params.target, params.drafter)
    with line(call.verbose) as say:
        say("compiling for explain" if compile else "tracing for explain")
        temporary = (_compiled if compile else transients)(program, weights, state, width)
    caches = tree_bytes(state.target) + tree_bytes(state.drafter)
    return Explanation(
        program=program,
        prompt_tokens=lengths,
        prefill_width=width,
        target_bytes=tree_bytes(params.target),
        drafter_bytes=tree_bytes(params.drafter),
        cache_bytes=tree_bytes(state.target),
        drafter_state_bytes=tree_bytes(state.drafter),
        other_state_bytes=tree_bytes(state) - caches,
        recurrent=held((state.target, state.drafter)),
        logit_bytes=_logits(program, program.q_max),
        transient_bytes=temporary,
        compiled=compile,
    )


def transients(program: Program, weights: Any, state: Any, width: int) -> int:
    """Estimated bytes the largest program needs beside weights and state: prefill of ``width`` positions per
    row, or a loop of rounds. ``weights`` and ``state`` may be shapes only."""
    programs = prefill_program(program, width), chunk_program(program)
    return max(peak_bytes(run, weights, state, last, donated=1) for run, last in programs)


def _logits(program: Program, width: int) -> int:
    return min(4 * program.rows * width * program.pair.target_cfg.vocab_size, LOGIT_BYTES)


def _compiled(program: Program, weights: Any, state: Any, width: int) -> int:
    """What the compiler allocates for the larger of prefill and chunk beside their arguments."""
    engine = Engine(program, weights)
    compiled = engine.compile_prefill(state, width), engine.compile_chunk(state)
    found = [program.memory_analysis() for program in compiled]
    return max(m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes for m in found)
