"""Packed batches of small texts for tests of training."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from specjax.train.types import Batch


def packed(rows: Sequence[Sequence[tuple[Sequence[int], int]]], length: int) -> Batch:
    """Rows of ``length`` tokens of documents ``(ids, prompt)``; the ids from ``prompt`` on are trained."""
    shape = (len(rows), length)
    tokens, pos = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    doc, trained = np.full(shape, -1, np.int32), np.zeros(shape, bool)
    for r, documents in enumerate(rows):
        at = 0
        for d, (ids, prompt) in enumerate(documents):
            here = slice(at, at + len(ids))
            tokens[r, here], doc[r, here], pos[r, here] = ids, d, np.arange(len(ids))
            trained[r, at + prompt : at + len(ids)] = True
            at += len(ids)
    return Batch(*map(jnp.asarray, (tokens, doc, pos, trained)))


def random_rows(vocab: int, lengths: Sequence[Sequence[int]], seed: int = 0, prompt: int = 3):
    """Documents of random tokens for :func:`packed`."""
    rng = np.random.default_rng(seed)
    return [[(rng.integers(0, vocab, n).tolist(), min(prompt, n)) for n in row] for row in lengths]
