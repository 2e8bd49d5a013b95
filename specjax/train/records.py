"""Features kept by document: where a document's records lie in one flat buffer, and buffers on device and host."""

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.train.features import Layout, flatten, unflatten
from specjax.train.types import Batch, Features
from specjax.types import TapSpec

#: Documents of each packed row, in order: ``rows[r][d]`` is what ``doc == d`` means in row r. Rows at the end of a
#: batch that are not named are empty.
Rows = Sequence[Sequence[int]]

#: Shares of what is free now that a buffer may take.
DEVICE_SHARE, HOST_SHARE = 0.6, 0.5


def documents(rows: Rows, batch: Batch, count: int) -> Int[np.ndarray, "R T"]:
    """Document of every token, -1 in padding. ValueError when ``rows`` do not fit the batch or name a document beyond
    ``count``."""
    doc = np.asarray(batch.doc)
    if len(rows) > len(doc):
        raise ValueError(f"documents of {len(rows)} rows were named for a batch of {len(doc)} rows")
    named = np.full((len(doc), max(map(len, rows), default=0) + 1), -1, np.int64)
    for r, ids in enumerate(rows):
        named[r, : len(ids)] = ids
    found = np.take_along_axis(
        named, np.minimum(doc, named.shape[1] - 1), 1
    )  # -1 finds the last, which is -1
    unknown = (doc >= 0) & ((found < 0) | (found >= count))
    if unknown.any():
        r, t = np.argwhere(unknown)[0]
        raise ValueError(
            f"row {r} has a document {doc[r, t]}, named {found[r, t]}; known are 0 to {count - 1}"
        )
    return found


def other_document(document: int, now: np.ndarray, then: np.ndarray) -> ValueError:
    """The error of a document whose ids are not those its features were computed of."""
    said = f"document {document} has {len(now)} tokens in this batch and {len(then)} with features"
    if len(now) == len(then):
        at = int(np.flatnonzero(now != then)[0])
        said = f"document {document} has token {now[at]} at position {at}, and {then[at]} with features"
    return ValueError(f"{said}. Features belong to one data set, cut to one length: compute them again")


class Table:
    """Documents 0 to n - 1 one after the other in a flat buffer; their ids tell whether a batch has the same ones."""

    def __init__(self, lengths: Sequence[int] | np.ndarray):
        self.lengths = np.asarray(lengths, np.int64)
        self.size = int(self.lengths.sum())  # tokens in all
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.tokens = np.full(self.size, -1, np.int32)
        self.held = np.zeros(len(self.lengths), bool)

    def places(self, rows: Rows, batch: Batch) -> tuple[Int[np.ndarray, "R T"], Int[np.ndarray, "R T"]]:
        """Document of every token and index of its record, both -1 in padding.

        ValueError for a document of another length than the table's, or held with other token ids.
        """
        found = documents(rows, batch, len(self.lengths))
        doc, pos, tokens = np.asarray(batch.doc), np.asarray(batch.pos), np.asarray(batch.tokens)
        wrong = self._other_lengths(doc, found)
        places = np.where(doc >= 0, np.minimum(self.starts[found] + pos, self.size - 1), -1)
        wrong |= (doc >= 0) & self.held[found] & (self.tokens[places] != tokens)
        if wrong.any():
            r, t = np.argwhere(wrong)[0]
            document = found[r, t]
            start, length = self.starts[document], self.lengths[document]
            raise other_document(
                document, tokens[r, doc[r] == doc[r, t]], self.tokens[start : start + length]
            )
        return found, places

    def _other_lengths(self, doc: np.ndarray, found: np.ndarray) -> np.ndarray:
        """Tokens ``[R T]`` of documents that are longer or shorter than the table says."""
        key = np.arange(len(doc))[:, None] * (doc.max(initial=0) + 2) + doc
        _, inverse, count = np.unique(key, return_inverse=True, return_counts=True)
        return (doc >= 0) & (count[inverse.reshape(doc.shape)] != self.lengths[found])

    def new(self, found: np.ndarray, places: np.ndarray) -> np.ndarray:
        """``places`` of the documents that are not held, each once; -1 elsewhere."""
        once = np.zeros(places.shape, bool)
        once.reshape(-1)[np.unique(places, return_index=True)[1]] = True
        return np.where((places >= 0) & ~self.held[found] & once, places, -1)

    def note(self, found: np.ndarray, places: np.ndarray, tokens: np.ndarray) -> None:
        """The documents at ``places`` are held, with these ids."""
        real = places >= 0
        self.tokens[places[real]] = tokens[real]
        self.held[found[real]] = True


class DeviceRecords:
    """Records on the default device."""

    where = "on the device"

    def __init__(self, tokens: int, shape: Layout):
        self.shape, self.size = shape, tokens
        self._buffer = jnp.zeros((tokens, shape.width), shape.dtype)

    def put(self, places: Int[np.ndarray, "R T"], features: Features) -> None:
        """Keep the records of tokens whose place is not negative."""
        self._buffer = _put(self._buffer, self._inside(places), features, self.shape)

    def get(self, places: Int[np.ndarray, "R T"], batch: Batch, needs: TapSpec) -> Features:
        """Records at ``places``, zero where negative."""
        return _get(self._buffer, self._inside(places), batch.doc, batch.pos, self.shape, needs)

    def _inside(self, places: np.ndarray) -> np.ndarray:
        """Negative indices would count from the end; those beyond it are dropped and read as zero."""
        return np.where(places < 0, self.size, places).astype(np.int32 if self.size < 2**31 else np.int64)


@partial(jax.jit, static_argnames="shape", donate_argnums=0)
def _put(buffer: Float[Array, "N W"], places: Int[Array, "R T"], features: Features, shape: Layout):
    return buffer.at[places].set(flatten(features, shape), mode="drop")


@partial(jax.jit, static_argnames=("shape", "needs"))
def _get(buffer, places, doc, pos, shape: Layout, needs: TapSpec) -> Features:
    records = buffer.at[places].get(mode="fill", fill_value=0)
    return unflatten(records, shape, needs, doc, pos)


class HostRecords:
    """Records in the host's memory; batches travel to the device, placed as ``sharding`` says."""

    where = "in host memory"

    def __init__(self, tokens: int, shape: Layout, sharding: Any = None):
        self.shape, self._sharding = shape, sharding
        self._buffer = np.empty((tokens, shape.width), jnp.dtype(shape.dtype))
        self._coming: tuple[np.ndarray, Array] | None = None

    def put(self, places: Int[np.ndarray, "R T"], features: Features) -> None:
        """Keep the records of tokens whose place is not negative. They are fetched while the next batch runs."""
        self._arrive()
        records = joined(features, self.shape)
        records.copy_to_host_async()
        self._coming = (places, records)

    def get(self, places: Int[np.ndarray, "R T"], batch: Batch, needs: TapSpec) -> Features:
        """Records at ``places``, zero where negative."""
        self._arrive()
        records = np.zeros((*places.shape, self.shape.width), self._buffer.dtype)
        for row, at in zip(records, places, strict=True):
            row[at >= 0] = self._buffer[at[at >= 0]]
        return split(records, batch, self.shape, needs, self._sharding)

    def _arrive(self) -> None:
        if self._coming is not None:
            places, records = self._coming
            self._buffer[places[places >= 0]] = np.asarray(records)[places >= 0]
            self._coming = None


@partial(jax.jit, static_argnames="shape")
def joined(features: Features, shape: Layout) -> Float[Array, "R T W"]:
    """Records of all tokens, made on the device."""
    return flatten(features, shape)


def split(records: np.ndarray, batch: Batch, shape: Layout, needs: TapSpec, sharding: Any = None) -> Features:
    """Features on the device from records on the host."""
    return _split(jax.device_put(records, sharding), batch.doc, batch.pos, shape, needs)


@partial(jax.jit, static_argnames=("shape", "needs"))
def _split(records, doc, pos, shape: Layout, needs: TapSpec) -> Features:
    return unflatten(records, shape, needs, doc, pos)


def device_room() -> int:
    """Bytes a buffer may take on the default device; 0 when the back end does not say what is free (CPU)."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return int(DEVICE_SHARE * max(0, stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)))


def host_room() -> int:
    """Bytes a buffer may take in the host's memory; 0 when the system does not say what is free."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        try:
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (ValueError, OSError, AttributeError):
            return 0
    return int(HOST_SHARE * free)
