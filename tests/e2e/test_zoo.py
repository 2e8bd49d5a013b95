"""The drafters that are shipped, on the real model: float32 on CPU."""

import pytest

import specjax
from specjax import demo, zoo

pytestmark = [pytest.mark.real, pytest.mark.long]

#: Tokens per round on the demo's prompts, both together, that a drafter has to reach.
FLOORS = {"eagle3": 2.0, "mtp": 2.0, "assistant": 1.4, "dspark": 1.8, "dflash": 1.7}


@pytest.mark.parametrize("method", [one.method for one in zoo.available(demo.MODEL)] or [None])
def test_shipped_drafters_change_nothing_and_draft_well(method):
    """PEER.5, PEER.8, PEER.18: ids equal plain decoding's; tau above a floor on two prompts (None: none is shipped)."""
    if method is None:
        assert zoo.available(demo.MODEL) == ()
        return
    params = specjax.load(demo.MODEL, drafter=method, dtype="float32")
    prompts = list(demo.PROMPTS.values())
    report = specjax.audit(params, prompts, max_new_tokens=64, **demo.SHAPE)
    assert all(row.identical or row.gap <= specjax.identity.NEAR_TIE for row in report.rows), str(report)
    assert report.speculative.tau >= FLOORS[method], str(report)
    if method == "eagle3":  # one of them behind prompt lookup
        chain = specjax.load(demo.MODEL, drafter=("ngram", method), dtype="float32")
        report = specjax.audit(chain, prompts[1:], max_new_tokens=32, **demo.SHAPE)
        assert all(row.identical or row.gap <= specjax.identity.NEAR_TIE for row in report.rows), str(report)
