"""A call before it runs: options checked on the host, jobs made, the program chosen."""

import contextlib
import dataclasses
import difflib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import jax
import numpy as np

from specjax import checkpoints, prompts, registry
from specjax.config import (
    FLOAT32_MAX,
    PENALTIES,
    STOP_BUCKET,
    Meta,
    Options,
    Program,
    acceptance_rule,
    per_request,
    positive,
    row_bucket,
    token_bucket,
)
from specjax.core import width as choice
from specjax.core.loop import Driving, Job
from specjax.core.programs import Engine
from specjax.kernels import dispatch
from specjax.progress import line
from specjax.text import StopStrings, StreamDecoder
from specjax.types import Params

DEFAULT_NEW_TOKENS = 256
DEFAULT_ROWS = 8
ROUNDS = 16
AUTO = "auto"
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
        """Engine of the batch, and the one that prefills what enters it later."""
        weights = (self.params.target, self.params.drafter)
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(weights)):
            raise ValueError("these params hold shapes only (shapes_only=True): load them again to decode")
        main = Engine(self.program, weights, self._announce)
        if self.program.rows == 1:
            return main, main
        return main, Engine(dataclasses.replace(self.program, rows=1), weights, self._announce)

    @contextlib.contextmanager
    def _announce(self, text: str) -> Iterator[None]:
        with line(self.verbose) as say:
            say(text + "; about a minute the first time for a large model")
            yield


def plan(params: Params, prompt: Any, **options: Any) -> Call:
    """Validate everything on the host; raises ValueError or TypeError before anything compiles."""
    check_names(options)
    return _plan(params, prompt, **{name: _plain(value) for name, value in options.items()})


def check_names(options: Iterable[str]) -> None:
    """TypeError for an option that does not exist, with the ones that do."""
    for name in options:
        if name not in OPTIONS:
            near = difflib.get_close_matches(name, OPTIONS, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise TypeError(f"unknown option {name!r}; {hint}known: {', '.join(OPTIONS)}")


def _plain(value: Any) -> Any:
    """Numpy and jax values as Python ones."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _plan(
    params: Params,
    prompt: Any,
    *,
    max_new_tokens: int | list[int] | None = None,
    k: int | str | None = None,
    temperature: float | str | list[float] | None = None,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    repetition_penalty: Any = None,
    presence_penalty: Any = None,
    frequency_penalty: Any = None,
    logit_bias: Any = None,
    seed: int | list[int] = 0,
    n: int = 1,
    stop: Any = None,
    ignore_eos: bool = False,
    rule: str | None = None,
    rows: int | None = None,
    max_len: int | None = None,
    logprobs: bool = False,
    loop: str = "device",
    chat_template: bool | str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    prefill_chunk: int = 512,
    rounds: int = ROUNDS,
    kernels: str | None = None,
    verbose: bool | None = None,
) -> Call:
    meta = _meta(params)
    k, rows = _tuned(meta, k, rows)
    given = prompts.encode(meta, prompt, chat_template, chat_template_kwargs)
    sampling = {name: value for name, value in locals().items() if name in _SAMPLING}
    options = _options(meta, given.ids, sampling, max_new_tokens, logit_bias, seed, stop, ignore_eos)
    jobs = _jobs(given.ids, options, positive("n", n))
    for job in jobs:
        _watch(meta, job)
    logprobs = _switch("logprobs", logprobs)
    program = _program(params, jobs, width(meta, k), rule, rows, max_len, logprobs, kernels, k == AUTO)
    if loop not in ("device", "host"):
        raise ValueError(f"loop must be 'device' or 'host', got {loop!r}")
    if positive("prefill_chunk", prefill_chunk) & (prefill_chunk - 1):
        raise ValueError(f"prefill_chunk must be a power of two, got {prefill_chunk}")
    if positive("rounds", rounds) > ROUNDS:
        raise ValueError(f"rounds={rounds} is more than one device call records; at most {ROUNDS}")
    drive = Driving(loop, rounds, prefill_chunk)
    return Call(params, jobs, program, drive, n, given.single, logprobs, verbose)


OPTIONS = tuple(inspect.signature(_plan).parameters)[2:]


def _tuned(meta: Meta, k: Any, rows: Any) -> tuple[Any, Any]:
    """``k`` and ``rows`` of a call, from the params' own defaults where it names none."""
    own = dict(meta.defaults)
    return own.get("k") if k is None and meta.drafter is not None else k, (
        own.get("rows") if rows is None else rows
    )


def _meta(params: Params) -> Meta:
    if not isinstance(params, Params) or params.meta is None:
        raise ValueError(f"params must come from specjax.load, got {type(params).__name__}")
    return params.meta


def _options(meta: Meta, ids, sampling, max_new_tokens, logit_bias, seed, stop, ignore_eos) -> list[Options]:
    sampling = _defaults(meta, sampling)
    stop_ids, stop_strings = _stops(meta, stop, _switch("ignore_eos", ignore_eos))
    common = {"stop_ids": stop_ids, "stop_strings": stop_strings}
    columns = {name: per_request(name, value, len(ids)) for name, value in sampling.items()}
    columns["logit_bias"] = [_bias(meta, bias) for bias in per_request("logit_bias", logit_bias, len(ids))]
    columns["max_new_tokens"] = [
        _budget(meta, len(row), value)
        for row, value in zip(ids, per_request("max_new_tokens", max_new_tokens, len(ids)), strict=True)
    ]
    seeds = per_request("seed", seed, len(ids))
    given = [
        {name: column[i] for name, column in columns.items() if column[i] is not None}
        for i in range(len(ids))
    ]
    return [Options(seed=seeds[i], **common, **own) for i, own in enumerate(given)]


def _switch(name: str, value: Any) -> bool:
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def _defaults(meta: Meta, sampling: dict[str, Any]) -> dict[str, Any]:
    """Fill in what was not given: greedy, or the file's generation defaults for ``"model"``."""
    chosen = {name: value for name, value in sampling.items() if value is not None}
    if chosen.get("temperature") != "model":
        if isinstance(chosen.get("temperature"), str):
            raise ValueError(f"temperature must be a number or 'model', got {chosen['temperature']!r}")
        return chosen
    file = dict(meta.generation)
    del chosen["temperature"]
    stated = {name: file[name] for name in _SAMPLING if file.get(name) is not None}
    if file.get("do_sample", "temperature" in file):
        return {"temperature": 1.0} | stated | chosen
    return {name: value for name, value in stated.items() if name in PENALTIES} | chosen


def _budget(meta: Meta, prompt: int, asked: int | None) -> int:
    room = meta.target_cfg.max_positions - prompt
    if room < 0:
        raise ValueError(
            f"the prompt has {prompt} tokens; the model's context is {meta.target_cfg.max_positions}"
        )
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
    listed = isinstance(stop, Sequence | Set) and not isinstance(stop, str | bytes)
    items = [] if stop is None else list(stop) if listed else [stop]
    ids = set() if ignore_eos else set(meta.eos_ids)
    strings = []
    for item in map(_plain, items):
        if isinstance(item, str):
            strings.append(item)
        elif isinstance(item, int) and not isinstance(item, bool):
            if not 0 <= item < vocab:
                raise ValueError(f"stop id {item} is outside the vocabulary [0, {vocab})")
            ids.add(item)
        else:
            raise ValueError(f"stop takes token ids and strings, got {item!r}")
    StopStrings(strings)  # refuses empty ones
    return tuple(sorted(ids)), tuple(strings)


def _bias(meta: Meta, bias: Any) -> tuple[tuple[int, float], ...]:
    vocab, pairs = meta.target_cfg.vocab_size, {}
    if bias is not None and not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias must map token ids to numbers, got {bias!r}")
    for token, value in (bias or {}).items():
        token, value = _plain(token), _plain(value)
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
            raise ValueError(f"logit_bias names token {token!r}, outside the vocabulary [0, {vocab})")
        if isinstance(value, bool) or not isinstance(value, int | float) or not value <= FLOAT32_MAX:
            raise ValueError(f"logit_bias of token {token} must be a number below infinity, got {value!r}")
        pairs[token] = float(value) if value >= -FLOAT32_MAX else float("-inf")
    if sum(value == float("-inf") for value in pairs.values()) >= vocab:
        raise ValueError("logit_bias forbids every token")
    return tuple(sorted(pairs.items()))


def _jobs(ids: list[np.ndarray], options: list[Options], n: int) -> list[Job]:
    jobs: list[Job] = []
    for row, option in zip(ids, options, strict=True):
        key = _key(option.seed)
        for sample in range(n):
            data = np.asarray(jax.random.key_data(jax.random.fold_in(key, sample)))
            jobs.append(Job(len(jobs), row, option, data))
    return jobs


def _key(seed: int) -> jax.Array:
    """Key of a seed of any size; jax itself reads the lowest 32 bits only."""
    key = jax.random.key(seed % 2**32, impl="threefry2x32")
    while seed := seed >> 32:
        key = jax.random.fold_in(key, np.uint32(seed % 2**32))
    return key


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


def width(meta: Meta, k: int | str | None) -> int:
    """Drafts per round: ``k``, or the drafter's own; the most there may be for "auto"; 0 without a drafter."""
    if meta.drafter is None:
        if k is not None:
            raise ValueError(f"k={k!r} was given, but params have no drafter: load with drafter=...")
        return 0
    if k == AUTO:
        return widest(meta)
    if isinstance(k, str):
        raise ValueError(f"k must be a number of drafts per round or {AUTO!r}, got {k!r}")
    width = meta.drafter_cfg.k if k is None else positive("k", k)
    if width >= meta.target_cfg.max_positions:
        raise ValueError(
            f"k={width} drafts do not fit the model's context of {meta.target_cfg.max_positions}"
        )
    most = getattr(registry.drafter(meta.drafter), "max_k", None)
    if most is not None and width > most(meta.drafter_cfg):
        raise ValueError(
            f"k={width}, but this drafter gives at most {most(meta.drafter_cfg)} drafts per round"
        )
    return width


def widest(meta: Meta) -> int:
    """Most drafts of a round with k="auto": the drafter's limit, else the larger of its own width and 7 (15 for one
    without weights, whose drafts cost nothing)."""
    module, cfg = registry.drafter(str(meta.drafter)), meta.drafter_cfg
    limit = getattr(module, "max_k", None)
    most = limit(cfg) if limit else max(cfg.k, 15 if hasattr(module, "default") else 7)
    return max(1, min(most, choice.BUCKETS[-1], meta.target_cfg.max_positions - 1))


def _program(params: Params, jobs, k, rule, rows, max_len, logprobs, kernels, auto) -> Program:
    meta = params.meta
    rule = acceptance_rule(meta, rule)
    if auto:  # widths follow the clock: only ids that do not depend on them are the same in every run
        rule = rule or "match"
    longest = max(job.limit for job in jobs)
    if max_len is not None and positive("max_len", max_len) < longest:
        raise ValueError(f"max_len={max_len} is less than the longest prompt + max_new_tokens ({longest})")
    flags = set().union(*(job.options.flags() for job in jobs))
    stops = max(len(job.options.stop_ids) for job in jobs)
    return Program(
        pair=meta.pair,
        rows=row_bucket(len(jobs), positive("rows", DEFAULT_ROWS if rows is None else rows)),
        tokens=token_bucket(max_len or longest),
        k=k,
        rounds=ROUNDS,
        rule=rule,
        logprobs=logprobs,
        flags=tuple(sorted(flags)),
        n_stop=-(-max(stops, 1) // STOP_BUCKET) * STOP_BUCKET,
        dtype=str(registry.target(meta.family).shared(params.target, meta.target_cfg).embed.dtype),
        kernels=dispatch.wanted(kernels),
        auto=auto,
    )
