"""Prompts to measure with: the package's own, JSON lines, or data sets of the Hugging Face Hub by short name.

A row's first user turn is asked, with what its file has before it (a system message). Only a line feed ends a line.
"""

import dataclasses
import difflib
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax.config import positive
from specjax.train import rows

BUILTIN = Path(__file__).with_name("builtin.jsonl")
#: What is asked beside a question whose answer is a number or a formula.
BOXED = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
SOLVE = (
    "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```"
)


@dataclasses.dataclass(frozen=True)
class Known:
    """Where a data set lies on the Hub, which of its columns is the question, and how it is asked."""

    hub: str
    subset: str | None
    split: str
    field: str
    template: str = "{}"


KNOWN = {
    "gsm8k": Known("openai/gsm8k", "main", "test", "question", BOXED),
    "math500": Known("HuggingFaceH4/MATH-500", None, "test", "problem", BOXED),
    "humaneval": Known("openai/openai_humaneval", None, "test", "prompt", SOLVE),
    "mbpp": Known("google-research-datasets/mbpp", "full", "test", "text"),
}


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A named list of prompts, each a text or chat messages; ``source``: where they come from."""

    name: str
    prompts: tuple[Any, ...]
    source: str
    left_out: int = 0  # longer prompts

    @property
    def checksum(self) -> str:
        """Digest of the prompts' texts, in order."""
        text = json.dumps(self.prompts, sort_keys=True, ensure_ascii=False, default=str)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def dataset(given: Any, limit: int | None = None) -> Dataset:
    """Prompts from what a user names.

    Args:
        given: ``"builtin"`` (or one kind of it: ``"builtin:code"``, ``maths``, ``chat``, ``edit``); ``"gsm8k"``,
            ``"math500"``, ``"humaneval"``, ``"mbpp"`` (read from the Hub); a file of JSON lines with ``turns``,
            ``messages`` or ``prompt``; ``"NAME=FILE"``, which gives it a name; a :class:`Dataset`; or prompts as
            :func:`specjax.decode` takes them.
        limit: the first so many prompts.

    Raises:
        ValueError: unknown name, no prompts, a line that is none (with its number), a Hub that cannot be reached.
        FileNotFoundError: no such file.
    """
    if limit is not None:
        positive("limit", limit)
    if isinstance(given, Dataset):
        return dataclasses.replace(given, prompts=given.prompts[:limit])
    if isinstance(given, Path):
        return _from_file(given.stem, given, limit)
    if not isinstance(given, str):
        return _given(given, limit)
    name, equals, path = given.partition("=")
    if equals and name and "/" not in name:
        return _from_file(name, Path(path), limit)
    if given in KNOWN:
        return _from_hub(given, limit)
    if name.split(":")[0] == "builtin":
        return _builtin(given, limit)
    if given.endswith(".jsonl") or Path(given).is_file():
        return _from_file(Path(given).stem, Path(given), limit)
    raise ValueError(_unknown(given))


def not_longer(data: Dataset, most: int | None, lengths: Sequence[int]) -> Dataset:
    """Without prompts of more than ``most`` tokens, of which ``lengths`` has one number per prompt."""
    if most is None:
        return data
    kept = tuple(p for p, n in zip(data.prompts, lengths, strict=True) if n <= most)
    if not kept:
        raise ValueError(
            f"every prompt of data set {data.name!r} is longer than {most} tokens: from {min(lengths)} on"
        )
    return dataclasses.replace(data, prompts=kept, left_out=len(lengths) - len(kept))


def _unknown(given: str) -> str:
    names = ["builtin", *KNOWN]
    near = difflib.get_close_matches(given, names, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return (
        f"unknown data set {given!r}; {hint}known: {', '.join(names)}, or a file of JSON lines (NAME=FILE.jsonl) with "
        'an object such as {"turns": ["..."]} per line'
    )


def _from_file(name: str, path: Path, limit: int | None) -> Dataset:
    if not path.is_file():
        raise FileNotFoundError(f"data set {name!r}: {path} does not exist")
    found = [_asked(where, row) for where, row in rows.read(str(path), limit=limit)]
    if not found:
        raise ValueError(f"data set {name!r}: {path} holds no prompts")
    return Dataset(name, tuple(found), str(path))


def _asked(where: str, row: Any) -> Any:
    """What is asked of a row: a text, or the messages up to its first user turn."""
    messages = rows.messages(where, row)
    first = next((i for i, m in enumerate(messages) if m["role"] == "user"), None)
    if first is None:
        raise ValueError(f"{where}: no user turn")
    return messages[0]["content"] if first == 0 else [dict(m) for m in messages[: first + 1]]


def _from_hub(name: str, limit: int | None) -> Dataset:
    known, found = KNOWN[name], []
    try:
        for where, row in rows.read(known.hub, known.subset, known.split, limit):
            if not isinstance(row.get(known.field), str):
                raise ValueError(f"{where}: expected a text in {known.field!r}, got {sorted(row)}")
            found.append(known.template.format(row[known.field]))
    except (ValueError, ImportError) as error:
        raise type(error)(f"data set {name!r}: {error}. Without the Hub: {name}=FILE.jsonl") from error
    if not found:
        raise ValueError(f"data set {name!r}: {known.hub} gave no rows")
    return Dataset(name, tuple(found), f"{known.hub} {known.subset or ''} {known.split}".replace("  ", " "))


def _builtin(given: str, limit: int | None) -> Dataset:
    """The package's own prompts; of a limited number as many of each kind, as far as that goes."""
    listed = [json.loads(line) for line in BUILTIN.read_text("utf-8").split("\n") if line]
    kinds, wanted = list(dict.fromkeys(row["kind"] for row in listed)), given.partition(":")[2]
    if ":" in given and wanted not in kinds:
        raise ValueError(f"builtin prompts are of kind {', '.join(kinds)}; got {wanted!r}")
    by_kind = [
        [row["turns"][0] for row in listed if row["kind"] == kind] for kind in kinds if wanted in ("", kind)
    ]
    mixed = [text for turn in zip(*by_kind, strict=True) for text in turn]
    return Dataset(given, tuple(mixed[:limit]), "specjax")


def _given(prompts: Any, limit: int | None) -> Dataset:
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes) or not len(prompts):
        raise ValueError(
            f"a data set is a name, a file or a list of prompts, got {type(prompts).__name__} {prompts!r}"
        )
    if isinstance(prompts[0], Mapping | int):
        raise ValueError("a data set is a list of prompts: put a single one into a list")
    return Dataset("prompts", tuple(prompts[:limit]), "given")
