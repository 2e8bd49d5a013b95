"""Reading the prompt: the first token and the drafter's view do not depend on buckets, chunks or drafting."""

import functools

import jax
import numpy as np
import pytest
from tiny_models import CONTEXT, VOCAB, ngram_params, target, whole_pass, with_drafter

import specjax
from specjax import testing

EDGES = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65]
TEXT = np.random.default_rng(0).integers(4, VOCAB, CONTEXT).tolist()


def first(params, prompt, **options):
    """First token and its log-probability."""
    options |= {"max_new_tokens": 1, "max_len": CONTEXT, "logprobs": True}
    out = specjax.decode(params, prompt, **options)
    # the prefill itself draws it, also where the prompt ends at the very edge of a pass
    assert specjax.start(params, prompt, **options).length.tolist() == [len(prompt) + 1]
    ((tokens,), (score,)) = out.tokens, out.logprobs
    return tokens, score


@pytest.mark.parametrize("length", EDGES)
def test_first_token_around_every_edge(length):
    """GRD.4: the same first logits with and without a drafter, equal to one plain pass over the prompt."""
    prompt = TEXT[:length]
    logits = whole_pass(target(), prompt)[-1].astype(np.float64)
    expected = logits - np.logaddexp.reduce(logits)
    token, score = first(target(), prompt)
    assert token == logits.argmax()
    assert score == pytest.approx(expected[token], abs=1e-4)
    for params in (ngram_params(), witness()[0]) if length < 20 else (ngram_params(),):
        assert first(params, prompt) == (token, pytest.approx(score, abs=1e-5))


@pytest.mark.parametrize("length", [length for length in EDGES if length > 15])
def test_first_token_in_chunks(length):
    """GRD.4, PFX.1: prompts read in several passes, whose edges lie at every place of the last one."""
    expected = first(target(), TEXT[:length])
    for params in (target(), ngram_params()):
        token, score = first(params, TEXT[:length], prefill_chunk=16)
        assert (token, score) == (expected[0], pytest.approx(expected[1], abs=1e-5))


@functools.cache
def witness():
    """Told the continuation of a prompt of 50 tokens; writes down everything that it absorbs."""
    tokens = specjax.decode(target(), TEXT[:50], max_new_tokens=40).tokens
    weights = testing.telling([(TEXT[:50], tokens)], "EVERY_THIRD_WRONG", size=CONTEXT, texts=8)
    cfg = testing.ToldConfig(4, VOCAB, texts=8, size=CONTEXT)
    return with_drafter(target(), "specjax.testing:WITNESS", cfg, weights), tokens


@pytest.mark.parametrize("chunk", [16, 32, 64])
def test_chunks_leave_no_trace(chunk):
    """PFX.1: ids, the drafter's inputs and cache, and its first proposal."""
    params, tokens = witness()
    options = {"max_new_tokens": 40, "prefill_chunk": chunk}
    out = specjax.decode(params, TEXT[:50], **options)
    assert out.tokens == tokens
    assert out.stats.accepted > 0
    one, many = (specjax.start(params, TEXT[:50], **options | {"prefill_chunk": c}) for c in (64, chunk))
    for a, b in zip(jax.tree.leaves(one.drafter), jax.tree.leaves(many.drafter), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
    assert int(many.drafter.count[0]) == 50
    assert int(many.length[0]) == 51
    step = jax.jit(specjax.draft_step)
    proposals = [step(params, state)[0] for state in (one, many)]
    assert proposals[0].tokens.tolist() == proposals[1].tokens.tolist()
    assert proposals[0].tokens[0, 0] == tokens[1]
    assert proposals[0].count.tolist() == proposals[1].count.tolist() == [4]


def test_a_ragged_batch_in_chunks():
    """PFX.1, BAT.6: rows whose prompts end in different chunks."""
    prompts = [TEXT[:n] for n in (50, 3, 17)]
    whole = specjax.decode(target(), prompts, max_new_tokens=20)
    for params in (target(), ngram_params()):
        parts = specjax.decode(params, prompts, max_new_tokens=20, prefill_chunk=16)
        assert parts.tokens == whole.tokens
    assert [specjax.decode(target(), p, max_new_tokens=20).tokens for p in prompts] == whole.tokens


def test_a_stop_as_first_token_in_an_early_chunk():
    """BAT.4: a short prompt's row ends while a long one is still being read."""
    prompts = [TEXT[:3], TEXT[:50], TEXT[:17]]
    whole = specjax.decode(target(), prompts, max_new_tokens=20).tokens
    stop = whole[0][0]
    parts = specjax.decode(target(), prompts, max_new_tokens=20, prefill_chunk=16, stop=[stop])
    cut = lambda row: row[: row.index(stop) + 1] if stop in row else row  # noqa: E731
    assert parts.tokens == [cut(row) for row in whole]
    assert len(parts.tokens[0]) == 1
