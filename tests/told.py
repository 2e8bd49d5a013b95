"""One small model, a few ragged prompts, and drafters that are told what plain decoding gives."""

import dataclasses
import functools

import numpy as np

import specjax
from specjax import testing

VOCAB, NEW = 64, 23
PROMPTS = [[3], [9, 8, 7, 6, 5, 4, 3, 2, 1], [1, 2, 3], [5] * 7, [60, 61, 62, 63, 1, 33]]
MODES = ("ALWAYS_RIGHT", "ALWAYS_WRONG", "EVERY_THIRD_WRONG", "RANDOM_COUNT", "STOP_INSIDE")
TEXTS, SIZE = 8, 64  # shape of the drafter's script


@functools.cache
def model():
    """Target without a drafter."""
    return testing.tiny_params(2, layers=1, vocab=VOCAB, max_positions=1024)


@functools.cache
def plain(rows: int = 3) -> list[list[int]]:
    """Greedy continuations of all prompts."""
    return specjax.decode(model(), PROMPTS, max_new_tokens=NEW, rows=rows).tokens


def unused(tokens=None) -> int:
    """An id that none of the continuations holds."""
    seen = {t for row in (tokens or plain()) for t in row}
    return next(t for t in range(VOCAB) if t not in seen)


def told(modes, tokens=None, *, base=None, prompts=PROMPTS, name="TOLD", stop=0, at=0, size=SIZE):
    """Params whose drafter spoils the continuations ``tokens`` (default: the greedy ones)."""
    base = base or model()
    known = zip(prompts, plain() if tokens is None else tokens, strict=True)
    weights = testing.telling(known, modes, size, TEXTS, stop, at)
    cfg = testing.ToldConfig(8, base.meta.target_cfg.vocab_size, TEXTS, size)
    return with_drafter(base, f"specjax.testing:{name}", cfg, weights)


def with_drafter(params, name: str, cfg, weights=None):
    """The same target with another drafter."""
    meta = dataclasses.replace(params.meta, drafter=name, drafter_cfg=cfg)
    return params.replace(drafter=weights, meta=meta)


def cut(tokens, budget: int, stops=()) -> tuple[list[int], str]:
    """What decoding returns of an endless continuation: up to the first stop id or the budget."""
    kept = list(tokens[:budget])
    hits = np.flatnonzero(np.isin(kept, list(stops)))
    return (kept[: hits[0] + 1], "stop") if hits.size else (kept, "length")


def expect_acceptance(mode: str, k: int, at: int, s):
    """Right tokens are accepted, wrong ones are not, and every row keeps its own count."""
    assert s.proposed > 0
    if mode == "ALWAYS_RIGHT":
        assert s.accepted == s.proposed > 0
        assert s.rounds == -(-(NEW - 1) // (k + 1))
    elif mode == "ALWAYS_WRONG":  # adversarial: nothing may be accepted
        assert s.accepted == 0
        assert s.rounds == NEW - 1
    elif mode == "EVERY_THIRD_WRONG":
        assert 0 < s.accepted < s.proposed
    elif mode == "RANDOM_COUNT":
        assert s.accepted == s.proposed > 0
    else:  # the stop id is proposed, refused, and does not end the row
        assert s.accepted == (0 if at == 0 else s.accepted)
        assert s.accepted < s.proposed
        assert at == 0 or s.accepted > 0


#: Scripts whose accepted counts follow from the place in the text alone.
WRONG_AT = {
    "ALWAYS_RIGHT": lambda i: False,
    "ALWAYS_WRONG": lambda i: True,
    "EVERY_THIRD_WRONG": lambda i: i % 3 == 2,
}
#: What a batch is told, each prompt something else; ``OWN``: its drafter speaks for itself.
ROTATING = ["ALWAYS_RIGHT", "EVERY_THIRD_WRONG", "OWN", "ALWAYS_WRONG", "EVERY_THIRD_WRONG"]


def expected_counts(mode: str, k: int, new: int) -> list[tuple[int, int]]:
    """(proposed, accepted) of every round when the script drafts up to k tokens of a text of ``new`` tokens."""
    at, rounds = 1, []  # the prefill has said the first
    while at < new:
        proposed = min(k, new - at - 1)
        wrong = [WRONG_AT[mode](at + i) for i in range(proposed)]
        accepted = wrong.index(True) if True in wrong else proposed
        rounds.append((proposed, accepted))
        at += accepted + 1
    return rounds


def expect_counts(modes, k: int, new: int, every) -> None:
    """The statistics of each prompt are what its script gives; nothing is known of a drafter's own words."""
    for mode, s in zip(modes, every, strict=False):
        if mode in WRONG_AT:
            rounds = expected_counts(mode, k, new)
            assert (s.rounds, s.proposed, s.accepted) == (len(rounds), *map(sum, zip(*rounds, strict=True)))
