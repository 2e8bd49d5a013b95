"""Writing features to files: shards of whole documents, each whole on the disk before the index names it."""

import errno
import hashlib
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specjax.train import shards
from specjax.train.features import Layout
from specjax.train.records import Rows, Table
from specjax.train.shards import INDEX, Index, Shard
from specjax.train.types import Batch

SHARD_BYTES = 1 << 30


class Writer:
    """Writes documents to a folder, as far as its index does not have them.

    Raises OSError when the disk has not enough room for documents of ``lengths`` (by id), before anything is written,
    ValueError when the folder holds features of something else.
    """

    def __init__(
        self,
        folder: str | Path,
        target: dict[str, str],
        shape: Layout,
        lengths: Sequence[int] | np.ndarray,
        shard_bytes: int = SHARD_BYTES,
    ):
        self.folder, self.table, self._limit = Path(folder), Table(lengths), shard_bytes
        self.index = self._opened(target, shape)
        self.written = self.index.documents
        self._parts: list[tuple[int, np.ndarray, np.ndarray]] = []  # document, records, ids
        left = sum(int(n) for i, n in enumerate(self.table.lengths) if i not in self.written)
        _room(self.folder, left, shape)

    def _opened(self, target: dict[str, str], shape: Layout) -> Index:
        if not (self.folder / INDEX).is_file():
            if self.folder.is_dir() and any(self.folder.iterdir()):
                raise FileExistsError(
                    f"{self.folder} holds something else than features; choose another folder"
                )
            return Index(target, shape, [])
        index = shards.read_index(self.folder)
        index.shards = [shard for shard in index.shards if not shards.flaw(self.folder, shard)]
        wrong = shards.differences(index, target, shape) or (
            ["their parts differ"] if index.shape != shape else []
        )
        if wrong:
            raise ValueError(
                f"{self.folder} holds features already, and {'; '.join(wrong)}: choose another folder"
            )
        return index

    def lacks(self, rows: Rows) -> bool:
        """Whether any document of these rows is still to be written."""
        return any(document not in self.written for row in rows for document in row)

    def add(self, rows: Rows, batch: Batch, records: np.ndarray) -> None:
        """Take the documents of a batch that are not written yet; ``records`` ``[R T W]`` of its tokens."""
        self.table.places(rows, batch)  # checks names and lengths
        doc, tokens = np.asarray(batch.doc), np.asarray(batch.tokens)
        for r, row in enumerate(rows):
            for d, document in enumerate(row):
                at = doc[r] == d
                if document not in self.written and at.any():
                    self._parts.append((document, records[r, at], tokens[r, at]))
                    self.written.add(document)
        if sum(part.nbytes for _, part, _ in self._parts) >= self._limit:
            self.flush()

    def flush(self) -> None:
        """Write what was taken as one shard. OSError when it cannot be; shards written before stay."""
        if not self._parts:
            return
        documents, records, tokens = zip(*self._parts, strict=True)
        arrays = {"features": np.concatenate(records), "tokens": np.concatenate(tokens).astype(np.int32)}
        file = self.folder / f"features-{self._free():05d}.safetensors"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            size, digest = _save(file, arrays)
            shard = Shard(file.name, digest, size, [int(d) for d in documents], [len(t) for t in tokens])
            self.index.shards.append(shard)
            shards.save_index(self.folder / INDEX, self.index)
        except OSError as error:
            raise OSError(
                error.errno or errno.EIO,
                f"{file} could not be written ({error}); the {len(self.index.shards)} shards before it are whole, and "
                "writing again goes on after them",
            ) from error
        self._parts = []

    def _free(self) -> int:
        """A number that no shard has."""
        used = [int(re.findall(r"\d+", shard.file)[0]) for shard in self.index.shards]
        return max(used, default=-1) + 1


def _room(folder: Path, tokens: int, shape: Layout) -> None:
    """OSError unless the disk can take so many tokens more."""
    need = tokens * (shape.bytes_per_token + 4)
    there = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(there).free
    if need > free:
        raise OSError(
            errno.ENOSPC,
            f"features of {tokens:,} tokens x {shape.width} {shape.dtype} take {need / 2**30:.2f} GiB, and {there} has "
            f"{free / 2**30:.2f} GiB free: make room, choose another folder, or compute them online",
        )


def _save(file: Path, arrays: dict[str, np.ndarray]) -> tuple[int, str]:
    """Write a file whole or not at all; its size and checksum."""
    import safetensors
    import safetensors.numpy

    with shards.fresh_file(file) as path:
        try:
            safetensors.numpy.save_file(arrays, path)
        except safetensors.SafetensorError as error:
            raise OSError(errno.EIO, str(error)) from error
        with open(path, "rb") as written:
            digest = hashlib.file_digest(written, "sha256").hexdigest()
    return file.stat().st_size, digest
