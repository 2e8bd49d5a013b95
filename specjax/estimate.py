"""Explain a call without running it: what selects the compiled program, buckets, bytes."""

import dataclasses
from typing import Any

import jax
import numpy as np

from specjax import calls
from specjax.config import Program, prefill_bucket
from specjax.core.loop import host_state
from specjax.core.programs import fill_caches
from specjax.types import Params, tree_bytes


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a call would do. Bytes are of arrays that live for the whole call, plus the largest logits."""

    program: Program
    prompt_tokens: list[int]
    prefill_width: int
    target_bytes: int
    drafter_bytes: int
    cache_bytes: int
    drafter_state_bytes: int
    logit_bytes: int

    @property
    def total_bytes(self) -> int:
        return (
            self.target_bytes
            + self.drafter_bytes
            + self.cache_bytes
            + self.drafter_state_bytes
            + self.logit_bytes
        )

    def __str__(self) -> str:
        p = self.program
        mb = lambda n: f"{n / 2**20:.1f} MiB"  # noqa: E731
        drafter = p.pair.drafter or "none (plain decoding)"
        widths = ", ".join(str(w + 1) for w in (*p.widths, p.k))
        return "\n".join(
            [
                f"target {p.pair.family}, drafter {drafter}, dtype {p.dtype}",
                f"rows {p.rows}, token buffer {p.tokens}, cache slots {p.slots}, k {p.k}",
                f"verified widths: {widths}; prefill width {self.prefill_width}; {p.rounds} rounds per chunk at most",
                f"rule {p.rule or 'auto'}, sampling options compiled in: {', '.join(p.flags) or 'none (greedy)'}",
                f"weights: target {mb(self.target_bytes)}, drafter {mb(self.drafter_bytes)}",
                f"caches: target {mb(self.cache_bytes)}, drafter {mb(self.drafter_state_bytes)}; "
                f"logits of a round {mb(self.logit_bytes)}; total {mb(self.total_bytes)}",
                "recompiles on: another row count, token bucket, k, prefill width, rule, logprobs, or a sampling "
                "option switched on or off; never on prompt length within a bucket, seeds, stop ids or values",
            ]
        )


def explain(params: Params, prompt: Any, **options: Any) -> Explanation:
    """See :func:`specjax.explain`."""
    call = calls.plan(params, prompt, **options)
    program, pair = call.program, call.program.pair
    rows: list[Any] = list(call.jobs[: program.rows])
    state = jax.eval_shape(lambda: fill_caches(program, host_state(program, rows)))
    lengths = [len(job.prompt) for job in call.jobs]
    vocab = pair.target_cfg.vocab_size
    return Explanation(
        program=program,
        prompt_tokens=lengths,
        prefill_width=prefill_bucket(int(np.max(lengths)), call.drive.prefill_chunk),
        target_bytes=tree_bytes(params.target),
        drafter_bytes=tree_bytes(params.drafter),
        cache_bytes=tree_bytes(state.target),
        drafter_state_bytes=tree_bytes(state.drafter),
        logit_bytes=4 * program.rows * program.q_max * vocab,
    )
