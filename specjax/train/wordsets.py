"""Sets of words that carry a sentence's meaning, and whether two sentences say nearly the same."""

import re
from collections import defaultdict


def listed(text: str) -> frozenset[str]:
    """Words of a text with spaces between."""
    return frozenset(text.split())


_SMALL = listed(
    "a an the of to and in is are for if from with by that as at or on be it this given return returns function"
)


def words(text: str) -> frozenset[str]:
    """Words of a text without the small ones, in the singular."""
    found = re.sub(r"[^a-z0-9 ]", " ", text.lower().replace("_", " ")).split()
    return frozenset(w[:-1] if len(w) > 3 and w.endswith("s") else w for w in found) - _SMALL


class Near:
    """Sets of words; whether one shares a given part of its words (of the union) with a set that was added."""

    def __init__(self, share: float):
        self._share = share
        self._by_word: dict[str, list[frozenset[str]]] = defaultdict(list)

    def add(self, words: frozenset[str]) -> None:
        for word in words:
            self._by_word[word].append(words)

    def has(self, words: frozenset[str]) -> bool:
        # a set with so large a share has at least one of any len - ceil(share * len) + 1 words: look at the rarest
        rare = sorted(words, key=lambda w: (len(self._by_word.get(w, ())), w))
        wanted = len(words) - int(-(-self._share * len(words) // 1)) + 1
        near = (other for word in rare[:wanted] for other in self._by_word.get(word, ()))
        return not words or any(len(words & other) >= self._share * len(words | other) for other in near)
