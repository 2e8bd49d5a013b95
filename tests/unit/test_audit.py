"""``specjax.audit``: identical, or where the outputs part and by how much."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import (
    OPTIONS,
    PROMPTS,
    greedy,
    ngram_params,
    target,
    told,
    uncompiled,
    whole_pass,
    with_meta,
)

import specjax
from specjax import identity, registry
from specjax.core import accept, loop
from specjax.identity import Report, Row


def audit(params, prompts, **options):
    return specjax.audit(params, prompts, **OPTIONS | options)


@pytest.mark.parametrize("params", [ngram_params, told], ids=["ngram", "told"])
def test_identical(params):
    """GRD.6, GRD.1: nothing changed on any prompt; the report shows that drafts were accepted."""
    report = audit(params(), PROMPTS[:3])
    assert report.identical
    assert (report.changed, report.near_ties) == (0, 0)
    assert [row.identical for row in report.rows] == [True] * 3
    assert report.speculative.accepted > 0
    assert report.plain.proposed == 0
    assert report.plain.new_tokens == report.speculative.new_tokens == 120
    assert "3 identical, 0 changed" in str(report)
    assert "drafts accepted" in str(report)


def test_any_prompt_and_any_option():
    """GRD.6: one string, sampled requests, several samples, stops; k and rule belong to the drafted run."""
    assert audit(told(), "hello").identical
    assert audit(told(), PROMPTS[0], k=4, loop="device").identical
    assert audit(told(), PROMPTS[0], stop=[greedy(PROMPTS[0], 9)[0][8]]).identical
    hot = {"temperature": 2.5, "seed": [3, 4, 5], "top_k": 40, "top_p": 0.95, "min_p": 0.01}
    report = audit(told(), PROMPTS[:3], rule="auto", **hot)  # "auto" keeps ids here, whatever the drafter
    assert report.identical
    several = audit(told(), PROMPTS[0], n=3)
    assert [row.prompt for row in several.rows] == [0, 0, 0]


def test_what_cannot_be_audited():
    with pytest.raises(ValueError, match="no drafter"):
        audit(target(), PROMPTS[0])
    with pytest.raises(ValueError, match="rule='reject' keeps the distribution, not the ids"):
        audit(told(), PROMPTS[0], rule="reject", temperature=[1.0])


@pytest.fixture
def broken_acceptance(monkeypatch):
    """An acceptance that keeps one draft too many now and then: drafting changes the output."""
    real = accept._prefix

    def one_more(flags):
        count = real(flags)
        k = flags.shape[1]
        return jnp.where((count > 0) & (count < k), count + 1, count) if k == 4 else count

    monkeypatch.setattr(accept, "_prefix", one_more)
    return uncompiled(told(), 9)


def test_a_broken_acceptance_is_found(broken_acceptance):
    """GRD.2, GRD.6: the prompts that change are counted, with the first difference and its logit gap."""
    params = broken_acceptance
    report = audit(params, PROMPTS[:3])
    plain = audit_plain(params, PROMPTS[:3])
    assert not report.identical
    assert report.changed == 3
    for row, prompt, tokens in zip(report.rows, PROMPTS, plain, strict=False):
        drafted = specjax.decode(params, PROMPTS[:3], **OPTIONS).tokens[row.prompt]
        at = next(i for i, (a, b) in enumerate(zip(tokens, drafted, strict=True)) if a != b)
        assert (row.position, row.first_divergence) == (at, at)
        assert (row.plain_token, row.speculative_token) == (tokens[at], drafted[at])
        logits = whole_pass(params, prompt + tokens[:at])[-1]
        gap = logits[tokens[at]] - logits[drafted[at]]
        assert row.gap == row.logit_gap == pytest.approx(gap, abs=1e-3)
        assert row.gap > identity.NEAR_TIE
    assert report.near_ties == 0
    text = str(report)
    assert "0 identical, 3 changed (0 near-ties" in text
    assert f"prompt 1: differs at token {report.rows[1].position}" in text


def audit_plain(params, prompts):
    return specjax.decode(identity.without_drafter(params), prompts, **OPTIONS).tokens


def test_one_output_may_end_before_the_other(broken_acceptance):
    """GRD.6: with a stop only one of them meets."""
    plain = audit_plain(broken_acceptance, PROMPTS[:3])
    drafted = specjax.decode(broken_acceptance, PROMPTS[:3], **OPTIONS).tokens
    at = next(i for i, (a, b) in enumerate(zip(plain[0], drafted[0], strict=True)) if a != b)
    report = audit(broken_acceptance, PROMPTS[:3], stop=[drafted[0][at]])
    assert not report.rows[0].identical
    assert str(report)


def test_reports_in_words():
    stats = specjax.decode(target(), PROMPTS[0], **OPTIONS).stats
    rows = [Row(0, True), Row(1, False, 3, 5, 6, 1e-4), Row(2, False, 7), Row(3, False, 2, 8, 9, 1.5)]
    report = Report(rows, "float32", stats, stats)
    assert (report.identical, report.changed, report.near_ties) == (False, 3, 1)
    text = str(report)
    assert "prompt 1: differs at token 3: plain 5, speculative 6, float32 logit gap 0.0001" in text
    assert "prompt 2: one output ends at token 7, the other goes on" in text
    assert "prompt 0" not in text


def test_low_precision_is_judged_in_float32():
    """GRD.2: the gap is computed in float32 whatever the weights are."""
    half = specjax.cast(target(), "bfloat16")
    exact = half.replace(target=specjax.cast(half, "float32").target)
    text = PROMPTS[2] + greedy(PROMPTS[2], 20)[0]
    logits = identity.prefix_logits(half, text)
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, whole_pass(exact, text)[-1], atol=1e-4)
    report = audit(with_meta(specjax.cast(told(), "bfloat16")), PROMPTS[:3])
    assert report.dtype == "bfloat16"
    for row in report.rows:  # differences, if any, are near-ties at this precision
        assert row.identical or row.gap < 0.5


def test_rounding_is_told_from_mistakes(monkeypatch):
    """GRD.2: where blocks round otherwise than single steps, by a bfloat16 step, the two candidates lie
    within the two steps that docs/exactness.md allows, and the report says where and by how much."""
    module = registry.target("llama")

    def rounded(p, cfg, hidden, real=module.unembed):
        logits = real(p, cfg, hidden)
        step = 2.0 ** (jnp.floor(jnp.log2(jnp.max(logits, -1, keepdims=True))) - 7)
        noise = jax.random.rademacher(jax.random.key(0), logits.shape[-1:], logits.dtype)
        return logits + step * noise * (hidden.shape[1] > 1)

    params = specjax.cast(uncompiled(told(), 11), "bfloat16")
    options = OPTIONS | {"max_new_tokens": 110}
    plain = specjax.decode(identity.without_drafter(params), PROMPTS, **options).tokens
    monkeypatch.setattr(module, "unembed", rounded)  # the plain program is compiled already
    monkeypatch.delattr(module, "best")  # greedy acceptance reads the logits
    report = audit(params, PROMPTS, **options)
    monkeypatch.undo()
    assert 0 < report.changed < len(PROMPTS)
    for row in report.rows:
        if not row.identical:
            logits = identity.prefix_logits(params, PROMPTS[row.prompt] + plain[row.prompt][: row.position])
            assert 0 < row.gap <= 2 * 2.0 ** (np.floor(np.log2(logits.max())) - 7)
            assert f"prompt {row.prompt}: differs at token {row.position}" in str(report)


def test_an_interrupted_audit_reports_nothing(monkeypatch):
    """Half an output is no difference."""

    def read(records, real=loop.read):
        if records and any(e.width[0] > 0 for e in records):
            raise KeyboardInterrupt
        return real(records)

    monkeypatch.setattr(loop, "read", read)
    with pytest.raises(KeyboardInterrupt):
        audit(told(), PROMPTS[0])


def test_a_plain_copy_shares_the_weights():
    alone = identity.without_drafter(told())
    assert alone.target is told().target
    assert dataclasses.replace(told().meta, drafter=None, drafter_cfg=None) == alone.meta
