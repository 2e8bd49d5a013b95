"""Rows of prompt sets: JSON lines and data sets of the Hub, in the forms that are common."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = tuple[str, Any]  # where it stands, what it holds

#: Keys of a row that may hold a prompt, in the order in which they are looked for.
FIELDS = ("turns", "messages", "conversations", "prompt")
_SHAREGPT = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}


def read(
    path: str, subset: str | None = None, split: str = "train", limit: int | None = None
) -> Iterator[Row]:
    """(where, row) of a file of JSON lines or of a data set of the Hub.

    Raises FileNotFoundError, ValueError naming file and line, ImportError where the Hub's package is missing.
    """
    if not Path(path).is_file() and _looks_like_an_id(path):
        yield from _from_hub(path, subset, split, limit)
        return
    lines = [(n, line) for n, line in enumerate(text(path).split("\n"), 1) if line.strip()]
    for number, line in lines[:limit]:
        try:
            yield f"{path}:{number}", json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}:{number} is not valid JSON: {error}; every line is one object such as "
                '{"turns": ["..."]}'
            ) from None


def text(path: str) -> str:
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


def _from_hub(path: str, subset: str | None, split: str, limit: int | None) -> Iterator[Row]:
    try:
        import datasets
    except ImportError:
        raise ImportError(f"{path} is no file here; to read it from the Hub: pip install datasets") from None
    part = split if limit is None else f"{split}[:{limit}]"
    try:
        rows = datasets.load_dataset(path, subset, split=part)
    except Exception as error:  # many kinds: connection, unknown id, subset or split
        raise ValueError(
            f"{path} is no file here, and the Hub's data set could not be read (offline, or another name, "
            f"subset or split is needed): {type(error).__name__}: {error}"
        ) from error
    for number, row in enumerate(rows):
        yield f"{path}[{number}]", row


def messages(where: str, row: Any, field: str | None = None) -> list[Mapping[str, Any]]:
    """Messages of a row, whatever its form: role and text (and more, as given). ValueError naming where it stands."""
    fields = (field,) if field else FIELDS
    found = next((f for f in fields if isinstance(row, Mapping) and row.get(f) is not None), None)
    if found is None:
        had = f"keys {sorted(row)}" if isinstance(row, Mapping) else type(row).__name__
        raise ValueError(f"{where}: expected an object with {' or '.join(fields)}, got {had}")
    value = row[found]
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, Sequence) or not items:
        raise ValueError(f"{where}: {found} must be a text, or a list of turns or messages, got {value!r}")
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


def tools(where: str, row: Any) -> tuple[Mapping[str, Any], ...] | None:
    """JSON schemas of the tools of a row; None if it has none."""
    found = row.get("tools") if isinstance(row, Mapping) else None
    if isinstance(found, str) and found.strip():
        try:
            found = json.loads(found)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: tools are not valid JSON: {error}") from None
    if not found:
        return None
    if not isinstance(found, Sequence) or not all(isinstance(t, Mapping) for t in found):
        raise ValueError(f"{where}: tools must be a list of JSON schemas, got {found!r}")
    return tuple(found)
