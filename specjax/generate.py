"""Running a planned call: the loop, pieces of text as they come, results."""

from collections.abc import Iterator, Set
from typing import Any

from specjax import checkpoints, metrics
from specjax.calls import Call, plan
from specjax.config import (
    Meta,
)
from specjax.core.loop import STOP_STRING, Job, serve
from specjax.core.platform import enable_compilation_cache
from specjax.core.programs import Engine
from specjax.memory import guarded
from specjax.results import Completion, NonFiniteError, Piece, Result
from specjax.text import StopFilter, StopStrings, StreamDecoder
from specjax.types import Params


def decode(params: Params, prompt: Any, **options: Any) -> Result:
    """See :func:`specjax.decode`."""
    call = plan(params, prompt, **options)
    enable_compilation_cache()
    main, one = call.engines()
    try:
        for _ in guarded(serve(main, one, call.jobs, call.drive), call):
            pass
    except KeyboardInterrupt:
        if not any(job.tokens for job in call.jobs):
            raise
        interrupt(call.jobs)
    seconds = sum(engine.compile_seconds for engine in {main, one})
    done = [completion(params.meta, job, call.logprobs, seconds) for job in call.jobs]
    groups = [done[i : i + call.samples] for i in range(0, len(done), call.samples)]
    result = Result(groups, call.single)
    raise_nonfinite(*call.jobs, result=result, samples=call.samples)
    return result


def raise_nonfinite(*jobs: Job, result: Result | None = None, samples: int = 1) -> None:
    """:class:`NonFiniteError` when a job ended on logits that are not finite; ``result`` goes along."""
    bad = [job for job in jobs if job.reason == "nonfinite"]
    if not bad:
        return
    first, more = bad[0], len(bad) - 1
    place = f"prompt {first.index // samples} at position {len(first.prompt) + len(first.tokens)}"
    others = f" (and {more} more of {len(jobs)}; the rest is in the error's .result)" if len(jobs) > 1 else ""
    raise NonFiniteError(
        f"the target's logits are not finite for {place}{others}; load with dtype='float32' or check the weights",
        result,
    )


def interrupt(jobs: list[Job]) -> None:
    """End the jobs that are not finished with what they have."""
    for job in jobs:
        if job.reason is None:
            job.reason = "interrupted"
            if not job.tokens:
                job.began = 0.0


def completion(meta: Meta, job: Job, logprobs: bool, compile_seconds: float) -> Completion:
    """Result of a finished job, cut at its stop."""
    keep = len(job.tokens)
    return Completion(
        text=text_of(meta, job),
        tokens=list(job.tokens),
        finish_reason="stop" if job.reason == STOP_STRING else str(job.reason),
        stats=stats_of(job, compile_seconds),
        prompt_tokens=job.prompt.tolist(),
        drafted=job.drafted[:keep],
        logprobs=job.logprobs[:keep] if logprobs else None,
        tokenizer_id=meta.tokenizer_id,
    )


def stats_of(job: Job, compile_seconds: float = 0.0) -> metrics.Stats:
    """Stats of a job so far (the prefill's token is no round)."""
    records = metrics.truncate(job.rounds, max(len(job.tokens) - 1, 0))
    return metrics.Stats.from_rounds(
        records,
        new_tokens=len(job.tokens),
        prefill_seconds=job.first - job.began,
        decode_seconds=job.latest - job.first,
        compile_seconds=compile_seconds,
        seed=job.options.seed,
    )


def text_of(meta: Meta, job: Job) -> str | None:
    """Text without the stop id or from the stop string on; None without a tokenizer."""
    if not meta.tokenizer_id:
        return None
    tokenizer = checkpoints.tokenizer.get(meta.tokenizer_id)
    text = tokenizer.decode(visible_tokens(job), skip_special=True)
    cut = StopStrings(job.options.stop_strings).find(text) if job.reason == STOP_STRING else None
    return text if cut is None else text[:cut]


def visible_tokens(job: Job) -> list[int]:
    """Tokens whose text is shown: all but a final stop id."""
    return job.tokens[:-1] if job.reason == "stop" else list(job.tokens)


def stream(params: Params, prompt: Any, **options: Any) -> Iterator[Piece]:
    """See :func:`specjax.stream`."""
    call = plan(params, prompt, **({"rounds": 1} | options))
    enable_compilation_cache()
    main, one = call.engines()
    return pieces(guarded(serve(main, one, call.jobs, call.drive), call), call, {main, one})


def pieces(jobs: Iterator[Job], call: Call, engines: Set[Engine]) -> Iterator[Piece]:
    """Turn updated jobs into pieces of text that are safe to show."""
    texts = {job.index: _LiveText(call.params.meta, job) for job in call.jobs}
    for job in jobs:
        raise_nonfinite(job)
        seconds = sum(engine.compile_seconds for engine in engines)
        yield texts[job.index].piece(job, call.logprobs, seconds)


class _LiveText:
    """Text of one job as it grows; holds back what may be part of a stop string or of a character."""

    def __init__(self, meta: Meta, job: Job):
        self.sent = 0
        self.tokenizer_id = meta.tokenizer_id
        self.decoder = None
        if meta.tokenizer_id:
            self.decoder = StreamDecoder(checkpoints.tokenizer.get(meta.tokenizer_id))
            self.filter = StopFilter(StopStrings(job.options.stop_strings))

    def piece(self, job: Job, logprobs: bool, compile_seconds: float) -> Piece:
        """What is new since the last call."""
        text = ""
        if self.decoder is not None:
            text = self.filter.push(self.decoder.push(visible_tokens(job)[len(self.decoder.ids) :]))
            if job.reason:
                text += self.filter.push(self.decoder.flush()) + self.filter.flush()
        at, self.sent = self.sent, len(job.tokens)
        reason = "stop" if job.reason == STOP_STRING else job.reason
        return Piece(
            job.index,
            text,
            job.tokens[at:],
            job.drafted[at : len(job.tokens)],
            stats_of(job, compile_seconds),
            reason,
            job.logprobs[at : len(job.tokens)] if logprobs else None,
            self.tokenizer_id,
        )
