"""Every drafter on every kind of target, through the registry."""

import hosts
import pytest
import told

import specjax
from specjax import testing

LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("kind", "host"),
    [pytest.param(*pair, marks=() if hosts.every_other(*pair) else LONG) for pair in hosts.PAIRS],
)
def test_rounds(kind, host):
    """GRD.1, GRD.3, KVR.1 to KVR.5, BAT.2, BAT.4, MET.2, I6: five ragged rows, greedy and sampled ones side by side,
    from all drafts right to whole blocks rejected, windows crossed inside blocks and rings wrapped: texts are plain
    decoding's, accepted counts what was told, and the drafter says what it says after a fresh prefill of the committed
    text in another row."""
    state, compared, changed = hosts.walk(hosts.Rounds(kind, host), 30, every=5)
    assert bool(state.done[2])
    assert not bool(state.done[0])
    assert compared >= 20
    assert changed >= 10


VARIANTS = ("mtp, latent", "dspark, rnn", "eagle3, gemma", "dflash, gemma", "dspark, gemma")


@LONG
@pytest.mark.parametrize("kind", [*hosts.KINDS, *VARIANTS])
def test_200_rounds(kind):
    """KVR.4, KVR.3: the proposal of every other round is that of a fresh prefill."""
    host = "ring" if kind == "assistant" or "gemma" in kind else "dense"
    state, compared, changed = hosts.walk(hosts.Rounds(kind, host, rows=2, size=288), 200, every=2, few=True)
    assert not bool(state.done[0])
    assert compared >= 150
    assert changed >= 30


NEW = 44


@LONG
@pytest.mark.parametrize(("kind", "host"), [pair for pair in hosts.OTHERS if hosts.every_other(*pair)])
def test_decoding(kind, host):
    """GRD.1, BAT.3, BAT.4, PFX.1, KVR.1: by the public call, every mode on every prompt, five prompts in three rows,
    prompts cut in fours, chunks of several rounds and the host's loop. Where this does not look, the law of sampled
    tokens does (``test_drafters_law.py``)."""
    known, params = hosts.plain(host, NEW), hosts.drafted(hosts.target(host), kind)
    call = {
        "max_new_tokens": NEW,
        "rows": 3,
        "k": hosts.K,
        "rule": "match",
        "prefill_chunk": 4,
        **hosts.SAMPLED,
    }
    for turn, driving in enumerate(({}, {"rounds": 3}, {"rounds": 1}, {"loop": "host"}, {"rounds": 5})):
        modes = told.ROTATING[turn:] + told.ROTATING[:turn]
        scripted = testing.corrupted(params, zip(hosts.PROMPTS, known, strict=True), modes)
        out = specjax.decode(scripted, hosts.PROMPTS, **call, **driving)
        assert out.tokens == known
        told.expect_counts(modes, hosts.K, NEW, out.stats)
