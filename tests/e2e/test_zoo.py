"""The drafters that are shipped, on the real model: float32 on CPU."""

import pytest

import specjax
from specjax import demo, zoo

pytestmark = [pytest.mark.real, pytest.mark.long]

#: Tokens per round on the demo's prompts, both together, that a drafter has to reach.
FLOORS = {"eagle3": 2.0, "mtp": 2.0, "assistant": 1.4, "dspark": 1.8, "dflash": 1.7}


OPTIONS = {"max_new_tokens": 64, **demo.SHAPE}
TEXTS = list(demo.PROMPTS.values())


@pytest.fixture(scope="module")
def plain():
    """What the target says alone, decoded once for all drafters."""
    return specjax.decode(specjax.load(demo.MODEL, dtype="float32"), TEXTS, **OPTIONS)


def expect_same(params, plain, out):
    """Ids are plain decoding's, up to a near-tie."""
    for i, ((a,), (b,)) in enumerate(zip(plain.completions, out.completions, strict=True)):
        row = specjax.identity.compare(params, i, a, b)
        assert row.identical or row.gap <= specjax.identity.NEAR_TIE, str(row)


@pytest.mark.parametrize("method", [one.method for one in zoo.available(demo.MODEL)] or [None])
def test_shipped_drafters_change_nothing_and_draft_well(method, request):
    """PEER.5, PEER.8, PEER.18: ids equal plain decoding's; tau above a floor on two prompts (None: none is shipped)."""
    if method is None:
        assert zoo.available(demo.MODEL) == ()
        return
    plain = request.getfixturevalue("plain")
    params = specjax.load(demo.MODEL, drafter=method, dtype="float32")
    out = specjax.decode(params, TEXTS, **OPTIONS)
    expect_same(params, plain, out)
    assert out.total.tau >= FLOORS[method], str(out.total)
    if method == "eagle3":  # one of them behind prompt lookup
        chain = specjax.load(demo.MODEL, drafter=("ngram", method), dtype="float32")
        expect_same(chain, plain, specjax.decode(chain, TEXTS, **OPTIONS))
