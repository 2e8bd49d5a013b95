"""Texts as batches: what a training run reads, from any step on."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from specjax.train import packing
from specjax.train.store import Store
from specjax.train.types import Batch, Recipe

Rows = list[list[int]]  # documents of each row of a batch, by their index in the store
BUCKETS = 6


@dataclasses.dataclass(frozen=True)
class Packed:
    """Rows of documents and how an epoch brings them. ``widths``: tokens of each row; one width unless documents stand
    alone. A batch has ``rows`` rows of one width; the last of a width may have empty ones."""

    documents: Rows
    widths: Int[np.ndarray, " n"]
    rows: int
    seed: int

    @functools.cached_property
    def count(self) -> int:
        """Batches per epoch, the same for all."""
        return sum(-(-int((self.widths == w).sum()) // self.rows) for w in set(self.widths.tolist()))

    def order(self, epoch: int | None) -> list[tuple[int, list[int]]]:
        """(width, rows) of every batch of an epoch, shuffled; None: in order."""
        rng = np.random.default_rng([self.seed, 3, epoch or 0])
        found = []
        for width in sorted(set(self.widths.tolist())):
            mine = np.flatnonzero(self.widths == width)
            mine = mine if epoch is None else rng.permutation(mine)
            found += [(width, mine[i : i + self.rows].tolist()) for i in range(0, len(mine), self.rows)]
        return found if epoch is None else [found[i] for i in rng.permutation(len(found))]


class TextData:
    """A store split, packed and batched for a recipe. Positions are one number: batches since the beginning.

    ``pack``: several documents per row; False for targets with recurrent layers, whose rows then have one of at most
    ``BUCKETS`` lengths. ``validation``: share of the prompts that is held out; of their greedy texts (all, where there
    are none) at most ``most`` are evaluated. ``process``: (index, count): this process's share of every batch's rows.

    ``lengths``: tokens used of every document of the store. ``fit``: what was lost to the row length. ``greedy``: the
    held-out texts are the target's greedy ones, so that acceptance measured on them is that of decoding.
    """

    def __init__(
        self,
        store: Store,
        recipe: Recipe,
        *,
        pack: bool = True,
        validation: float = 0.02,
        most: int | None = 512,
        process: tuple[int, int] = (0, 1),
    ):
        index, processes = process
        if not 0 <= index < processes or recipe.rows % processes:
            raise ValueError(
                f"{recipe.rows} rows of a batch cannot be shared by processes ({index} of {processes}): the number of "
                "processes must divide them"
            )
        self.store, self.recipe, self._pack, self._process = store, recipe, pack, process
        self.fit = packing.fit(store, recipe.length)
        self.lengths = self.fit.lengths
        training, held = packing.split(store, validation, recipe.seed)
        held, self.greedy = _evaluated(store, held, self.lengths, most, recipe.seed)
        self._training = self._packed(training, "to train on")
        self._held = self._packed(held, "to evaluate on") if validation else None
        self.identity: dict[str, Any] = {
            "texts": store.digest,
            "length": recipe.length,
            "rows": recipe.rows,
            "seed": recipe.seed,
            "pack": pack,
            "validation": validation,
            "evaluated": most,
        }

    def _packed(self, documents: Int[np.ndarray, " n"], purpose: str) -> Packed:
        r, lengths = self.recipe, self.lengths[documents]
        if not (lengths > 0).any():
            raise ValueError(
                f"no text {purpose}: none of {len(documents)} documents has a trained token within {r.length} tokens"
            )
        if self._pack:
            rows = packing.pack(lengths, r.length, r.seed)
            widths = np.full(len(rows), r.length)
        else:
            rows = [[int(i)] for i in np.flatnonzero(lengths)]
            sizes = np.array(packing.buckets(lengths, r.length, BUCKETS))
            widths = sizes[np.searchsorted(sizes, lengths[lengths > 0])]
        named = documents.tolist()
        return Packed([[named[i] for i in row] for row in rows], widths, r.rows, r.seed)

    @property
    def training_lengths(self) -> Int[np.ndarray, " D"]:
        """Tokens used of every document that is trained on, 0 of all others."""
        used = np.zeros_like(self.lengths)
        ids = [i for row in self._training.documents for i in row]
        used[ids] = self.lengths[ids]
        return used

    @property
    def per_epoch(self) -> int:
        """Batches per epoch."""
        return self._training.count

    @property
    def efficiency(self) -> float:
        """Share of the training batches' tokens that is text."""
        used = sum(int(self.lengths[i]) for row in self._training.documents for i in row)
        held = sum(width * self.recipe.rows for width, _ in self._training.order(None))
        return used / held

    def batches(self, step: int = 0) -> Iterator[tuple[Batch, Rows]]:
        """Batches from a step on, without end: the same for the same step, whatever came before."""
        epoch, start = divmod(step, self.per_epoch)
        while True:
            yield from self.epoch(epoch, start)
            epoch, start = epoch + 1, 0

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Batch, Rows]]:
        """Batches of one epoch from the ``start``-th on."""
        for width, rows in self._training.order(epoch)[start:]:
            yield self._batch(self._training, width, rows)

    def validation(self) -> Sequence[tuple[Batch, Rows]]:
        """Batches that are not trained on, in one order; none when nothing is held out."""
        if self._held is None:
            return []
        return [self._batch(self._held, width, rows) for width, rows in self._held.order(None)]

    def _batch(self, packed: Packed, width: int, rows: list[int]) -> tuple[Batch, Rows]:
        index, processes = self._process
        size = self.recipe.rows // processes
        named = [packed.documents[r] for r in rows] + [[] for _ in range(self.recipe.rows - len(rows))]
        mine = named[index * size : (index + 1) * size]
        return packing.batch(self.store, self.lengths, mine, (size, width)), mine

    def __str__(self) -> str:
        text = sum(int(self.lengths[i]) for row in self._training.documents for i in row)
        lines = [
            str(self.fit),
            f"training: {sum(map(len, self._training.documents)):,} documents, {text:,} tokens, "
            f"{self.per_epoch:,} batches per epoch, {self.efficiency:.1%} of their tokens text",
        ]
        if self._held is not None:
            kind = "greedy" if self.greedy else "sampled (acceptance on them is not that of greedy decoding)"
            lines.append(f"held out: {sum(map(len, self._held.documents)):,} documents, {kind}")
        return "\n".join(lines)


def _evaluated(
    store: Store, held: Int[np.ndarray, " n"], lengths: Int[np.ndarray, " D"], most: int | None, seed: int
) -> tuple[Int[np.ndarray, " m"], bool]:
    """(held-out documents to evaluate on, whether they are greedy)."""
    fitting = held[lengths[held] > 0]
    greedy = fitting[store.temperature[fitting] == 0]
    chosen = greedy if len(greedy) else fitting
    chosen = np.random.default_rng([seed, 4]).permutation(chosen)[:most]
    return np.sort(chosen), bool(len(greedy))
