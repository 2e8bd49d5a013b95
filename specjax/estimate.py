"""Explain a call without running it: what selects the compiled program, buckets, bytes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import calls
from specjax.config import Program, bounded_chunk, prefill_bucket
from specjax.core.accept import LOGIT_BYTES
from specjax.core.loop import host_state
from specjax.core.programs import Engine, fill_caches
from specjax.core.round import draft
from specjax.types import Params, tree_bytes

#: Float32 logits alive at once in acceptance, greedy and sampled (logits, noise, probabilities, sort keys).
GREEDY_LOGITS, SAMPLED_LOGITS = 1, 6


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a call would do.

    Bytes of weights, caches and the rest of the state are exact. ``transient_bytes`` is what the largest
    program needs beside them: an estimate, or the compiler's own figure when the call was compiled.
    ``logit_bytes`` are the float32 logits of a round (never more than a limit at once).
    """

    program: Program
    prompt_tokens: list[int]
    prefill_width: int
    target_bytes: int
    drafter_bytes: int
    cache_bytes: int
    drafter_state_bytes: int
    other_state_bytes: int
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
        return "\n".join(
            [
                f"target {p.pair.family}, drafter {drafter}, dtype {p.dtype}",
                f"rows {p.rows}, token buffer {p.tokens}, cache slots {p.slots}, k {p.k}",
                f"verified widths: {widths}; prefill width {self.prefill_width}; {p.rounds} rounds per chunk at most",
                f"rule {p.rule or 'auto'}, sampling options compiled in: {', '.join(p.flags) or 'none (greedy)'}",
                f"weights: target {mb(self.target_bytes)}, drafter {mb(self.drafter_bytes)}",
                f"caches: target {mb(self.cache_bytes)}, drafter {mb(self.drafter_state_bytes)}; "
                f"rest of the state {mb(self.other_state_bytes)}",
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
        logit_bytes=_logits(program, program.q_max),
        transient_bytes=(_compiled if compile else transients)(program, weights, state, width),
        compiled=compile,
    )


def transients(program: Program, weights: Any, state: Any, width: int) -> int:
    """Estimated bytes the largest program needs beside weights and state: prefill of ``width`` positions per
    row, or a round. ``weights`` and ``state`` may be shapes only."""
    prefill = max(_layer(program, width), _logits(program, 1))
    sampled = "temperature" in program.flags
    logits = _logits(program, program.q_max) * (SAMPLED_LOGITS if sampled else GREEDY_LOGITS)
    drafts = jax.eval_shape(lambda w, s: draft(program.pair, w, s, program.k)[0], weights, state)
    return max(prefill, _layer(program, program.q_max), logits + tree_bytes(drafts))


def _layer(program: Program, width: int) -> int:
    """One layer's attention scores (before and after the softmax) and its two feed-forward activations."""
    cfg, positions = program.pair.target_cfg, program.rows * width
    scores = 4 * positions * cfg.heads * program.slots
    return 2 * scores + 2 * positions * cfg.mlp_size * jnp.dtype(program.dtype).itemsize


def _logits(program: Program, width: int) -> int:
    return min(4 * program.rows * width * program.pair.target_cfg.vocab_size, LOGIT_BYTES)


def _compiled(program: Program, weights: Any, state: Any, width: int) -> int:
    """What the compiler allocates for the larger of prefill and chunk beside their arguments."""
    engine = Engine(program, weights)
    compiled = engine.compile_prefill(state, width), engine.compile_chunk(state)
    found = [program.memory_analysis() for program in compiled]
    return max(m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes for m in found)
