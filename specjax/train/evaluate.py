"""Exact greedy acceptance of a drafter on given texts, without decoding them again.

A greedy text is what the target says, so a draft is accepted exactly when it is the text's own next token. Whether it
is, is computed for every position at once (``Method.matches``); then each text is walked round by round, as decoding
would.
"""

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Int

from specjax import registry
from specjax.metrics import RoundRecord, Stats
from specjax.train import methods
from specjax.train.features import check, extract
from specjax.train.types import Batch
from specjax.types import Pair, Params

#: Texts are padded to multiples of so many tokens, so that few shapes are compiled.
_LENGTHS = 64


def acceptance(
    matches: Bool[np.ndarray, "R T k"],
    batch: Batch,
    stop_ids: Sequence[int],
    k: int | None = None,
    budget: int | None = None,
) -> list[Stats]:
    """Counters of every answer in a batch of packed rows, in the order they stand.

    ``stop_ids``: an answer that does not end in one of these was cut by its budget, beyond which nothing is proposed.
    ``k``: drafts per round, at most those of ``matches`` (block drafters always run all their rows, so fewer drafts
    are the first ones of more). ``budget``: tokens an answer could have had; None: one that stopped had room for more.
    An answer's first token comes from the prefill, as in decoding.
    """
    matches = np.asarray(matches)[..., :k]
    runs = np.cumprod(matches, -1, dtype=np.int64).sum(-1)
    tokens, trained, doc = (np.asarray(x) for x in (batch.tokens, batch.trained, batch.doc))
    found = []
    for row in range(trained.shape[0]):
        for first, last in answers(trained[row], doc[row]):
            end = last if int(tokens[row, last]) not in stop_ids else None
            end = end if budget is None else first + budget - 1
            rounds = _walk(runs[row], first, last, matches.shape[-1], end)
            found.append(Stats.from_rounds(rounds, new_tokens=last - first + 1))
    return found


def answers(trained: Bool[np.ndarray, " T"], doc: Int[np.ndarray, " T"]) -> Iterable[tuple[int, int]]:
    """First and last token of every run of trained tokens of one document in a row."""
    label = np.where(trained, doc, -1)
    edges = np.flatnonzero(np.diff(label, prepend=-1, append=-1))
    for start, stop in itertools.pairwise(edges):
        if label[start] >= 0:
            yield int(start), int(stop) - 1


def _walk(runs: np.ndarray, first: int, last: int, k: int, end: int | None) -> Iterable[RoundRecord]:
    """Rounds of one answer, the first of which has the answer's first token as its anchor. ``end``: the last token
    that there is room for; None: no limit."""
    at = first
    while at < last:
        left = last - at
        proposed = k if end is None else min(k, end - at - 1)  # a round's own token needs room too
        accepted = min(int(runs[at]), proposed, left)
        emitted = min(accepted + 1, left)
        yield RoundRecord(proposed, accepted, emitted)
        at += emitted


def of_texts(
    params: Params,
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    k: int | None = None,
    *,
    budget: int | None = None,
    rows: int = 8,
) -> list[Stats]:
    """Counters of every text's answer: what decoding it greedily would have counted, by training's own arithmetic.

    ``texts``: ids of (prompt, answer), the answer being what the target says, its stop token included. ``k``: drafts
    per round; None: the drafter's own. ``budget``: as in :func:`acceptance`. ``rows``: texts that are run at once.
    ValueError for a drafter of a kind that is not trained, a prompt or answer without tokens, and texts beyond the
    target's positions.
    """
    meta = params.meta
    how, k = methods.method(meta.drafter), k or meta.drafter_cfg.k
    if empty := [i for i, (prompt, answer) in enumerate(texts) if not len(prompt) or not len(answer)]:
        raise ValueError(f"text {empty[0]} has a prompt or an answer without tokens")
    length = -(-max((len(p) + len(a) for p, a in texts), default=0) // _LENGTHS) * _LENGTHS
    found: list[Stats] = []
    for i in range(0, len(texts), rows):
        batch = _batch(texts[i : i + rows], rows, length)
        check(meta.pair, batch)
        matched = _matches(how, meta.pair, k, params.target, params.drafter, batch)
        found += acceptance(np.asarray(matched), batch, meta.eos_ids, budget=budget)
    return found


def _batch(texts: Sequence[tuple[Sequence[int], Sequence[int]]], rows: int, length: int) -> Batch:
    """One text per row."""
    tokens, pos = np.zeros((rows, length), np.int32), np.zeros((rows, length), np.int32)
    doc, trained = np.full((rows, length), -1, np.int32), np.zeros((rows, length), bool)
    for r, (prompt, answer) in enumerate(texts):
        n = len(prompt) + len(answer)
        tokens[r, :n], doc[r, :n], pos[r, :n] = [*prompt, *answer], 0, np.arange(n)
        trained[r, len(prompt) : n] = True
    return Batch(tokens, doc, pos, trained)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _matches(how: Any, pair: Pair, k: int, target: Any, drafter: Any, batch: Batch) -> Bool[Array, "R T k"]:
    shared = registry.target(pair.family).shared(target, pair.target_cfg)
    features = extract(target, pair, batch, how.needs(pair.drafter_cfg))
    return how.matches(drafter, shared, pair.drafter_cfg, batch, features, k)
