"""The real model: SmolLM2-135M-Instruct from its GGUF, float32 on CPU."""

import jax
import pytest

import specjax

pytestmark = pytest.mark.real

COPY = "Repeat this exactly: alpha beta gamma delta, alpha beta gamma delta, alpha beta gamma delta."
MATHS = "Tom has 3 bags with 4 apples each. How many apples does he have? Think step by step."

#: Share of the drafts accepted at each position, of both prompts together.
STORED = (0.8, 0.4, 0.2, 0.5, 0.5, 1 / 3, 0.0)


@pytest.fixture(scope="module")
def params():
    return specjax.load("smollm2-135m", drafter="ngram", dtype="float32")


def test_answers_sensibly(params):
    out = specjax.decode(params, "What is the capital of France?", max_new_tokens=24)
    assert out.text == "The capital of France is Paris."
    assert out.finish_reason == "stop"
    assert out.tokens[-1] in params.meta.eos_ids


@pytest.mark.long
def test_drafting_changes_nothing(params):
    """GRD.1, GRD.6, MET.6, PEER.5, PEER.8: ids equal plain decoding's; on a CPU, whose costs decide how much is
    drafted, the drafter does as well as it did, on a text that repeats itself and one that does not."""
    report = specjax.audit(params, [COPY, MATHS], max_new_tokens=48)
    assert all(row.identical or row.gap <= 2e-4 for row in report.rows), str(report)
    stats = report.speculative
    assert stats.accepted > 0
    if jax.default_backend() == "cpu":
        assert stats.mean_acceptance_length == pytest.approx(2.9, rel=0.05)
        assert all(rate >= 0.95 * was for rate, was in zip(stats.accepted_per_position, STORED, strict=True))


@pytest.mark.long
def test_sampling_with_a_seed_equals_plain_sampling(params):
    """RNG.1, PEER.8: rule "match" at temperature 0.7."""
    options = {"max_new_tokens": 32, "temperature": 0.7, "top_p": 0.9, "seed": 3, "rule": "match"}
    report = specjax.audit(params, [COPY], **options)
    assert report.identical, str(report)
    assert report.speculative.proposed > 0
