"""Coding prompts made from documented functions: one asks for the function that a docstring describes.

Two kinds, each in several wordings: a function to complete (``def`` line and docstring with its examples, in a fence),
and a task in one sentence ("Write a function to ..."). The same function may be asked for in several ways.
"""

import dataclasses
import json
import random
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from specjax.config import positive
from specjax.train import contamination, documented, prompts
from specjax.train.asking import asked
from specjax.train.documented import ALONE, Function
from specjax.train.packages import Package
from specjax.train.wordsets import Near, words

#: Descriptions that share so many of their words are of the same function.
OVERLAP = 0.75
#: Words in fewer descriptions of self-contained functions than this are a field's own; how many of its words may be,
#: in the description of a function that is hardly (:data:`documented.LITTLE`), or partly (``SOME``) self-contained.
COMMON, JARGON = 6, {documented.LITTLE: 0.1, documented.SOME: 0.25}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """``count``: prompts at most. ``tokens``: of a prompt at most, estimated. ``same``: functions of one name at most.
    ``alone``: the least self-contained functions that are used (:data:`documented.ALONE` ... ``LITTLE``)."""

    count: int = 20_000
    tokens: int = 180
    same: int = 4
    alone: int = documented.LITTLE
    seed: int = 0

    def __post_init__(self):
        for name in ("count", "tokens", "same"):
            positive(name, getattr(self, name))


DEFAULT = Limits()


def make(
    given: Iterable[Package], out: str | Path, evaluation: Any = None, limits: Limits = DEFAULT
) -> dict[str, Any]:
    """Write prompts from the functions of packages to a file of JSON lines, and a summary beside it (``.json``).

    ``evaluation``: as of :func:`specjax.train.prepare`; what is in it, or nearly, is left out. Returns the summary:
    per package its version, licence, functions ``seen`` and ``usable``, and ``prompts``. Raises ValueError when none
    is left.
    """
    path = Path(out)
    rng = random.Random(limits.seed)
    told: dict[str, dict[str, Any]] = {}
    found: list[Function] = []
    for package in given:
        counts: Counter[str] = Counter()
        found += [f for f in documented.functions(package, counts) if f.alone >= limits.alone]
        told[package.name] = {"version": package.version, "licence": package.licence, **counts, "prompts": 0}
    known = None if evaluation is None else Known(evaluation)
    clean = [f for f in found if not (known and known.function(f))]
    left_out = Counter(contaminated=len(found) - len(clean))
    rows: dict[str, Function] = {}
    for function in _different(clean, limits, rng, left_out):
        texts = asked(function, limits.tokens, rng)
        if known and any(map(known.text, texts)):
            left_out["contaminated"] += 1
            continue
        for text in texts[: limits.count - len(rows)]:
            rows.setdefault(text, function)
    if not rows:
        raise ValueError(f"no prompts: of {len(found)} usable functions were left out {dict(left_out)}")
    for function in rows.values():
        told[function.package]["prompts"] += 1
    texts = list(rows)
    rng.shuffle(texts)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(json.dumps({"turns": [t]}) + "\n" for t in texts).encode())
    summary = {
        "prompts": len(texts),
        "functions": len(set(map(id, rows.values()))),
        "left out": dict(left_out),
        "packages": told,
    }
    path.with_suffix(".json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


# --- what is left out


class Known:
    """Evaluation prompts, and what asks for the same.

    More is left out than by :mod:`contamination` alone, because the prompts are short: a function of the same name
    as one to complete there, and a description that has most of its words in common with a prompt.
    """

    def __init__(self, evaluation: Any):
        texts = [turn for p in prompts.read(evaluation).items for turn in p.asked]
        self._texts = contamination.Evaluation(texts)
        self._names = {name.lower() for text in texts for name in re.findall(r"^def (\w+)\(", text, re.M)}
        self._near = Near(OVERLAP)
        for text in texts:
            self._near.add(words(re.sub(r"^(write|implement)\b.{0,12}\bfunction\b", "", text, flags=re.I)))

    def function(self, function: Function) -> bool:
        """Whether a prompt asks for this function, in one wording or another."""
        doc = function.doc
        said = f"{doc.summary} {doc.more}"
        whole = " ".join([function.head, said, *(f"{call} {want}" for call, want in doc.examples)])
        return (
            function.name.lower() in self._names
            or self._near.has(words(doc.summary))
            or self._texts.near(said)
            or self._texts.near(whole)
        )

    def text(self, text: str) -> bool:
        """Whether a text is one of the prompts, or nearly."""
        return self._texts.equal(text) or self._texts.near(text)


def _different(
    found: list[Function], limits: Limits, rng: random.Random, left_out: Counter[str]
) -> list[Function]:
    """Functions that differ in what they do, the most self-contained first, otherwise in random order."""
    order = found.copy()
    rng.shuffle(order)
    order.sort(key=lambda f: (-f.alone, not f.doc.examples and f.alone < ALONE))
    near, named, kept = Near(OVERLAP), Counter[str](), []
    common = Counter(w for f in order if f.alone == ALONE for w in words(f.doc.summary))
    for function in order:
        said = words(function.doc.summary)
        if function.alone < ALONE and sum(common[w] < COMMON for w in said) > JARGON[function.alone] * len(
            said
        ):
            left_out["jargon"] += 1
            continue
        if named[function.name] >= limits.same or near.has(said):
            left_out["duplicates"] += 1
            continue
        near.add(said)
        named[function.name] += 1
        kept.append(function)
    return kept
