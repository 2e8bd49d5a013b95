"""Features in files: shards of whole documents with an index, written once and read in any packing.

A folder holds ``features.json`` (what target, which parts, which documents, checksums) and ``features-<n>.safetensors``
(``features [tokens width]``, ``tokens [tokens]``). A shard is in the index only when it is whole on the disk; writing
that was stopped goes on where the index ends.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.train.features import Field, Layout
from specjax.types import Pair

INDEX, FORMAT = "features.json", 1
_REPAIR = ". Delete that file and write features again: only its documents are computed anew"
_SAMPLES = 64  # numbers of each weight that a target is known by


@dataclasses.dataclass
class Shard:
    """One file. ``lengths`` are those of ``documents``, which lie in it in this order."""

    file: str
    sha256: str
    size: int  # bytes
    documents: list[int]
    lengths: list[int]


@dataclasses.dataclass
class Index:
    """What a folder holds."""

    target: dict[str, str]
    shape: Layout
    shards: list[Shard]

    @property
    def documents(self) -> set[int]:
        return {d for shard in self.shards for d in shard.documents}


def identity(target: Any, pair: Pair) -> dict[str, str]:
    """What a target is known by: family, config, and a digest of some numbers of every weight."""
    digest = hashlib.sha256()
    leaves, _ = jax.tree_util.tree_flatten_with_path(target)
    samples = [x.reshape(-1)[:: max(1, x.size // _SAMPLES)] for _, x in leaves]
    for (path, x), sample in zip(leaves, jax.device_get(samples), strict=True):
        digest.update(f"{jax.tree_util.keystr(path)} {x.shape} {x.dtype}".encode())
        digest.update(np.ascontiguousarray(sample).tobytes())
    return {"family": pair.family, "config": repr(pair.target_cfg), "weights": digest.hexdigest()}


def read_index(folder: str | Path) -> Index:
    """Index of a folder; errors name the file. Shards are not looked at."""
    path = Path(folder) / INDEX
    try:
        read = json.loads(path.read_text("utf-8"))
        if read["format"] != FORMAT:
            raise ValueError(f"format {read['format']} instead of {FORMAT}")
        shape = Layout(tuple(Field(*f) for f in read["fields"]), read["dtype"])
        index = Index(dict(read["target"]), shape, [Shard(**shard) for shard in read["shards"]])
    except FileNotFoundError:
        raise FileNotFoundError(f"{folder} holds no features: {path} does not exist") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged or no index of features: {error!r}") from None
    return index


def flaw(folder: Path, shard: Shard) -> str | None:
    """What is wrong with a shard's file at first sight; None if it is there in full size."""
    file = folder / shard.file
    if not file.is_file():
        return f"{file} does not exist"
    size = file.stat().st_size
    return None if size == shard.size else f"{file} is damaged: it has {size} bytes instead of {shard.size}"


def differences(index: Index, target: dict[str, str], shape: Layout) -> list[str]:
    """Why features of a folder are not those of this target and layout, in words; empty if they serve."""
    found = [
        f"they are of another target: its {key} differs"
        for key in target
        if index.target.get(key) != target[key]
    ]
    if index.shape.dtype != shape.dtype:
        found.append(f"they are {index.shape.dtype}, and {shape.dtype} is asked for")
    held = {(f.name, f.width, f.heads) for f in index.shape.fields}
    if lacking := [f.name for f in shape.fields if (f.name, f.width, f.heads) not in held]:
        found.append(
            f"{', '.join(lacking)} is not among them; they have {', '.join(f.name for f in index.shape.fields)}"
        )
    return found


def save_index(path: Path, index: Index) -> None:
    """Write an index, whole or not at all."""
    text = {
        "format": FORMAT,
        "target": index.target,
        "dtype": index.shape.dtype,
        "fields": [list(f) for f in index.shape.fields],
        "shards": [dataclasses.asdict(shard) for shard in index.shards],
    }
    with fresh_file(path) as fresh:
        fresh.write_text(json.dumps(text), "utf-8")


@contextlib.contextmanager
def fresh_file(path: Path):
    """A path to write to, which takes the place of ``path`` when it is whole on the disk and vanishes otherwise."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        yield fresh
        with open(fresh, "rb+") as written:
            os.fsync(written.fileno())
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


class Reader:
    """Records of documents from a folder. A shard's checksum is compared when it is first read."""

    def __init__(self, folder: str | Path):
        self.folder, self.index = Path(folder), read_index(folder)
        flaws = [found for shard in self.index.shards if (found := flaw(self.folder, shard))]
        if flaws:
            raise ValueError(f"{flaws[0]}{_REPAIR}")
        self._where: dict[int, tuple[int, int, int]] = {}  # document -> shard, start, length
        for s, shard in enumerate(self.index.shards):
            starts = np.cumsum([0, *shard.lengths])
            for document, start, length in zip(shard.documents, starts, shard.lengths, strict=False):
                self._where[document] = (s, int(start), length)
        self._open: dict[int, tuple[Any, Any]] = {}

    @property
    def count(self) -> int:
        """One more than the highest document."""
        return max(self._where, default=-1) + 1

    @property
    def size(self) -> int:
        """Tokens in all."""
        return sum(length for _, _, length in self._where.values())

    def get(self, document: int) -> tuple[np.ndarray, np.ndarray]:
        """Records ``[n W]`` and ids ``[n]``. ValueError naming a document that is not there, or a damaged shard."""
        if document not in self._where:
            raise ValueError(
                f"features of document {document} are not in {self.folder}, which has {len(self._where)} documents: "
                "write the rest (it goes on where it was stopped), or compute them online"
            )
        shard, start, length = self._where[document]
        records, tokens = self._file(shard)
        return records[start : start + length], tokens[start : start + length]

    def _file(self, number: int) -> tuple[Any, Any]:
        if number not in self._open:
            shard = self.index.shards[number]
            path = self.folder / shard.file
            _verify(path, shard.sha256)
            self._open[number] = _slices(path)
        return self._open[number]


def _verify(path: Path, sha256: str) -> None:
    with open(path, "rb") as opened:
        if hashlib.file_digest(opened, "sha256").hexdigest() != sha256:
            raise ValueError(f"{path} is damaged: its checksum is not the one in {INDEX}{_REPAIR}")


def _slices(path: Path) -> tuple[Any, Any]:
    """Features and ids of a shard; slices of either are read when they are taken."""
    import safetensors

    try:
        file = safetensors.safe_open(str(path), framework="numpy")
        return file.get_slice("features"), file.get_slice("tokens")
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged, or no shard of features: {error}") from None
