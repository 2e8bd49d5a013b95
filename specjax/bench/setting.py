"""What a measurement decodes, and how: prompts as ids, batches, shapes that all of them share."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specjax import calls, generate, prompts as _prompts
from specjax.config import positive, prefill_bucket, token_bucket
from specjax.results import Completion
from specjax.types import Params

#: Prefill passes are as wide as the shortest prompt asks for, within these, so that one program serves all prompts.
PREFILL = (64, 512)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """Options that plain and speculative decoding share. See :func:`specjax.decode`; ``batch``: prompts decoded
    together, from the first token to the last one's end. ``sampling``: further sampling options."""

    batch: int = 1
    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    chat_template: bool | str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    max_len: int | None = None
    prefill_chunk: int | None = None
    kernels: str | None = None
    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        positive("batch", self.batch)
        if positive("max_new_tokens", self.max_new_tokens) < 2:
            raise ValueError("max_new_tokens must be at least 2: the first token comes from the prefill")


@dataclasses.dataclass(frozen=True)
class Batches:
    """Prompts in batches of equal size, and the shapes that serve all of them."""

    setting: Setting
    ids: list[list[list[int]]]  # [batch][prompt]
    max_len: int
    prefill_chunk: int
    left_out: int  # prompts behind the last whole batch
    given_ids: bool  # prompts were token ids, not texts

    @property
    def prompts(self) -> int:
        return len(self.ids) * self.setting.batch

    @property
    def checksum(self) -> str:
        """Digest of the ids of all prompts that are decoded."""
        told = hashlib.sha256()
        for row in (row for batch in self.ids for row in batch):
            told.update(np.asarray(row, np.int32).tobytes() + b"|")
        return told.hexdigest()[:16]

    @property
    def template(self) -> str:
        """Which chat template turned texts into ids: the model's, none, or a digest of the one given."""
        given, extra = self.setting.chat_template, self.setting.chat_template_kwargs
        if given is False or self.given_ids:
            return "none"
        if not isinstance(given, str) and not extra:
            return "model"
        text = json.dumps([given if isinstance(given, str) else "model", dict(extra or {})], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def options(self, batch: int | None = None, **more: Any) -> dict[str, Any]:
        """Keywords of ``decode``; with the number of a batch, with its seeds."""
        s = self.setting
        first = 0 if batch is None else batch * s.batch
        return {
            "max_new_tokens": s.max_new_tokens,
            "temperature": s.temperature,
            "ignore_eos": s.ignore_eos,
            "seed": [s.seed + first + i for i in range(s.batch)],
            "rows": s.batch,
            "max_len": self.max_len,
            "prefill_chunk": self.prefill_chunk,
            "kernels": s.kernels,
            "verbose": False,
            **s.sampling,
        } | {key: value for key, value in more.items() if value is not None}

    @property
    def widths(self) -> dict[int, int]:
        """Widths of prefill passes, and a batch that has each."""
        found: dict[int, int] = {}
        for i, batch in enumerate(self.ids):
            found.setdefault(prefill_bucket(max(map(len, batch)), self.prefill_chunk), i)
        return found

    def answer(self, params: Params, batch: int, **more: Any) -> list[Completion]:
        """Decode a batch. KeyboardInterrupt where decoding would give half an answer."""
        out = generate.decode(params, self.ids[batch], **self.options(batch, **more))
        answers = [group[0] for group in out.completions]
        if "interrupted" in {one.finish_reason for one in answers}:
            raise KeyboardInterrupt
        return answers


def batches(params: Params, prompts: Any, setting: Setting) -> Batches:
    """Prompts as :func:`specjax.decode` takes them, in batches. Checks every option before anything compiles.

    Raises ValueError for fewer prompts than rows of a batch, and whatever ``decode`` refuses.
    """
    given = _prompts.encode(params.meta, prompts, setting.chat_template, setting.chat_template_kwargs)
    ids, size = [row.tolist() for row in given.ids], setting.batch
    if len(ids) < size:
        raise ValueError(f"a batch of {size} needs at least {size} prompts, got {len(ids)}")
    whole = len(ids) // size * size
    ids = [ids[i : i + size] for i in range(0, whole, size)]
    longest = max(len(row) for batch in ids for row in batch) + setting.max_new_tokens
    width = prefill_bucket(min(max(map(len, batch)) for batch in ids), PREFILL[1])
    made = Batches(
        setting,
        ids,
        token_bucket(setting.max_len or longest),
        setting.prefill_chunk or max(width, PREFILL[0]),
        len(given.ids) - whole,
        _are_ids(prompts),
    )
    for i, batch in enumerate(ids):
        calls.plan(params, batch, **made.options(i))
    return made


def lengths(params: Params, prompts: Any, options: Mapping[str, Any]) -> list[int]:
    """Tokens of each prompt, through the chat template that ``options`` may name."""
    template = [options.get(name) for name in ("chat_template", "chat_template_kwargs")]
    return [len(ids) for ids in _prompts.encode(params.meta, prompts, *template).ids]


def longer(count: int, most: int | None) -> tuple[str, ...]:
    """A note of prompts that were left out."""
    return (f"{count} prompt(s) of more than {most} tokens were left out",) if count else ()


def _are_ids(prompts: Any) -> bool:
    first = prompts[0] if isinstance(prompts, Sequence) and not isinstance(prompts, str) else prompts
    return not isinstance(first, str | Mapping) and not (
        isinstance(first, Sequence) and len(first) > 0 and isinstance(first[0], Mapping)
    )
