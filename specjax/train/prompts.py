"""Prompts to train on: read from files or the Hub, told apart by what they say, counted by source."""

import dataclasses
import hashlib
import json
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax.config import positive
from specjax.train import rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """One set of prompts.

    ``path``: a file of JSON lines, or the id of a data set on the Hugging Face Hub (``subset`` and ``split`` say which
    part). ``name``: how it is counted; default: the file's stem. ``field``: the key of a row that holds the prompt;
    default: the first of ``turns``, ``messages``, ``conversations``, ``prompt``. Its value is a text (one user turn), a
    list of texts (user turns), or a list of messages. ``suffixes``: every prompt occurs once with each of them behind
    its last user turn ("" = as it is). ``limit``: rows read at most. ``samples``: answers per prompt, where this source
    differs from the rest.
    """

    path: str
    name: str | None = None
    field: str | None = None
    subset: str | None = None
    split: str = "train"
    suffixes: tuple[str, ...] = ("",)
    limit: int | None = None
    samples: int | None = None

    def __post_init__(self):
        if not self.suffixes or len(set(self.suffixes)) < len(self.suffixes):
            raise ValueError(
                f"suffixes of {self.label} must be one or more different texts, got {self.suffixes}"
            )
        for key in ("limit", "samples"):
            if getattr(self, key) is not None:
                positive(f"{key} of {self.label}", getattr(self, key))

    @property
    def label(self) -> str:
        """Name under which the source is counted."""
        return self.name or Path(self.path).stem


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One conversation.

    ``id``: 64 bits that follow from its text. ``group``: the same for all that differ in the suffix, or in case and
    punctuation, only. ``asked``: its user turns without the suffix.
    """

    source: str
    messages: tuple[Mapping[str, Any], ...]
    id: int
    group: int
    asked: tuple[str, ...]
    samples: int | None = None
    tools: tuple[Mapping[str, Any], ...] | None = None


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Prompts that differ from each other, and how many there were per source: ``rows`` read, ``duplicates``, ``tools``
    (left out: their answers cannot be made anew), ``unanswered`` (left out), ``contaminated``, ``prompts`` kept."""

    items: list[Prompt]
    counts: dict[str, dict[str, int]]

    def __len__(self) -> int:
        return len(self.items)

    def __str__(self) -> str:
        lines = []
        for name, count in self.counts.items():
            left_out = ", ".join(
                f"{n:,} {key}" for key, n in count.items() if key not in ("rows", "prompts") and n
            )
            lines.append(
                f"{name}: {count['prompts']:,} prompts of {count['rows']:,} rows"
                + (f" (left out: {left_out})" if left_out else "")
            )
        return "\n".join(lines)


def read(sources: Any, *, answers: bool = False) -> Prompts:
    """Prompts of one or more sources (:class:`Source`, or a path, or ``NAME=PATH``; a ``.json`` file lists objects with
    the fields of Source).

    ``answers``: keep the answers of the given conversations, which are to be trained as they are; otherwise they are
    dropped, to be made by the target. Raises FileNotFoundError or ValueError naming file, line and what is wrong.
    """
    given = [s for item in _listed(sources) for s in as_sources(item)]
    counts: dict[str, Counter[str]] = {source.label: Counter() for source in given}
    found: dict[int, Prompt] = {}
    groups = _Groups()
    for source in given:
        for where, row in rows.read(source.path, source.subset, source.split, source.limit):
            counts[source.label]["rows"] += 1
            reason, variants = _variants(source, where, row, answers)
            if reason:
                counts[source.label][reason] += 1
            for prompt in variants:
                groups.join(prompt.group, found[prompt.id].group if prompt.id in found else prompt.group)
                if prompt.id in found:
                    counts[source.label]["duplicates"] += 1
                found.setdefault(prompt.id, prompt)
    items = [dataclasses.replace(p, group=groups.first(p.group)) for p in found.values()]
    if not items:
        raise ValueError(f"no prompts in {', '.join(counts)}: {_told(counts)}")
    return Prompts(items, counted(items, counts))


def counted(items: Iterable[Prompt], counts: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """Counts with the number of prompts kept brought up to date."""
    kept = Counter(p.source for p in items)
    return {name: {"rows": 0} | dict(count) | {"prompts": kept[name]} for name, count in counts.items()}


def as_sources(item: Any) -> list[Source]:
    """Sources that an item stands for. ValueError for what is none."""
    if isinstance(item, Source):
        return [item]
    if isinstance(item, Mapping):
        return [_from_json(item, "a source")]
    if not isinstance(item, str | Path):
        raise ValueError(f"a source of prompts is a path, a data set's id or a Source, got {item!r}")
    name, equals, path = str(item).partition("=")
    if not equals or "/" in name:
        name, path = "", str(item)
    if path.endswith(".json"):
        listed = json.loads(rows.text(path))
        if not isinstance(listed, list):
            raise ValueError(f"{path}: expected a list of sources; prompts are JSON lines (.jsonl)")
        return [_from_json(entry, path) for entry in listed]
    return [Source(path=path, name=name or None)]


def _listed(sources: Any) -> list[Any]:
    return list(sources) if isinstance(sources, Sequence) and not isinstance(sources, str) else [sources]


def _from_json(entry: Any, where: str) -> Source:
    known = {f.name for f in dataclasses.fields(Source)}
    if not isinstance(entry, Mapping) or "path" not in entry or set(entry) - known:
        raise ValueError(
            f"{where}: a source has a path and may have {sorted(known - {'path'})}, got {entry!r}; prompts "
            "themselves are JSON lines (.jsonl)"
        )
    return Source(**{k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()})


def _told(counts: Mapping[str, Mapping[str, int]]) -> str:
    return "; ".join(
        f"{name}: {', '.join(f'{n} {key}' for key, n in count.items()) or 'no rows'}"
        for name, count in counts.items()
    )


def _variants(source: Source, where: str, row: Any, answers: bool) -> tuple[str | None, list[Prompt]]:
    """(reason why the row is left out, or None; its prompts)."""
    messages, tools = rows.messages(where, row, source.field), rows.tools(where, row)
    if answers and source.suffixes != ("",):
        raise ValueError(f"{source.label}: given answers belong to prompts as they are, without a suffix")
    answered = any(m["role"] == "assistant" for m in messages)
    if answers and not answered:
        return "unanswered", []
    if not answers:
        if tools or any(m["role"] == "tool" or m.get("tool_calls") for m in messages):
            return "tools", []
        messages = [m for m in messages if m["role"] != "assistant"]
        last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
        messages = messages[: last + 1]
    asked = tuple(m["content"] for m in messages if m["role"] == "user")
    if not asked:
        raise ValueError(f"{where}: no user turn")
    group = _hash([plain(text) for text in asked])
    return None, [
        _prompt(source, _suffixed(messages, suffix), group, asked, tools) for suffix in source.suffixes
    ]


def _prompt(source: Source, messages: list[Mapping[str, Any]], group: int, asked, tools) -> Prompt:
    identity = _hash([messages, tools] if tools else [messages])
    return Prompt(source.label, tuple(messages), identity, group, asked, source.samples, tools)


def _suffixed(messages: list[Mapping[str, Any]], suffix: str) -> list[Mapping[str, Any]]:
    last = max(i for i, m in enumerate(messages) if m["role"] == "user")
    return [
        {**m, "content": m["content"] + suffix} if suffix and i == last else m for i, m in enumerate(messages)
    ]


def plain(text: str) -> str:
    """Text without case, punctuation and signs, words one space apart: what copies have in common."""
    return " ".join(text.lower().translate(_SIGNS).split())


class _Signs(dict):
    """For :meth:`str.translate`: drops punctuation and signs of any script."""

    def __missing__(self, code: int) -> int | None:
        self[code] = None if unicodedata.category(chr(code))[0] in "PS" else code
        return self[code]


_SIGNS = _Signs()


def _hash(value: Any) -> int:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "little")


class _Groups:
    """Groups that turned out to be one are one."""

    def __init__(self) -> None:
        self._parent: dict[int, int] = {}

    def first(self, group: int) -> int:
        while group in self._parent:
            group = self._parent[group]
        return group

    def join(self, a: int, b: int) -> None:
        a, b = self.first(a), self.first(b)
        if a != b:
            self._parent[max(a, b)] = min(a, b)
