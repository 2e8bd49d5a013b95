"""Documents in rows of fixed length: several to a row, or one where the target's state runs through a whole row.

Rows are made once for a data set; every epoch brings them in another order. So a row has the same documents in all
epochs, an epoch has the same number of batches, and a position in training is one number.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

from specjax.train.store import Store
from specjax.train.types import Batch

BUCKET = 32  # lengths of rows with one document are multiples of this


@dataclasses.dataclass(frozen=True)
class Fit:
    """Documents of a store as far as they fit rows of ``length``.

    ``lengths``: tokens kept of each document of the store, 0 = left out. The rest counts what was lost: ``shortened``
    documents, ``dropped`` ones (nothing trained is left of them), of these ``untrained`` from the beginning;
    ``answers`` lost whole, ``cut`` answers that lost their end.
    """

    length: int
    lengths: Int[np.ndarray, " D"]
    shortened: int
    dropped: int
    untrained: int
    answers: int
    cut: int

    def __str__(self) -> str:
        kept = int((self.lengths > 0).sum())
        return (
            f"{kept:,} of {len(self.lengths):,} documents fit rows of {self.length} tokens; {self.shortened:,} "
            f"shortened, {self.dropped:,} dropped with nothing trained left ({self.untrained:,} had nothing), "
            f"{self.answers:,} answers lost, {self.cut:,} cut"
        )


def fit(store: Store, length: int) -> Fit:
    """Cut documents to ``length`` tokens. ValueError when nothing trained is left at all."""
    if length < 2:
        raise ValueError(f"rows of {length} tokens hold nothing that can be trained")
    owner = np.repeat(np.arange(len(store)), np.diff(store.firsts))
    first, stop = store.spans.T
    first = np.maximum(first, 1)  # nothing comes before a text's first token that could predict it
    kept = np.minimum(stop, length) - first
    trained = np.bincount(owner, np.maximum(kept, 0), minlength=len(store)).astype(int)
    before = np.bincount(owner, np.maximum(stop - first, 0), minlength=len(store)).astype(int)
    lengths = np.where(trained > 0, np.minimum(store.lengths, length), 0)
    if not trained.any():
        raise ValueError(
            f"no document has a trained token within {length} tokens: of {len(store)}, {int((before == 0).sum())} have "
            "none at all, and the answers of the others lie beyond; longer rows are needed"
        )
    return Fit(
        length,
        lengths,
        int(((store.lengths > length) & (lengths > 0)).sum()),
        int((lengths == 0).sum()),
        int((before == 0).sum()),
        int(((kept <= 0) & (stop > first)).sum()),
        int(((kept > 0) & (stop > length)).sum()),
    )


def split(store: Store, share: float, seed: int = 0) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " m"]]:
    """(training, validation) documents: disjoint, together all; a prompt's answers and variants are on one side.

    ``share`` of the groups of prompts is for validation, at least one; 0: none. ValueError when a side is empty.
    """
    if not 0 <= share < 1:
        raise ValueError(f"validation is a share of the prompts in [0, 1), got {share}")
    groups = np.unique(store.group)
    count = 0 if share == 0 else max(1, round(share * len(groups)))
    if count >= len(groups):
        raise ValueError(f"{len(groups)} prompt(s) cannot be split: nothing would be left to train on")
    held = np.random.default_rng([seed, 1]).permutation(len(groups))[:count]
    inside = np.isin(store.group, groups[held])
    return np.flatnonzero(~inside), np.flatnonzero(inside)


def pack(lengths: Int[np.ndarray, " n"], length: int, seed: int = 0) -> list[list[int]]:
    """Indices of documents by row, no row longer than ``length``: best fit, longest first, ties by chance.

    Documents of length 0 are left out. Each is in one row.
    """
    order = np.random.default_rng([seed, 2]).permutation(len(lengths))
    order = order[np.argsort(-lengths[order], kind="stable")]
    rows: list[list[int]] = []
    open_rows: list[list[int]] = [[] for _ in range(length + 1)]  # by tokens still free
    some = 0  # bit n: a row with n tokens free
    for i, size in zip(order.tolist(), lengths[order].tolist(), strict=True):
        if size == 0:
            break
        wide = some >> size << size
        free = (wide & -wide).bit_length() - 1 if wide else length
        if wide:
            row = open_rows[free].pop()
            if not open_rows[free]:
                some ^= 1 << free
        else:
            row = len(rows)
            rows.append([])
        rows[row].append(i)
        open_rows[free - size].append(row)
        some |= 1 << (free - size)
    return rows


def buckets(lengths: Int[np.ndarray, " n"], length: int, most: int) -> list[int]:
    """At most ``most`` row lengths up to ``length``, multiples of 32 but for the last, that pad these lengths least."""
    lengths = lengths[lengths > 0]
    step = BUCKET * -(-length // (64 * BUCKET))
    longest = int(lengths.max())
    top = min(length, -(-longest // step) * step)
    sizes = [*range(step, top, step), top]
    within = np.searchsorted(np.sort(lengths), sizes, side="right").tolist()
    best = [(size * count, [size]) for size, count in zip(sizes, within, strict=True)]  # up to each size
    for _ in range(most - 1):
        split_at = [
            [(best[j][0] + size * (within[i] - within[j]), [*best[j][1], size]) for j in range(i)]
            for i, size in enumerate(sizes)
        ]
        best = [min([one, *more]) for one, more in zip(best, split_at, strict=True)]
    return best[-1][1]


def batch(
    store: Store, lengths: Int[np.ndarray, " D"], rows: Sequence[Sequence[int]], shape: tuple[int, int]
) -> Batch:
    """Rows of documents (indices of the store) as arrays; rows of ``shape`` that none are given for are empty."""
    tokens, pos = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    doc, trained = np.full(shape, -1, np.int32), np.zeros(shape, bool)
    for r, row in enumerate(rows):
        at = 0
        for d, i in enumerate(row):
            size, start = int(lengths[i]), int(store.starts[i])
            part = slice(at, at + size)
            tokens[r, part] = store.ids[start : start + size]
            doc[r, part], pos[r, part] = d, np.arange(size)
            trained[r, part] = answered(store, i, size)
            at += size
    return Batch(tokens, doc, pos, trained)


def answered(store: Store, i: int, size: int) -> Bool[np.ndarray, " size"]:
    """Which of a document's first ``size`` tokens are trained. Its very first never is: nothing predicts it."""
    inside = np.zeros(size, bool)
    for first, stop in store.spans[store.firsts[i] : store.firsts[i + 1]].tolist():
        inside[max(first, 1) : stop] = True
    return inside
