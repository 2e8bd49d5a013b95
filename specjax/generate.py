"""From a prompt and keywords to decoded text: validation, program choice, the loop, results."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from specjax import checkpoints, metrics, prompts, registry
from specjax.config import (
    STOP_BUCKET,
    Meta,
    Options,
    Program,
    per_request,
    positive,
    token_bucket,
)
from specjax.core.loop import STOP_STRING, Driving, Job, serve
from specjax.core.platform import enable_compilation_cache
from specjax.core.programs import Engine
from specjax.progress import line
from specjax.results import Completion, Piece, Result
from specjax.text import StopFilter, StopStrings, StreamDecoder
from specjax.types import Params

DEFAULT_NEW_TOKENS = 256
DEFAULT_ROWS = 8
ROUNDS = 16
_SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip


@dataclasses.dataclass
class Call:
    """A validated call: jobs to run, the program that runs them, and how to drive it."""

    params: Params
    jobs: list[Job]
    program: Program
    drive: Driving
    samples: int
    single: bool
    logprobs: bool
    verbose: bool | None

    def engines(self) -> tuple[Engine, Engine]:
        """Engine of the batch, and the one that prefills a refill alone."""
        weights = (self.params.target, self.params.drafter)
        main = Engine(self.program, weights, self._announce)
        if self.program.rows == 1:
            return main, main
        return main, Engine(dataclasses.replace(self.program, rows=1), weights, self._announce)

    def _announce(self, text: str) -> None:
        with line(self.verbose) as say:
            say(text + "; about a minute the first time for a large model")


def plan(
    params: Params,
    prompt: Any,
    *,
    max_new_tokens: int | list[int] | None = None,
    k: int | None = None,
    temperature: float | str | list[float] | None = None,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    repetition_penalty: Any = None,
    presence_penalty: Any = None,
    frequency_penalty: Any = None,
    logit_bias: Mapping[int, float] | None = None,
    seed: int | list[int] = 0,
    n: int = 1,
    stop: Any = None,
    ignore_eos: bool = False,
    rule: str = "auto",
    rows: int | None = None,
    max_len: int | None = None,
    logprobs: bool = False,
    loop: str = "device",
    chat_template: bool | str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    prefill_chunk: int = 512,
    rounds: int = ROUNDS,
    verbose: bool | None = None,
) -> Call:
    """Validate everything on the host; raises ValueError before anything compiles."""
    meta = _meta(params)
    given = prompts.encode(meta, prompt, chat_template, chat_template_kwargs)
    sampling = {name: value for name, value in locals().items() if name in _SAMPLING}
    options = _options(meta, given.ids, sampling, max_new_tokens, logit_bias, seed, stop, ignore_eos)
    jobs = _jobs(given.ids, options, positive("n", n))
    for job in jobs:
        _watch(meta, job)
    program = _program(params, jobs, _width(meta, k), rule, rows, max_len, bool(logprobs), seed)
    if loop not in ("device", "host"):
        raise ValueError(f"loop must be 'device' or 'host', got {loop!r}")
    if positive("prefill_chunk", prefill_chunk) & (prefill_chunk - 1):
        raise ValueError(f"prefill_chunk must be a power of two, got {prefill_chunk}")
    drive = Driving(loop, min(positive("rounds", rounds), ROUNDS), prefill_chunk)
    return Call(params, jobs, program, drive, n, given.single, bool(logprobs), verbose)


def _meta(params: Params) -> Meta:
    if not isinstance(params, Params) or params.meta is None:
        raise ValueError(f"params must come from specjax.load, got {type(params).__name__}")
    return params.meta


def _options(meta: Meta, ids, sampling, max_new_tokens, logit_bias, seed, stop, ignore_eos) -> list[Options]:
    sampling = _defaults(meta, sampling)
    stop_ids, stop_strings = _stops(meta, stop, ignore_eos)
    common = {"logit_bias": _bias(meta, logit_bias), "stop_ids": stop_ids, "stop_strings": stop_strings}
    columns = {name: per_request(name, value, len(ids)) for name, value in sampling.items()}
    columns["seed"] = per_request("seed", seed, len(ids))
    columns["max_new_tokens"] = [
        _budget(meta, len(row), value)
        for row, value in zip(ids, per_request("max_new_tokens", max_new_tokens, len(ids)), strict=True)
    ]
    return [
        Options(**common, **{name: column[i] for name, column in columns.items()}) for i in range(len(ids))
    ]


def _defaults(meta: Meta, sampling: dict[str, Any]) -> dict[str, Any]:
    """Fill in what was not given: greedy, or the file's generation defaults for ``"model"``."""
    chosen = {name: value for name, value in sampling.items() if value is not None}
    if chosen.get("temperature") != "model":
        if isinstance(chosen.get("temperature"), str):
            raise ValueError(f"temperature must be a number or 'model', got {chosen['temperature']!r}")
        return chosen
    file = dict(meta.generation)
    del chosen["temperature"]
    if not file.get("do_sample", "temperature" in file):
        return chosen
    return {"temperature": 1.0} | {x: file[x] for x in _SAMPLING if file.get(x) is not None} | chosen


def _budget(meta: Meta, prompt: int, asked: int | None) -> int:
    room = meta.target_cfg.max_positions - prompt
    if room < 0:
        raise ValueError(f"the prompt has {prompt} tokens; the model's context is {meta.target_cfg.max_positions}")
    if asked is None:
        return min(DEFAULT_NEW_TOKENS, room)
    if isinstance(asked, int) and asked > room:
        raise ValueError(
            f"prompt ({prompt} tokens) + max_new_tokens ({asked}) exceeds the model's context of "
            f"{meta.target_cfg.max_positions}; ask for at most {room}"
        )
    return asked


def _stops(meta: Meta, stop: Any, ignore_eos: bool) -> tuple[tuple[int, ...], tuple[str, ...]]:
    vocab = meta.target_cfg.vocab_size
    items = [] if stop is None else [stop] if isinstance(stop, str | int | np.integer) else list(np.ravel(stop)) \
        if hasattr(stop, "ndim") else list(stop)
    ids = set() if ignore_eos else set(meta.eos_ids)
    strings = []
    for item in items:
        if isinstance(item, str):
            strings.append(item)
        elif isinstance(item, int | np.integer) and not isinstance(item, bool):
            if not 0 <= item < vocab:
                raise ValueError(f"stop id {item} is outside the vocabulary [0, {vocab})")
            ids.add(int(item))
        else:
            raise ValueError(f"stop takes token ids and strings, got {item!r}")
    StopStrings(strings)  # refuses empty ones
    return tuple(sorted(ids)), tuple(strings)


def _bias(meta: Meta, bias: Mapping[int, float] | None) -> tuple[tuple[int, float], ...]:
    vocab = meta.target_cfg.vocab_size
    for token, value in (bias or {}).items():
        if not isinstance(token, int | np.integer) or not 0 <= token < vocab:
            raise ValueError(f"logit_bias names token {token!r}, outside the vocabulary [0, {vocab})")
        if not isinstance(value, int | float) or value != value or value == float("inf"):
            raise ValueError(f"logit_bias of token {token} must be a number below infinity, got {value!r}")
    if bias and sum(v == float("-inf") for v in bias.values()) >= vocab:
        raise ValueError("logit_bias forbids every token")
    return tuple(sorted((int(t), float(v)) for t, v in (bias or {}).items()))


def _jobs(ids: list[np.ndarray], options: list[Options], n: int) -> list[Job]:
    jobs = []
    for row, option in zip(ids, options, strict=True):
        key = jax.random.key(option.seed, impl="threefry2x32")
        for sample in range(n):
            data = np.asarray(jax.random.key_data(jax.random.fold_in(key, sample)))
            jobs.append(Job(len(jobs), row, option, data))
    return jobs


def _watch(meta: Meta, job: Job) -> None:
    """Look for stop strings in the text of a job as it grows."""
    if not job.options.stop_strings:
        return
    if not meta.tokenizer_id:
        raise ValueError("stop strings need a tokenizer, and this model was loaded without one: use stop ids")
    tokenizer = checkpoints.tokenizer.get(meta.tokenizer_id)
    stops, stream = StopStrings(job.options.stop_strings), StreamDecoder(tokenizer)

    def check(job: Job) -> int | None:
        seen = len(stream.text)
        stream.push(job.tokens[len(stream.ids) :])
        span = stops.match(stream.text, seen)
        return None if span is None else stream.tokens_for(span[1])

    job.check = check


def _width(meta: Meta, k: int | None) -> int:
    if meta.drafter is None:
        if k is not None:
            raise ValueError(f"k={k!r} was given, but params have no drafter: load with drafter=...")
        return 0
    return meta.drafter_cfg.k if k is None else positive("k", k)


def _program(params: Params, jobs, k, rule, rows, max_len, logprobs, seed) -> Program:
    meta = params.meta
    if rule not in ("auto", "match", "reject"):
        raise ValueError(f"rule must be 'auto', 'match' or 'reject', got {rule!r}")
    longest = max(job.limit for job in jobs)
    if max_len is not None and positive("max_len", max_len) < longest:
        raise ValueError(f"max_len={max_len} is less than the longest prompt + max_new_tokens ({longest})")
    flags = set().union(*(job.options.flags() for job in jobs))
    stops = max(len(job.options.stop_ids) for job in jobs)
    return Program(
        pair=meta.pair,
        rows=min(positive("rows", DEFAULT_ROWS if rows is None else rows), len(jobs)),
        tokens=token_bucket(max_len or longest),
        k=k,
        rounds=ROUNDS,
        rule=None if rule == "auto" else rule,
        logprobs=logprobs,
        flags=tuple(sorted(flags)),
        n_stop=-(-max(stops, 1) // STOP_BUCKET) * STOP_BUCKET,
        dtype=str(registry.target(meta.family).shared(params.target, meta.target_cfg).embed.dtype),
    )


def decode(params: Params, prompt: Any, **options: Any) -> Result:
    """See :func:`specjax.decode`."""
    call = plan(params, prompt, **options)
    enable_compilation_cache()
    main, one = call.engines()
    try:
        for job in serve(main, one, call.jobs, call.drive):
            raise_nonfinite(job)
    except KeyboardInterrupt:
        if not any(job.tokens for job in call.jobs):
            raise
        _interrupt(call.jobs)
    seconds = main.compile_seconds + (one.compile_seconds if one is not main else 0.0)
    done = [completion(params.meta, job, call.logprobs, seconds) for job in call.jobs]
    groups = [done[i : i + call.samples] for i in range(0, len(done), call.samples)]
    return Result(groups, call.single)


def raise_nonfinite(job: Job) -> None:
    """FloatingPointError for a job that ended on logits that are not finite."""
    if job.reason == "nonfinite":
        raise FloatingPointError(
            f"the target's logits are not finite for prompt {job.index} at position "
            f"{len(job.prompt) + len(job.tokens)}; load with dtype='float32' or check the weights"
        )


def _interrupt(jobs: list[Job]) -> None:
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
    return pieces(call.params.meta, serve(main, one, call.jobs, call.drive), call)


def pieces(meta: Meta, jobs: Iterator[Job], call: Call) -> Iterator[Piece]:
    """Turn updated jobs into pieces of text that are safe to show."""
    texts = {job.index: _LiveText(meta, job) for job in call.jobs}
    for job in jobs:
        raise_nonfinite(job)
        yield texts[job.index].piece(job, call.logprobs)


class _LiveText:
    """Text of one job as it grows; holds back what may be part of a stop string or of a character."""

    def __init__(self, meta: Meta, job: Job):
        self.sent = 0
        self.decoder = None
        if meta.tokenizer_id:
            self.decoder = StreamDecoder(checkpoints.tokenizer.get(meta.tokenizer_id))
            self.filter = StopFilter(StopStrings(job.options.stop_strings))

    def piece(self, job: Job, logprobs: bool) -> Piece:
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
            stats_of(job),
            reason,
            job.logprobs[at : len(job.tokens)] if logprobs else None,
        )
