"""Prompts to train on: read from files or the Hub, told apart by what they say, counted by source."""

import dataclasses
import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax.config import positive

#: Keys of a row that may hold a prompt, in the order in which they are looked for.
FIELDS = ("turns", "messages", "conversations", "prompt")
_SHAREGPT = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}


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
        for where, row in _rows(source):
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
        listed = json.loads(_text(path))
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
            f"{where}: a source has a path and may have {sorted(known - {'path'})}, got {entry!r}"
        )
    return Source(**{k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()})


def _told(counts: Mapping[str, Mapping[str, int]]) -> str:
    return "; ".join(f"{name} {dict(count)}" for name, count in counts.items())


# --- rows


def _rows(source: Source) -> Iterator[tuple[str, Any]]:
    """(where, row) of a source."""
    path = Path(source.path)
    if not path.is_file() and _looks_like_an_id(source.path):
        yield from _from_hub(source)
        return
    lines = [(n, line) for n, line in enumerate(_text(source.path).split("\n"), 1) if line.strip()]
    for number, line in lines[: source.limit]:
        try:
            yield f"{path}:{number}", json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number} is not valid JSON: {error}") from None


def _text(path: str) -> str:
    """Text of a file; only "\\n" ends a line, since texts hold other separators."""
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise FileNotFoundError(f"prompts: {path} does not exist") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None


def _looks_like_an_id(path: str) -> bool:
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path) is not None and not path.endswith(
        (".jsonl", ".json", ".txt")
    )


def _from_hub(source: Source) -> Iterator[tuple[str, Any]]:
    try:
        import datasets
    except ImportError:
        raise ImportError(
            f"{source.path} is no file here; to read it from the Hub: pip install datasets"
        ) from None
    split = source.split if source.limit is None else f"{source.split}[:{source.limit}]"
    try:
        rows = datasets.load_dataset(source.path, source.subset, split=split)
    except Exception as error:  # many kinds: connection, unknown id, subset or split
        raise ValueError(
            f"{source.path} is no file here, and the Hub's data set could not be read (offline, or another name, "
            f"subset or split is needed): {type(error).__name__}: {error}"
        ) from error
    for number, row in enumerate(rows):
        yield f"{source.path}[{number}]", row


# --- one row


def _variants(source: Source, where: str, row: Any, answers: bool) -> tuple[str | None, list[Prompt]]:
    """(reason why the row is left out, or None; its prompts)."""
    messages, tools = _messages(source, where, row), _tools(where, row)
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


def _messages(source: Source, where: str, row: Any) -> list[Mapping[str, Any]]:
    fields = (source.field,) if source.field else FIELDS
    field = next((f for f in fields if isinstance(row, Mapping) and row.get(f) is not None), None)
    if field is None:
        had = f"keys {sorted(row)}" if isinstance(row, Mapping) else type(row).__name__
        raise ValueError(f"{where}: expected an object with {' or '.join(fields)}, got {had}")
    value = row[field]
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, Sequence) or not items:
        raise ValueError(f"{where}: {field} must be a text, or a list of turns or messages, got {value!r}")
    return [_message(where, item) for item in items]


def _message(where: str, item: Any) -> Mapping[str, Any]:
    if isinstance(item, str):
        item = {"role": "user", "content": item}
    if isinstance(item, Mapping) and "from" in item and "value" in item:
        item = {"role": _SHAREGPT.get(item["from"], item["from"]), "content": item["value"]}
    if not isinstance(item, Mapping) or "role" not in item:
        raise ValueError(f"{where}: a turn is a text or a message with role and content, got {item!r}")
    message = {k: v for k, v in item.items() if v is not None}
    content = message.get("content", "" if message.get("tool_calls") else None)
    if not isinstance(content, str):
        raise ValueError(f"{where}: content of a {item['role']} message must be a text, got {content!r}")
    if item["role"] == "user" and not content.strip():
        raise ValueError(f"{where}: an empty user turn")
    return message | {"content": content}


def _tools(where: str, row: Any) -> tuple[Mapping[str, Any], ...] | None:
    tools = row.get("tools") if isinstance(row, Mapping) else None
    tools = json.loads(tools) if isinstance(tools, str) and tools.strip() else tools
    if not tools:
        return None
    if not isinstance(tools, Sequence) or not all(isinstance(t, Mapping) for t in tools):
        raise ValueError(f"{where}: tools must be a list of JSON schemas, got {tools!r}")
    return tuple(tools)


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
