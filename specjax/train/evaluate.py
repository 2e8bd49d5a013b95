"""Exact greedy acceptance of a drafter on given texts, without decoding them again.

A greedy text is what the target says, so a draft is accepted exactly when it is the text's own next token. Whether it
is, is computed for every position at once (``Method.matches``); then each text is walked round by round, as decoding
would.
"""

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Bool, Int

from specjax.metrics import RoundRecord, Stats
from specjax.train.types import Batch


def acceptance(
    matches: Bool[np.ndarray, "R T k"], batch: Batch, stop_ids: Sequence[int], k: int | None = None
) -> list[Stats]:
    """Counters of every answer in a batch of packed rows, in the order they stand.

    ``stop_ids``: an answer that does not end in one of these was cut by its budget, beyond which nothing is proposed.
    ``k``: drafts per round, at most those of ``matches`` (block drafters always run all their rows, so fewer drafts
    are the first ones of more). An answer's first token comes from the prefill, as in decoding.
    """
    matches = np.asarray(matches)[..., :k]
    runs = np.cumprod(matches, -1, dtype=np.int64).sum(-1)
    tokens, trained, doc = (np.asarray(x) for x in (batch.tokens, batch.trained, batch.doc))
    found = []
    for row in range(trained.shape[0]):
        for first, last in answers(trained[row], doc[row]):
            stopped = int(tokens[row, last]) in stop_ids
            rounds = _walk(runs[row], first, last, matches.shape[-1], stopped)
            found.append(Stats.from_rounds(rounds, new_tokens=last - first + 1))
    return found


def answers(trained: Bool[np.ndarray, " T"], doc: Int[np.ndarray, " T"]) -> Iterable[tuple[int, int]]:
    """First and last token of every run of trained tokens of one document in a row."""
    label = np.where(trained, doc, -1)
    edges = np.flatnonzero(np.diff(label, prepend=-1, append=-1))
    for start, stop in itertools.pairwise(edges):
        if label[start] >= 0:
            yield int(start), int(stop) - 1


def _walk(runs: np.ndarray, first: int, last: int, k: int, stopped: bool) -> Iterable[RoundRecord]:
    """Rounds of one answer, the first of which has the answer's first token as its anchor."""
    at = first
    while at < last:
        left = last - at
        proposed = k if stopped else min(k, left - 1)  # within a budget a round's own token needs room too
        accepted = min(int(runs[at]), proposed, left)
        emitted = min(accepted + 1, left)
        yield RoundRecord(proposed, accepted, emitted)
        at += emitted
