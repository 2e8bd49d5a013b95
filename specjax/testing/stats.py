"""Counts against exact probabilities."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np


def histogram(sequences: Sequence[Sequence[int]], vocab: int) -> np.ndarray:
    """How often each sequence of n tokens occurs: int64 of shape ``[vocab] * n``."""
    ids = np.asarray(sequences, np.int64)
    shape = (vocab,) * ids.shape[1]
    flat = np.ravel_multi_index(tuple(ids.T), shape)
    return np.bincount(flat, minlength=vocab ** ids.shape[1]).reshape(shape)


def joint_law(step: Callable[[tuple[int, ...]], Sequence[float]], vocab: int, n: int) -> np.ndarray:
    """Exact law of n consecutive tokens, float64 ``[vocab] * n``.

    ``step(tokens so far)`` gives the next token's probabilities, e.g. the target's softmax after a prompt.
    """
    law = np.ones((vocab,) * n)
    for done in range(n):
        for tokens in itertools.product(range(vocab), repeat=done):
            shape = (vocab,) + (1,) * (n - done - 1)
            law[tokens] *= np.asarray(step(tokens), np.float64).reshape(shape)
    return law


def chisquare(counts: np.ndarray, law: np.ndarray, least: float = 5.0) -> float:
    """p-value of the counts under the law (Pearson), cells expecting fewer than ``least`` pooled.

    A count where the law is 0 gives 0.0. Raises ValueError if the law does not sum to 1, or if fewer than
    two cells are left to compare.
    """
    from scipy import stats

    counts, law = np.ravel(counts).astype(np.float64), np.ravel(law).astype(np.float64)
    if abs(law.sum() - 1) > 1e-5:
        raise ValueError(f"probabilities sum to {law.sum()}, not 1")
    if np.any(counts[law == 0] > 0):
        return 0.0
    observed, expected = _pooled(counts, law / law.sum() * counts.sum(), least)
    if len(expected) < 2:
        raise ValueError(f"{int(counts.sum())} samples are too few for these probabilities")
    return float(stats.chisquare(observed, expected).pvalue)


def _pooled(counts: np.ndarray, expected: np.ndarray, least: float) -> tuple[np.ndarray, np.ndarray]:
    """Cells in rising order of expectation, the first ones as one cell so that every cell expects
    ``least`` at least."""
    order = np.argsort(expected, kind="stable")
    counts, expected = counts[order], expected[order]
    first = max(int(np.sum(expected < least)), int(np.searchsorted(np.cumsum(expected), least)) + 1)
    starts = np.concatenate([[0], np.arange(first, len(expected))])
    return np.add.reduceat(counts, starts), np.add.reduceat(expected, starts)
