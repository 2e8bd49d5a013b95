"""Choosing a draft vocabulary: the target ids a drafter's head has rows for.

A smaller head is read faster and can only propose its own ids; verification is over the whole vocabulary all the same.
"""

from collections.abc import Iterable

import numpy as np
from jaxtyping import Int


def count(answers: Iterable[np.ndarray], vocab: int) -> Int[np.ndarray, " V"]:
    """How often each target id occurs in token ids of answers. ValueError for an id beyond the vocabulary."""
    total = np.zeros(vocab, np.int64)
    for ids in answers:
        ids = np.asarray(ids).reshape(-1)
        if ids.size and (ids.min() < 0 or ids.max() >= vocab):
            raise ValueError(
                f"token ids run from {ids.min()} to {ids.max()}, the vocabulary has [0, {vocab})"
            )
        total += np.bincount(ids, minlength=vocab)
    return total


def choose(counts: Int[np.ndarray, " V"], size: int, always: Iterable[int] = ()) -> Int[np.ndarray, " size"]:
    """The ``size`` most frequent ids, ascending; of equally frequent ones the lower.

    ``always``: ids that are in it whatever their count: ends of text and of turns. Where fewer ids occur, the lowest of
    the others fill up. Raises ValueError for a size that is not from 1 to the vocabulary's, for more ids in ``always``
    than that, and for one that is none.
    """
    vocab, fixed = len(counts), sorted({int(i) for i in always})
    if isinstance(size, bool) or not isinstance(size, int | np.integer) or not 1 <= size <= vocab:
        raise ValueError(f"the draft vocabulary must have from 1 to {vocab} ids, got {size!r}")
    if fixed and not 0 <= fixed[0] <= fixed[-1] < vocab:
        raise ValueError(f"ids that are always drafted must be in [0, {vocab}), got {fixed}")
    if len(fixed) > size:
        raise ValueError(f"{len(fixed)} ids are always drafted, and the draft vocabulary has only {size}")
    order = np.argsort(-np.asarray(counts, np.int64), kind="stable")
    free = order[~np.isin(order, fixed)]
    return np.sort(np.concatenate([np.asarray(fixed, np.int64), free[: size - len(fixed)]]))


def coverage(counts: Int[np.ndarray, " V"], ids: Int[np.ndarray, " Vd"]) -> float:
    """Share of tokens that the ids cover; 1.0 of none."""
    total = int(np.sum(counts))
    return float(np.sum(np.asarray(counts)[ids]) / total) if total else 1.0
