"""Texts to train on, as files: a folder of whole shards, each with its checksum, and what they were made with.

``texts.json`` says which target, tokenizer, template and sampling made them and how much there is;
``texts-<n>.safetensors`` hold documents. A shard appears under its name when it is whole, so writing that was stopped
goes on behind the last one, and what is unfinished is never read.
"""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt32

from specjax.train.shards import fresh_file

META, FORMAT = "texts.json", 1
_SHARD, _SUFFIX = "texts-", ".safetensors"


@dataclasses.dataclass(frozen=True)
class Document:
    """One training text.

    ``spans``: (first, one past the last) token of each answer; ``ended``: the answer came to its end by itself.
    ``prompt`` and ``group``: see :class:`specjax.train.prompts.Prompt`. ``part``: a conversation whose answers do not
    fit one text (templates that drop earlier thoughts) is several.
    """

    ids: UInt32[np.ndarray, " n"]
    spans: tuple[tuple[int, int], ...]
    ended: tuple[bool, ...]
    source: str
    prompt: int
    group: int
    sample: int = 0
    part: int = 0


def read_meta(folder: Path) -> dict[str, Any]:
    """What a folder's texts were made with. FileNotFoundError or ValueError naming the file."""
    path = folder / META
    try:
        meta = json.loads(path.read_text("utf-8"))
        if meta["format"] != FORMAT:
            raise ValueError(f"format {meta['format']} instead of {FORMAT}")
        for key in ("complete", "target", "tokenizer", "sampling", "sources"):
            meta[key]
    except FileNotFoundError:
        raise FileNotFoundError(f"{folder} holds no texts: {path} does not exist") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged or of another kind: {error!r}") from None
    return meta


def differences(before: Any, now: Any, keys: Sequence[str]) -> list[str]:
    """What two metas say differently under some keys, leaf by leaf."""
    found = []
    for key in keys:
        a, b = before.get(key), now.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += [f"{key}.{d}" for d in differences(a, b, sorted(a.keys() | b.keys()))]
        elif a != b:
            found.append(f"{key} is {a!r} there and {b!r} here")
    return found


def shard_files(folder: Path) -> list[Path]:
    """Whole shards, in the order they were written."""
    return sorted(folder.glob(f"{_SHARD}*{_SUFFIX}"))


def read_shard(path: Path) -> dict[str, np.ndarray]:
    """Arrays of a shard. ValueError naming the file when it is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            told = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}. {_REPAIR}") from None
    if told.get("sha256") != digest_of(arrays):
        raise ValueError(
            f"{path} is damaged: its contents do not have the checksum they were written with. {_REPAIR}"
        )
    return arrays


_REPAIR = "Delete the file and prepare again: only what was in it is made anew"


def digest_of(arrays: Mapping[Any, np.ndarray]) -> str:
    """SHA-256 of named arrays."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        x = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {x.dtype} {x.shape}".encode())
        digest.update(x.tobytes())
    return digest.hexdigest()


class Writer:
    """The one process that adds to a folder. Use as a context manager."""

    def __init__(self, folder: str | Path, meta: Mapping[str, Any], same: Sequence[str]):
        """``same``: keys of ``meta`` in which the folder must agree if it holds texts.

        Raises ValueError naming every difference, or when another process is at it.
        """
        self.folder, self.meta, self._stack = Path(folder), dict(meta), contextlib.ExitStack()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._stack.enter_context(_locked(self.folder))
        try:
            self._claim(same)
        except BaseException:
            self._stack.close()
            raise

    def _claim(self, same: Sequence[str]) -> None:
        if (self.folder / META).exists():
            before = read_meta(self.folder)
            if found := differences(before, self.meta, same):
                raise ValueError(
                    f"{self.folder} holds texts made otherwise: {'; '.join(found)}. They are continued with the same "
                    "settings only; choose another folder"
                )
            self.meta["sources"] = list(dict.fromkeys([*before["sources"], *self.meta["sources"]]))
            self.meta["runs"] = before.get("runs", [])
        elif shard_files(self.folder):
            raise ValueError(f"{self.folder} holds texts without {META}: choose another folder")
        for stale in self.folder.glob(f"{_SHARD}*.tmp"):
            stale.unlink()
        self.save_meta(complete=False)
        numbers = [int(path.name[len(_SHARD) : -len(_SUFFIX)]) for path in shard_files(self.folder)]
        self._next = max(numbers, default=-1) + 1

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def done(self) -> set[tuple[int, int]]:
        """(prompt, sample) of every conversation that is there, whole. Checksums are compared."""
        found: set[tuple[int, int]] = set()
        for path in shard_files(self.folder):
            arrays = read_shard(path)
            found |= set(zip(arrays["prompt"].tolist(), arrays["sample"].tolist(), strict=True))
        return found

    def write(self, documents: Sequence[Document]) -> None:
        """One more shard; a conversation's documents belong in one. OSError (a full disk ...) leaves the others."""
        import safetensors
        import safetensors.numpy

        if not documents:
            return
        sources = {name: i for i, name in enumerate(self.meta["sources"])}
        spans = [span for d in documents for span in d.spans]
        column = lambda name, kind: np.array([getattr(d, name) for d in documents], kind)  # noqa: E731
        arrays = {
            "ids": np.concatenate([d.ids for d in documents]).astype(np.uint32),
            "lengths": np.array([len(d.ids) for d in documents], np.uint32),
            "spans": np.array(spans, np.uint32).reshape(-1, 2),
            "answers": np.array([len(d.spans) for d in documents], np.uint32),
            "ended": np.array([e for d in documents for e in d.ended], bool),
            "source": np.array([sources[d.source] for d in documents], np.uint32),
            "prompt": column("prompt", np.uint64),
            "group": column("group", np.uint64),
            "sample": column("sample", np.uint32),
            "part": column("part", np.uint32),
        }
        path = self.folder / f"{_SHARD}{self._next:06d}{_SUFFIX}"
        with fresh_file(path) as fresh:
            try:
                safetensors.numpy.save_file(arrays, fresh, metadata={"sha256": digest_of(arrays)})
            except safetensors.SafetensorError as error:  # what it makes of a full disk
                raise OSError(
                    errno.EIO,
                    f"{error}; {self._next} shards before it are whole, and work goes on from them",
                    str(path),
                ) from error
        self._next += 1

    def save_meta(self, **changes: Any) -> None:
        """Bring ``texts.json`` up to date."""
        self.meta |= changes
        with fresh_file(self.folder / META) as fresh:
            fresh.write_text(json.dumps(self.meta, indent=1), "utf-8")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Held by one process at a time; a process that dies lets go."""
    handle = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder} is being written by another process") from None
        yield
    finally:
        os.close(handle)
