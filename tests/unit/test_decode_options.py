"""Sampling options of ``specjax.decode``: log-probabilities, seeds, the defaults of the model, penalties, bias."""

import jax.numpy as jnp
import numpy as np
import pytest
from decoding import BOTH, HOT, TOLERANCE, decode, only, sound
from tiny_models import (
    CONTEXT,
    PROMPTS,
    VOCAB,
    greedy,
    ngram_params,
    scores_of,
    target,
    token,
    told,
    whole_pass,
    with_drafter,
    with_meta,
)

from specjax import testing

# --- log-probabilities


def test_log_probabilities_are_the_targets_own():
    """LGP.1: accepted, corrected and bonus tokens, against one pass over the whole text."""
    for prompt in PROMPTS[:3]:
        completion = only(decode(told(), prompt))
        assert 0 < sum(completion.drafted) < len(completion.tokens)
        expected = scores_of(target(), prompt, completion.tokens)
        np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE)


# --- seeds, samples, options per prompt


@BOTH
def test_seeds(params):
    """RNG.1: the same seed gives the same ids, another one others, however large it is; log-probabilities are
    raw (LGP.1), and the seed is in the result."""
    params = params()
    seeds = [0, 1, 2**31, 2**32, 2**32 + 1, 2**63, 2**64 + 1]
    outs = [decode(params, PROMPTS[0], seed=s, rule="match", **HOT) for s in seeds]
    assert len({tuple(out.tokens) for out in outs}) == len(seeds)
    again = decode(params, PROMPTS[0], seed=2**32, rule="match", **HOT)
    assert again.tokens == outs[3].tokens
    assert [out.stats.seed for out in outs] == seeds
    np.testing.assert_allclose(
        outs[0].logprobs, scores_of(target(), PROMPTS[0], outs[0].tokens), atol=TOLERANCE
    )


def test_the_drafter_does_not_change_a_sample():
    """RNG.1, DST.1: with rule "match" and the same seed."""
    plain = decode(target(), PROMPTS[3], seed=4, **HOT)
    drafted = decode(ngram_params(), PROMPTS[3], seed=4, rule="match", **HOT)
    assert drafted.tokens == plain.tokens
    assert drafted.stats.proposed > 0


def test_a_sample_depends_on_its_own_row_only():
    """RNG.2, DST.6: neither on the neighbours, their seeds and options, nor on the place in the batch."""
    prompts, seeds = PROMPTS[:3], [7, 8, 9]
    options = {
        "temperature": [1.0, 2.0, 3.0],
        "top_k": [0, 30, 5],
        "top_p": [0.9, 1.0, 0.8],
        "min_p": [0, 0.02, 0],
    }
    alone = []
    for i in range(3):
        own = {name: [values[i], *HOT_TWICE[name]] for name, values in options.items()}
        alone.append(decode(told(), [prompts[i], [71], [72]], seed=[seeds[i], 1, 2], **own).tokens[0])
    assert decode(told(), prompts, seed=seeds, **options).tokens == alone
    order = (2, 0, 1)
    turned = {name: [values[i] for i in order] for name, values in options.items()}
    out = decode(told(), [prompts[i] for i in order], seed=[seeds[i] for i in order], **turned)
    assert out.tokens == [alone[i] for i in order]


HOT_TWICE = {name: [value, value] for name, value in HOT.items()}


@pytest.mark.parametrize("sampled", [False, True], ids=["point mass", "drawn drafts"])
def test_the_rejection_rule_keeps_scores_seeds_and_greedy_rows(sampled):
    """LGP.1, RNG.1, DST.6: accepted, corrected and bonus tokens carry the target's own log-probability; the
    same seed gives the same ids; a greedy row between sampled ones stays greedy."""
    drawn = with_drafter(target(), "specjax.testing:SAMPLED", testing.bigram(4, VOCAB))
    params = drawn if sampled else told("ALWAYS_RIGHT")
    options = {"temperature": [2.5, 0.0, 2.5], "seed": 3, "rule": "reject"}
    out = decode(params, PROMPTS[:3], **options)
    for prompt, (completion,) in zip(PROMPTS, out.completions, strict=False):
        expected = scores_of(target(), prompt, sound(completion).tokens)
        np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE)
    assert out.tokens[1] == greedy(PROMPTS[1], 40)[0]
    assert out.tokens[0] != greedy(PROMPTS[0], 40)[0]
    assert out.total.accepted > 0
    assert decode(params, PROMPTS[:3], **options).tokens == out.tokens
    assert decode(params, PROMPTS[:3], **options | {"seed": 4}).tokens[0] != out.tokens[0]


def test_samples_differ_from_one_another():
    """RNG.1: also for the same prompt and seed."""
    out = decode(target(), PROMPTS[0], n=3, seed=3, **HOT)
    assert len({tuple(tokens) for tokens in out.tokens}) == 3
    assert out.tokens == decode(target(), PROMPTS[0], n=3, seed=3, **HOT).tokens
    many = decode(target(), PROMPTS[0], n=5, seed=3, rows=3, **HOT)
    assert many.tokens[:3] == out.tokens


def test_options_reach_the_row_they_were_given_for():
    """DST.6, PEER.3: one row each is made greedy by top-k 1, a tiny top-p and min-p 1; None is the default."""
    prompts = [PROMPTS[0]] * 3
    expected = greedy(PROMPTS[0], 40)[0]
    for name, (on, off) in {"top_k": (1, 0), "top_p": (1e-6, 1.0), "min_p": (1.0, 0.0)}.items():
        for row in range(3):
            values = {"top_k": [0] * 3, "top_p": [1.0] * 3, "min_p": [0.0, 0.0, 1e-9]}
            values |= {"top_k": [VOCAB, 0, 0], "top_p": [1.0, 0.9999999, None]}
            values[name] = [on if i == row else off for i in range(3)]
            out = decode(told(), prompts, temperature=3.0, seed=[1, 2, 3], **values)
            assert [tokens == expected for tokens in out.tokens] == [i == row for i in range(3)]
    mixed = decode(
        told(), prompts, temperature=[3.0, None, 3.0], seed=[1, 2, 3], top_k=50, top_p=0.99, min_p=1e-3
    )
    assert [tokens == expected for tokens in mixed.tokens] == [False, True, False]


def test_numpy_values_are_values():
    """DST.7: numpy and jax scalars and arrays mean what Python numbers mean."""
    plain = decode(target(), PROMPTS[:3], seed=[1, 2, 3], temperature=[0.5, 2.5, 1.5], top_k=40)
    options = {"seed": np.array([1, 2, 3]), "temperature": jnp.array([0.5, 2.5, 1.5]), "top_k": np.int32(40)}
    out = decode(target(), PROMPTS[:3], **options | {"max_new_tokens": np.int64(40)})
    assert out.tokens == plain.tokens


# --- the model's own defaults


def test_temperature_model_takes_the_files_defaults():
    """DST.7: every sampling default of the file; an option given beside it wins."""
    file = tuple(sorted({"do_sample": True, **HOT}.items()))
    params = with_meta(target(), generation=file)
    expected = decode(target(), PROMPTS[0], seed=5, **HOT).tokens
    assert decode(params, PROMPTS[0], seed=5, temperature="model").tokens == expected
    assert decode(params, PROMPTS[0], seed=5).tokens == greedy(PROMPTS[0], 40)[0]
    given = decode(params, PROMPTS[0], seed=5, temperature="model", top_k=3).tokens
    assert given == decode(target(), PROMPTS[0], seed=5, **HOT | {"top_k": 3}).tokens


@pytest.mark.parametrize("file", [{}, {"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"top_k": 50}])
def test_temperature_model_is_greedy_when_the_file_says_so(file):
    params = with_meta(target(), generation=tuple(sorted(file.items())))
    assert decode(params, PROMPTS[0], temperature="model").tokens == greedy(PROMPTS[0], 40)[0]


# --- penalties and bias


def penalised(prompt, n, bias, repetition, presence, frequency, in_prompt=True):
    """The definition, token by token; ``in_prompt=False`` forgets that the prompt counts as a repetition."""
    tokens, out = list(prompt), []
    for _ in range(n):
        logits = whole_pass(target(), tokens)[-1].astype(np.float64)
        for i, value in bias.items():
            logits[i] += value
        for i in set(tokens if in_prompt else out):
            logits[i] = logits[i] / repetition if logits[i] > 0 else logits[i] * repetition
        for i in set(out):
            logits[i] -= presence + frequency * out.count(i)
        out.append(int(np.argmax(logits)))
        tokens.append(out[-1])
    return out


PENALTIES = {
    "repetition": (1.3, 0.0, 0.0),
    "presence": (1.0, 4.0, 0.0),
    "frequency": (1.0, 0.0, 2.5),
    "all": (1.2, 1.5, 0.5),
    "rewards": (0.9, -1.0, -0.5),
}


@pytest.mark.parametrize("values", PENALTIES.values(), ids=PENALTIES)
def test_penalties(values):
    """OPT.2, OPT.4: greedy output follows the definition with and without a drafter, and differs from
    the unpenalised one. Log-probabilities stay raw (LGP.1). The prompt's tokens are ones that the target says."""
    prompt, bias = [token(w) for w in ("ll", "hello", "12", "e", "c")], {75: 3.0, 263: -1.0}
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    # values that change nothing keep every option compiled in, so that all cases share their programs
    inert = dict(zip(names, (1.0000001, 1e-9, 1e-9), strict=True))
    options = {name: v if v not in (0.0, 1.0) else inert[name] for name, v in zip(names, values, strict=True)}
    expected = penalised(prompt, 40, bias, *values)
    assert expected != greedy(prompt, 40)[0]
    assert values[0] == 1.0 or expected != penalised(prompt, 40, bias, *values, in_prompt=False)
    right = testing.telling([(prompt, expected)], "ALWAYS_RIGHT", size=CONTEXT, texts=8)
    for params in (target(), ngram_params(), told().replace(drafter=right)):
        out = decode(params, prompt, logit_bias=bias, **options)
        assert out.tokens == expected
        np.testing.assert_allclose(out.logprobs, scores_of(target(), prompt, out.tokens), atol=TOLERANCE)
        assert params is target() or out.stats.proposed > 0
    assert out.stats.accepted == out.stats.proposed > 0


def test_forbidden_tokens_never_come():
    """OPT.1, PEER.2: neither accepted, corrected nor bonus; greedy and sampled, one bias per row."""
    tokens = greedy(PROMPTS[0], 40)[0]
    banned = {t: float("-inf") for t in set(tokens[:10])}
    only_two = {t: float("-inf") for t in range(VOCAB) if t not in (75, 79)}
    biases = [banned, None, only_two]
    for options in ({}, {"temperature": 4.0, "seed": 3}):
        out = decode(told("ALWAYS_RIGHT"), [PROMPTS[0]] * 3, logit_bias=biases, **options)
        assert not set(out.tokens[0]) & set(banned)
        assert set(out.tokens[2]) <= {75, 79}
        assert options or out.tokens[1] == tokens
    assert set(out.tokens[2]) == {75, 79}
