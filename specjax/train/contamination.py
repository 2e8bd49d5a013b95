"""Training prompts that are in an evaluation set, exactly or nearly, are left out and counted.

A prompt is left out when one of its user turns, without case and punctuation, equals an evaluation turn, or when more
than 30 % of the ten-word shingles of a turn occur in some evaluation turn. Shingles are those of the turn without its
suffix, which evaluation prompts may share; all variants of a prompt go or stay together. Shingles that more than 20
evaluation turns have are how these ask ("Write a solution to the following problem ..."), not what: they do not count.
"""

from collections import Counter
from collections.abc import Iterable

from specjax.train import prompts
from specjax.train.prompts import Prompt, Prompts, plain

WORDS, SHARE, WORDING = 10, 0.3, 20


class Evaluation:
    """Texts that must not be trained on."""

    def __init__(self, texts: Iterable[str]):
        cleaned = [plain(text) for text in texts]
        self._texts = set(cleaned)
        turns = Counter(s for text in self._texts for s in _shingles(text))
        self._wording = {s for s, n in turns.items() if n > WORDING}
        self._shingles = turns.keys() - self._wording

    def equal(self, text: str) -> bool:
        """Whether a text is one of the evaluation's, but for case and punctuation."""
        return plain(text) in self._texts

    def near(self, text: str) -> bool:
        """Whether more than the allowed share of a text's shingles occur in the evaluation."""
        mine = _shingles(plain(text)) - self._wording
        return sum(s in self._shingles for s in mine) > SHARE * len(mine)


def check(given: Prompts, evaluation: object) -> tuple[Prompts, list[Prompt]]:
    """(prompts without those of the evaluation files, what was left out); counts say how many per source.

    ``evaluation``: whatever :func:`specjax.train.prompts.read` takes. ValueError when nothing is left.
    """
    known = Evaluation(turn for p in prompts.read(evaluation).items for turn in p.asked)
    bad = {p.group for p in given.items if _is_bad(known, p)}
    kept, dropped = [p for p in given.items if p.group not in bad], [p for p in given.items if p.group in bad]
    found = Counter(p.source for p in dropped)
    counts = {name: dict(count) | {"contaminated": found[name]} for name, count in given.counts.items()}
    if not kept:
        raise ValueError(f"all {len(dropped)} prompts are in the evaluation files")
    return Prompts(kept, prompts.counted(kept, counts)), dropped


def _is_bad(known: Evaluation, prompt: Prompt) -> bool:
    whole = (m["content"] for m in prompt.messages if m["role"] == "user")
    return any(known.equal(t) or known.near(t) for t in prompt.asked) or any(map(known.equal, whole))


def _shingles(text: str) -> set[str]:
    words = text.split()
    return {" ".join(words[i : i + WORDS]) for i in range(len(words) - WORDS + 1)}
