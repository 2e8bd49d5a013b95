"""The target's own answers to prompts: what a drafter is trained on.

Sample s of a prompt is what ``specjax.decode`` gives for it with ``seed=seed_of(seed, prompt.id)`` and ``n > s``. It
depends on nothing else, so work that was stopped and goes on gives the same texts as work that was not.
"""

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specjax import calls
from specjax.config import Options, positive
from specjax.progress import Say, line
from specjax.train import contamination, prompts as reading
from specjax.train.answering import PREFILL_CHUNK, ROUNDS, Encoder, Plan, answer, turns
from specjax.train.made import TEXTS, about
from specjax.train.prompts import Prompts
from specjax.train.store import Store, load
from specjax.train.store_files import Writer
from specjax.types import Params

TOKENISED_AT_ONCE = 1024


def prepare(
    params: Params,
    prompts: Any,
    folder: str | Path,
    *,
    evaluation: Any = None,
    samples: int | None = None,
    max_new_tokens: int = 256,
    max_prompt_tokens: int | None = None,
    temperature: float | str | Sequence[float] = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int = 0,
    rows: int | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
    rounds: int = ROUNDS,
    chat_template: bool | str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    verbose: bool | None = None,
) -> Store:
    """Answer prompts and keep the texts in ``folder``. Called again after a stop, goes on where it was.

    Args:
        params: the target; a drafter in it is left aside.
        prompts: whatever :func:`specjax.train.prompts.read` takes, or what it gave.
        evaluation: files whose prompts, and near copies of them, are left out.
        samples: answers per prompt; default: as many as ``temperature`` has values. A source may have its own number.
        max_new_tokens: budget of every answer.
        max_prompt_tokens: prompts that are longer are left out, and conversations end before a turn that would be;
            default: what the context leaves.
        temperature: one value, or one per sample, the last of which serves any further ones (``(0, 0.8)``: one greedy
            answer, the others sampled). "model": the file's own settings.
        top_k, top_p, min_p, repetition_penalty, chat_template, chat_template_kwargs, prefill_chunk, rounds: see
            :func:`specjax.decode`.
        seed: of all samples.
        rows: rows decoded at once; default: a power of two that fits the device, at most 1024 (CPU: 16).
        verbose: progress: None = only on a terminal, False = never, True = always.

    A conversation of several user turns is answered turn by turn, each answer going into the conversation as text, as
    :func:`specjax.chat` does. Further prompts, sources and samples may be asked of a folder later.

    Raises ValueError for anything wrong with the request, before decoding, among it a folder of other settings or
    another target (naming each difference); FloatingPointError when logits are not finite; OSError when a shard cannot
    be written. What was written stays, and answers that were finished are written on the way out.
    """
    wanted = {
        "temperature": [temperature] if isinstance(temperature, int | float) else temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "prefill_chunk": prefill_chunk,
        "rounds": rounds,
        "max_new_tokens": positive("max_new_tokens", max_new_tokens),
    }
    call = _call(params, wanted)
    for name, value in {"samples": samples, "rows": rows}.items():
        if value is not None:
            positive(name, value)
    with line(verbose) as say:
        asked = prompts if isinstance(prompts, Prompts) else reading.read(prompts)
        if evaluation is not None:
            asked = contamination.check(asked, evaluation)[0]
        encode = Encoder(call.params.meta, chat_template, chat_template_kwargs)
        longest = _longest(call, max_prompt_tokens)
        asked, first = fitting(asked, encode, longest, say)
        pairs = [(p, s) for p in asked.items for s in range(p.samples or samples or len(call.jobs))]
        plan = Plan(call, encode, first, longest, pairs, lambda prompt: seed_of(seed, prompt))
        _check_samples(plan)
        meta = about(call.params, chat_template, chat_template_kwargs) | {
            "kind": "own",
            "sampling": _sampling([job.options for job in call.jobs], seed) | {"max_prompt_tokens": longest},
            "sources": list(asked.counts),
            "prompts": asked.counts,
        }
        with Writer(folder, meta, ("kind", *TEXTS, "sampling")) as writer:
            figures = answer(plan, writer, rows, say)
            return finished(writer, figures)


def finished(writer: Writer, figures: Mapping[str, Any]) -> Store:
    """The folder's texts, with what there is of them noted."""
    store = load(writer.folder, partial=True)
    runs = [*writer.meta.get("runs", []), *([dict(figures)] if figures else [])]
    writer.save_meta(complete=True, counts=store.counts(), runs=runs)
    return dataclasses.replace(store, meta=(writer.meta,))


def seed_of(seed: int, prompt: int) -> int:
    """Seed of a prompt's samples: 31 bits that follow from the seed of all and the prompt's id."""
    digest = hashlib.sha256(f"{seed} {prompt}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


def fitting(asked: Prompts, encode: Encoder, longest: int, say: Say) -> tuple[Prompts, dict[int, np.ndarray]]:
    """(prompts of at most ``longest`` tokens, ids of each one's first turn). ValueError when none is left."""
    first: dict[int, np.ndarray] = {}
    for at in range(0, len(asked), TOKENISED_AT_ONCE):
        say(f"tokenising prompts: {at:,} of {len(asked):,}")
        some = asked.items[at : at + TOKENISED_AT_ONCE]
        ids = encode.several([p.messages[: turns(p)[0] + 1] for p in some])
        first |= {p.id: i for p, i in zip(some, ids, strict=True)}
    kept = [p for p in asked.items if len(first[p.id]) <= longest]
    if not kept:
        raise ValueError(f"all {len(asked)} prompts are longer than {longest} tokens")
    long = Counter(p.source for p in asked.items if len(first[p.id]) > longest)
    counts = {name: dict(count) | {"too_long": long[name]} for name, count in asked.counts.items()}
    return Prompts(kept, reading.counted(kept, counts)), first


def _call(params: Params, wanted: Mapping[str, Any]) -> calls.Call:
    """A validated call of the target alone, one job per temperature."""
    if not isinstance(params, Params) or params.meta is None:
        raise ValueError(f"params must come from specjax.load, got {type(params).__name__}")
    if not params.meta.tokenizer_id:
        raise ValueError("this model was loaded without a tokenizer, which prompts need")
    meta = dataclasses.replace(params.meta, drafter=None, drafter_cfg=None, drafter_notes=(), rule="auto")
    temperature = wanted["temperature"]
    if not isinstance(temperature, str) and not len(temperature):
        raise ValueError("temperature is an empty list: give a number, or one per sample")
    stand_ins = [[0]] * (1 if isinstance(temperature, str) else len(temperature))
    return calls.plan(Params(params.target, None, meta), stand_ins, **wanted)


def _longest(call: calls.Call, asked: int | None) -> int:
    context, budget = call.params.meta.target_cfg.max_positions, call.jobs[0].options.max_new_tokens
    if asked is not None and positive("max_prompt_tokens", asked) > context - budget:
        raise ValueError(
            f"max_prompt_tokens ({asked}) + max_new_tokens ({budget}) exceeds the model's context of {context}"
        )
    return context - budget if asked is None else asked


def _check_samples(plan: Plan) -> None:
    most = max(sample for _, sample in plan.asked) + 1
    greedy = sum(plan.options(sample).temperature == 0 for sample in range(most))
    if greedy > 1:
        raise ValueError(
            f"{greedy} of {most} samples per prompt are greedy (temperature 0) and would be the same: give one "
            "temperature per sample, for instance (0, 0.8)"
        )


def _sampling(options: Sequence[Options], seed: int) -> dict[str, Any]:
    """What answers depend on beside target and prompt, as JSON."""
    names = ("top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens", "stop_ids")
    told = {name: getattr(options[0], name) for name in names}
    return told | {
        "temperature": [o.temperature for o in options],
        "stop_ids": list(options[0].stop_ids),
        "seed": seed,
    }
