"""How much of what a drafter proposes is accepted, held to stored figures; and what no match costs."""

import numpy as np
import pytest
from told import PROMPTS, model, with_drafter

import specjax
from specjax import testing
from specjax.core import loop
from specjax.drafters import ngram

#: (settings, mean acceptance length, accepted per position) of ``TEXTS`` on the tiny model; ids are exact in
#: float32, so these hold on every platform.
STORED = {
    "recent": (ngram.Config(4, 3, 1), 1.314, (0.241, 0.0577, 0.0171, 0.0094)),
    "earliest": (ngram.Config(4, 3, 1, "earliest"), 1.237, (0.2045, 0.0205, 0.0107, 0.0037)),
}
TEXTS = [*PROMPTS, [4, 9, 2, 4, 9, 2, 4, 9], [50, 51, 52, 53, 50, 51]]


@pytest.mark.parametrize("which", STORED)
def test_acceptance_stays_what_it_was(which):
    """PEER.5, MET.3: over prompts that mostly do not repeat themselves, each position for itself; positions
    sum to the totals."""
    cfg, length, rates = STORED[which]
    out = specjax.decode(with_drafter(model(), "ngram", cfg), TEXTS, max_new_tokens=80, rows=7)
    stats = out.total
    assert stats.mean_acceptance_length == pytest.approx(length, rel=0.05)
    assert np.all(np.array(stats.accepted_per_position) >= 0.95 * np.array(rates))
    assert (sum(stats.accepted_at), sum(stats.proposed_at)) == (stats.accepted, stats.proposed)
    assert stats.emitted == stats.accepted + stats.rounds
    assert stats.tau == stats.emitted / stats.rounds


def counting(period: int, cfg):
    """A target that says the next number, from 0 again after ``period``."""
    table = np.zeros((1, 64, 64), np.float32)
    table[0, np.arange(64), (np.arange(64) + 1) % period] = 9.0
    return with_drafter(testing.micro_params(64, table=table), "ngram", cfg)


@pytest.mark.parametrize("cfg", [ngram.Config(3, 3, 1), ngram.Config(3, 2, 2, "earliest")], ids=str)
def test_a_text_that_repeats_itself_is_accepted_whole(cfg):
    """PEER.8, MET.6: once a period has been seen, every draft is right, to the last."""
    prompt = [*range(7), 0, 1]
    out = specjax.decode(counting(7, cfg), prompt, max_new_tokens=41)
    assert out.tokens == [(2 + i) % 7 for i in range(41)]
    assert set(out.stats.accepted_per_position) == {1.0}
    assert (out.stats.rounds, out.stats.proposed, out.stats.mean_acceptance_length) == (10, 30, 4.0)


@pytest.mark.parametrize(("lookup", "prompt"), [((3, 1), [0]), ((3, 3), [5, 4]), ((2, 2), [9, 8, 7, 6])])
def test_without_a_match_a_round_is_a_plain_step(lookup, prompt, monkeypatch):
    """NGR.2, MET.6: the target verifies one position, and nothing counts as drafted, in a text without
    repetitions and for prompts shorter than the n-gram."""
    widths = []

    def read(records, real=loop.read):
        out = real(records)
        widths.extend(int(w) for emit in out for w in emit.width if w > 0)
        return out

    monkeypatch.setattr(loop, "read", read)
    out = specjax.decode(counting(64, ngram.Config(4, *lookup)), prompt, max_new_tokens=30)
    assert out.tokens == [(prompt[-1] + 1 + i) % 64 for i in range(30)]
    s = out.stats
    assert (s.rounds, s.proposed, s.drafting_rounds, s.tau, s.acceptance_rate) == (29, 0, 0, 1.0, 0.0)
    assert s.accepted_per_position == s.conditional_per_position == ()
    assert widths == [1] * 29
