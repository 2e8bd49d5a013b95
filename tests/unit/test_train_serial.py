"""Serial drafters in training: the numbers are those of decoding, packed or alone, and so are the matches."""

import jax.numpy as jnp
import numpy as np
import packing
import pytest
import serial_tiny
from serial_steps import (
    LENGTH,
    K,
    alone,
    batch_for,
    features_of,
    leading,
    lent,
    matches_of,
    states_of,
    stepped,
)

import specjax
from specjax.train import evaluate, methods

#: Of states up to 10, after four recycled steps of random networks whose attention is sharp.
ATOL = 3e-5
DEFAULT = ("eagle3, sliding", "mtp", "assistant, two kinds")


def kinds(default=DEFAULT):
    return [pytest.param(k, marks=() if k in default else pytest.mark.long) for k in serial_tiny.KINDS]


def documents(batch):
    """(row, document, place of its tokens)."""
    doc = np.asarray(batch.doc)
    for r in range(len(doc)):
        for d in range(doc[r].max() + 1):
            yield r, d, np.flatnonzero(doc[r] == d)


@pytest.mark.parametrize("kind", kinds())
def test_training_is_decoding(kind):
    """TRD.4, TRD.3, TAP.5: with the text's tokens fed, states of packed rows are those of cached decoding of each text
    alone; and drafts are right exactly where decoding's own are, up to its first wrong one."""
    params = serial_tiny.drafted(kind)
    p, cfg, shared, batch = params.drafter, params.meta.drafter_cfg, lent(params), batch_for(params)
    found = features_of(params, batch)
    got = np.asarray(states_of(p, shared, cfg, batch, found, None, K))
    right = matches_of(methods.method(params.meta.drafter), p, shared, cfg, batch, found, K)
    right, trained, compared = np.asarray(right), np.asarray(batch.trained), 0
    for r, d, at in documents(batch):
        _, tokens, parts = alone(batch, found, r, d, LENGTH + K)
        states, drafts = map(np.asarray, stepped(p, shared, cfg, tokens, parts, K))
        n, text = len(at), np.asarray(tokens)
        for row in range(n - 1):
            for i in range(min(K, n - 1 - row)):
                np.testing.assert_allclose(
                    got[i, r, at[row]], states[i, row], atol=ATOL, err_msg=f"{row} {i}"
                )
        for anchor in range(1, n):
            follows = text[anchor + 1 : min(n, anchor + 1 + K)]
            expected = leading(drafts[anchor - 1, : len(follows)] == follows) if len(follows) else 0
            counts = len(follows) > 0 and trained[r, at[anchor] + 1]
            assert leading(right[r, at[anchor]]) == (expected if counts else 0)
            compared += counts
        assert not right[r, at[0]].any()
    assert compared > 30
    assert not right[np.asarray(batch.doc) < 0].any()
    assert 0.02 < right.mean() < 0.5


PROMPTS = [[3, 1, 4, 1, 5], [2, 0], [5, 3, 2, 1, 0, 4, 5, 3, 2]]


@pytest.mark.parametrize("kind", kinds(("eagle3, reduced",)))
def test_accepted_drafts_are_the_matches(kind):
    """TRD.4: rounds, proposals and acceptance at every position of real decoding, walked over the same texts in
    packed rows, are equal. The texts are drawn, so that they do not repeat themselves; drafts are not."""
    params = serial_tiny.drafted(kind)
    drawn = {"temperature": 8.0, "seed": [1, 2, 3], "rule": "match"}
    out = specjax.decode(params, PROMPTS, max_new_tokens=110, ignore_eos=True, k=K, max_len=128, **drawn)
    texts = [(prompt + tokens, len(prompt)) for prompt, tokens in zip(PROMPTS, out.tokens, strict=True)]
    batch = packing.packed([texts[:2], texts[2:]], 240)
    p, cfg, found = params.drafter, params.meta.drafter_cfg, features_of(params, batch)
    right = matches_of(methods.method(params.meta.drafter), p, lent(params), cfg, batch, found, K)
    counted = evaluate.acceptance(np.asarray(right), batch, ())
    assert sum(stats.accepted for stats in counted) > 10
    for ours, real in zip(counted, out.stats, strict=True):
        for name in ("rounds", "proposed", "accepted", "emitted", "proposed_at", "accepted_at", "new_tokens"):
            assert getattr(ours, name) == getattr(real, name), name


def test_rows_that_are_chosen_are_the_same():
    """What a step makes of a row does not depend on which others there are."""
    params = serial_tiny.drafted("eagle3, sliding")
    batch = batch_for(params)
    given = (params.drafter, lent(params), params.meta.drafter_cfg, batch, features_of(params, batch))
    index = jnp.asarray([[3, 4, 9, 15], [5, 6, 7, 8], [0, 9, 19, 20]])
    every, some = states_of(*given, None, K), states_of(*given, index, K)
    wanted = np.take_along_axis(np.asarray(every), np.asarray(index)[None, :, :, None], 2)
    np.testing.assert_allclose(some, wanted, atol=ATOL)
