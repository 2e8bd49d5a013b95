"""Plain answers as JSON, for sweeps that go on in another process."""

from collections.abc import Mapping, Sequence
from typing import Any

from specjax.bench.measure import Plain
from specjax.bench.rows import Timed
from specjax.bench.setting import Setting
from specjax.metrics import Stats
from specjax.results import Completion


def kept(plain: Plain) -> dict[str, Any]:
    """Answers as JSON, without the prompts."""
    answers = [[(one.tokens, one.finish_reason) for one in batch] for batch in plain.answers]
    return {
        "checksum": plain.checksum,
        "answers": answers,
        "timed": [t._asdict() for t in plain.timed],
        "compile_seconds": plain.compile_seconds,
    }


def restored(said: Mapping[str, Any], setting: Setting, ids: Sequence[Sequence[list[int]]]) -> Plain:
    """Answers from :func:`kept`'s dict and the ids of their prompts."""
    timed = [Timed(**(t | {"rounds": tuple(t["rounds"])})) for t in said["timed"]]
    answers = [
        [answer(prompt, *text) for prompt, text in zip(batch, texts, strict=True)]
        for batch, texts in zip(ids, said["answers"], strict=True)
    ]
    return Plain(said["checksum"], setting, answers, timed, said["compile_seconds"])


def answer(prompt: list[int], tokens: list[int], reason: str) -> Completion:
    """One of them, as far as it is compared."""
    return Completion(
        text=None, tokens=tokens, finish_reason=reason, stats=Stats(), prompt_tokens=prompt, drafted=[]
    )
