"""Conversations that come with their answers, as texts to train on."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specjax import checkpoints
from specjax.progress import line
from specjax.train import contamination, prompts as reading
from specjax.train.answers import Given, texts
from specjax.train.made import TEXTS, about
from specjax.train.prompts import Prompt, Prompts
from specjax.train.respond import finished
from specjax.train.store import Store
from specjax.train.store_files import Document, Writer
from specjax.types import Params

SHARD_DOCUMENTS = 4096


def prepare_given(
    params: Params,
    conversations: Any,
    folder: str | Path,
    *,
    evaluation: Any = None,
    marks: tuple[str, str] | None = None,
    lenient: bool = False,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    verbose: bool | None = None,
) -> Store:
    """Keep given conversations as texts in ``folder``, their answers trained. Called again, adds what is not there.

    Args:
        params: the target; its chat template and tokenizer write the texts, its stop ids end the answers.
        conversations: sources of :func:`specjax.train.prompts.read` whose rows have messages with answers.
        evaluation: files whose prompts, and near copies of them, are left out.
        marks: texts before and after every answer, where the chat template does not tell (:class:`Given`).
        lenient: leave out, and count as ``unreadable``, conversations whose answers the template does not tell.

    Raises ValueError, naming the conversation, when its answers cannot be told (all of them, if ``lenient``), and as
    :func:`specjax.train.respond.prepare`.
    """
    meta = params.meta
    if not (chat_template is None or isinstance(chat_template, str)):
        raise ValueError(f"chat_template must be a template, got {chat_template!r}: answers stand in one")
    if not meta.tokenizer_id:
        raise ValueError("this model was loaded without a tokenizer, which texts need")
    asked = conversations
    with line(verbose) as say:
        if not isinstance(asked, Prompts):
            asked = reading.read(conversations, answers=True)
        if evaluation is not None:
            asked = contamination.check(asked, evaluation)[0]
        tokenizer = checkpoints.tokenizer.get(meta.tokenizer_id)
        template = chat_template or meta.chat_template
        given = Given(tokenizer, template, meta.eos_ids, marks, **dict(chat_template_kwargs or {}))
        facts = about(params, chat_template, chat_template_kwargs) | {
            "kind": "given",
            "sampling": None,
            "marks": list(marks) if marks else None,
            "sources": list(asked.counts),
        }
        with Writer(folder, facts, ("kind", *TEXTS, "marks")) as writer:
            done = {prompt for prompt, _ in writer.done()}
            new = [p for p in asked.items if p.id not in done]
            found, failed = [], []
            for number, prompt in enumerate(new):
                say(f"reading conversations: {number:,} of {len(new):,}")
                try:
                    found += _documents(given, prompt)
                except ValueError as error:
                    if not lenient:
                        raise
                    failed.append((prompt, error))
                if len(found) >= SHARD_DOCUMENTS:
                    writer.write(found)
                    found = []
            if failed and len(failed) == len(new) and not done:
                raise failed[0][1]
            writer.write(found)
            writer.save_meta(prompts=_counts(asked, [prompt for prompt, _ in failed]))
            return finished(writer, {})


def _documents(given: Given, prompt: Prompt) -> list[Document]:
    try:
        turns = given.turns(prompt.messages, prompt.tools)
    except ValueError as error:
        raise ValueError(f"a conversation of {prompt.source} ({prompt.asked[0][:80]!r}): {error}") from None
    return [
        Document(
            np.asarray(t.ids, np.uint32), t.spans, t.ended, prompt.source, prompt.id, prompt.group, 0, part
        )
        for part, t in enumerate(texts(turns))
    ]


def _counts(asked: Prompts, failed: list[Prompt]) -> dict[str, dict[str, int]]:
    unreadable = Counter(p.source for p in failed)
    bad = {p.id for p in failed}
    counts = {name: dict(c) | {"unreadable": unreadable[name]} for name, c in asked.counts.items()}
    return reading.counted([p for p in asked.items if p.id not in bad], counts)
