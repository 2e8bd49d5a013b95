"""Where features come from during training: computed for every batch, read from files, or kept after the first epoch.

All three give the same numbers: one compiled function computes them, and what is kept is kept as it was computed.
A row has the same bits in any batch; a document packed otherwise differs by the rounding of float32 sums in another
order. Where a run must be repeated to the bit, whether features are kept or not, rows stay as they are and only their
order changes between epochs.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from specjax.train import features, records, shards
from specjax.train.features import Layout
from specjax.train.records import DeviceRecords, HostRecords, Rows, Table
from specjax.train.shard_writer import SHARD_BYTES, Writer
from specjax.train.types import Batch, Features, Source
from specjax.types import Pair, TapSpec


@dataclasses.dataclass(frozen=True)
class Extract:
    """Which features: selects a compiled function, and is the function of (target weights, batch) inside a step.

    ``dtype``: name of the features' type.
    """

    pair: Pair
    needs: TapSpec
    dtype: str = "bfloat16"

    def __call__(self, target: Any, batch: Batch) -> Features:
        """Traced: :func:`specjax.train.features.extract`."""
        return features.extract(target, self.pair, batch, self.needs, self.dtype)

    def layout(self, target: Any) -> Layout:
        """How they are kept."""
        return features.layout(target, self.pair, self.needs, self.dtype)


class FeatureSource(Protocol):
    """Gives the features of batches."""

    plan: str  # what it does, in words, with sizes

    def get(self, rows: Rows, batch: Batch) -> Features:
        """Features of a batch, on the device. ``rows``: which documents each row holds, in order.

        ``batch`` may have NumPy arrays, which are read here without waiting for the device. ValueError where the
        documents are not those that features belong to.
        """
        ...


class Online:
    """Computed for every batch. ``sharding``: where batches are put; None: they stay where they are."""

    def __init__(self, extract: Extract, target: Any, sharding: Any = None):
        self.extract, self.target, self._sharding = extract, target, sharding
        self.plan = "features are computed for every batch"

    def get(self, rows: Rows, batch: Batch) -> Features:
        """Runs the target; ``rows`` may be empty."""
        del rows
        features.check(self.extract.pair, batch)
        if self._sharding is None:
            return _run(self.extract, self.target, batch)
        placed = jax.device_put(batch, self._sharding)
        return _run(self.extract, self.target, placed, getattr(self._sharding, "mesh", None))


@functools.partial(jax.jit, static_argnums=(0, 3))
def _run(extract: Extract, target: Any, batch: Batch, mesh: jax.sharding.Mesh | None = None) -> Features:
    return features.spread(lambda batch, target: extract(target, batch), mesh)(batch, target)


class Offline:
    """Read from a folder that :func:`write` made. ValueError when it is of another target, type or fewer parts."""

    def __init__(self, extract: Extract, target: Any, folder: str | Path, sharding: Any = None):
        self.extract, self._sharding, self._reader = extract, sharding, shards.Reader(folder)
        index = self._reader.index
        wrong = shards.differences(index, shards.identity(target, extract.pair), extract.layout(target))
        if wrong:
            raise ValueError(f"the features in {folder} cannot be used: {'; '.join(wrong)}")
        self._shape = index.shape
        self.plan = f"features of {self._reader.size:,} tokens are read from {folder}"

    def get(self, rows: Rows, batch: Batch) -> Features:
        """Reads the documents; their token ids are compared with the batch's."""
        doc, tokens = np.asarray(batch.doc), np.asarray(batch.tokens)
        records.documents(rows, batch, self._reader.count)
        out = np.zeros((*doc.shape, self._shape.width), jnp.dtype(self._shape.dtype))
        for r, row in enumerate(rows):
            for d, document in enumerate(row):
                at = doc[r] == d
                kept, ids = self._reader.get(int(document))
                if not np.array_equal(ids, tokens[r, at]):
                    raise records.other_document(document, tokens[r, at], ids)
                out[r, at] = kept
        return records.split(out, batch, self._shape, self.extract.needs, self._sharding)


class Hybrid:
    """Taken from another source in the first epoch and kept by document; from then on read from there."""

    def __init__(self, inner: FeatureSource, needs: TapSpec, table: Table, kept: DeviceRecords | HostRecords):
        self._inner, self._needs, self._table, self._kept = inner, needs, table, kept
        self.plan = f"{inner.plan} in the first epoch and kept {kept.where}: {_sized(table.size, kept.shape)}"

    def get(self, rows: Rows, batch: Batch) -> Features:
        """From what is kept if every document of the batch is, else from the other source."""
        found, places = self._table.places(rows, batch)
        if self._table.held[found[found >= 0]].all():
            return self._kept.get(places, batch, self._needs)
        out = self._inner.get(rows, batch)
        new = self._table.new(found, places)
        self._kept.put(new, out)
        self._table.note(found, new, np.asarray(batch.tokens))
        return out


def open_source(
    kind: Source,
    extract: Extract,
    target: Any,
    lengths: Sequence[int] | np.ndarray,
    *,
    folder: str | Path | None = None,
    device_bytes: int | None = None,
    host_bytes: int | None = None,
    sharding: Any = None,
) -> FeatureSource:
    """The source of a training run over documents 0 to n - 1 of ``lengths`` tokens, as they are packed.

    "hybrid" keeps features on the device when they fit into ``device_bytes``, else on the host within ``host_bytes``,
    else nowhere (None: a share of what is free now); it fills itself from ``folder`` if one is given. "offline" reads
    ``folder``. ``sharding``: where batches lie when that is not one device; then nothing is kept on the device.
    """
    if kind not in ("online", "offline", "hybrid"):
        raise ValueError(f"features come 'online', 'offline' or 'hybrid', not {kind!r}")
    if kind == "offline" and folder is None:
        raise ValueError(
            "source='offline' reads features from files: give their folder, or use 'hybrid' or 'online'"
        )
    inner: FeatureSource = (
        Online(extract, target, sharding)
        if folder is None or kind == "online"
        else Offline(extract, target, folder, sharding)
    )
    if kind != "hybrid":
        return inner
    shape, table = extract.layout(target), Table(lengths)
    need = table.size * shape.bytes_per_token
    many = sharding is not None and len(sharding.device_set) > 1
    device = 0 if many else records.device_room() if device_bytes is None else device_bytes
    host = records.host_room() if host_bytes is None else host_bytes
    if need <= device:
        return Hybrid(inner, extract.needs, table, DeviceRecords(table.size, shape))
    if need <= host:
        return Hybrid(inner, extract.needs, table, HostRecords(table.size, shape, sharding))
    inner.plan += (
        f"; they are not kept: {_sized(table.size, shape)} do not fit into {_gib(device)} of device memory or "
        f"{_gib(host)} of host memory"
    )
    return inner


def write(
    extract: Extract,
    target: Any,
    folder: str | Path,
    batches: Iterable[tuple[Rows, Batch]],
    lengths: Sequence[int] | np.ndarray,
    *,
    shard_bytes: int = SHARD_BYTES,
    told: Callable[[int], None] | None = None,
) -> None:
    """Save the features of every document of ``batches``; what a folder has already is left as it is.

    ``lengths``: of documents 0 to n - 1 as they are packed. ``told`` is called with the number of documents written
    so far. Raises OSError before anything is computed when the disk has not enough room, or when it fills up all the
    same; shards written until then are kept, and calling again goes on after them.
    """
    shape = extract.layout(target)
    writer = Writer(folder, shards.identity(target, extract.pair), shape, lengths, shard_bytes)
    waiting: tuple[Rows, Batch, jax.Array] | None = None
    for rows, batch in batches:
        if not writer.lacks(rows):
            continue
        features.check(extract.pair, batch)
        made = rows, batch, records.joined(_run(extract, target, batch), shape)
        if waiting is not None:  # written while the device works on the next
            writer.add(waiting[0], waiting[1], np.asarray(waiting[2]))
        waiting = made
        if told is not None:
            told(len(writer.written))
    if waiting is not None:
        writer.add(waiting[0], waiting[1], np.asarray(waiting[2]))
    writer.flush()
    if told is not None:
        told(len(writer.written))


def _sized(tokens: int, shape: Layout) -> str:
    return f"{tokens:,} tokens x {shape.width} {shape.dtype} = {_gib(tokens * shape.bytes_per_token)}"


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
