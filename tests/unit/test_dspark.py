"""DSpark: the corrected walk, what it was drawn from, and the cut by confidence."""

import dataclasses
import functools
import itertools

import block_tiny as tiny
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_tiny import BLOCK, DEEPSPEC, SPECULATORS, ZLAB, change, folder, load
from scipy import stats

import specjax
from specjax import registry, testing
from specjax.drafters import dspark, markov
from specjax.types import TapSpec

PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6, 5]]


def heads(kind: str):
    return {"markov": markov.Settings(6, kind, tiny.VOCAB)}


@functools.cache
def params(kind: str = "vanilla", **changes):
    return tiny.params("dspark", **heads(kind), **changes)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_q_is_what_was_sampled(kind):
    """Each draft is the arg-max of log q plus its noise, and q the softmax of logits corrected by the token before
    it. VOC.1: of a reduced vocabulary, the tokens before are target ids."""
    rows, ids = 5, jnp.array([1, 2, 3, 5, 8, 13, 20, 21, 22, 0], jnp.int32)
    p, rng = params(kind, draft_vocab=10, own_head=10), np.random.default_rng(0)
    head, cfg = p.drafter.markov, p.meta.drafter_cfg.markov
    hidden = jnp.asarray(rng.standard_normal((rows, 4, 32)), jnp.float32)
    logits = jnp.asarray(rng.standard_normal((rows, 4, 10)), jnp.float32)
    keys, heat = jax.random.split(jax.random.key(3), rows), jnp.linspace(0.5, 1.5, rows)
    walk = jax.jit(markov.walk, static_argnums=1)
    tokens, q, before = walk(head, cfg, hidden, logits, jnp.arange(rows), ids, keys, heat)
    previous = np.concatenate([np.arange(rows)[:, None], np.asarray(tokens)[:, :-1]], 1)
    np.testing.assert_array_equal(before, np.asarray(head.before)[previous])
    bias = slow_bias(head, cfg, np.asarray(before), np.asarray(hidden))
    weights = np.exp((np.asarray(logits) + bias) / np.asarray(heat)[:, None, None])
    np.testing.assert_allclose(q, weights / weights.sum(-1, keepdims=True), atol=1e-5)
    noise = [[jax.random.gumbel(jax.random.fold_in(key, t), (10,)) for t in range(4)] for key in keys]
    drawn = np.argmax(np.log(np.asarray(q)) + np.asarray(noise), -1)
    assert np.asarray(ids)[drawn].tolist() == tokens.tolist()


def slow_bias(head, cfg, before, hidden):
    """The correction position by position, in float64."""
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    w2 = np.asarray(head.after, np.float64)
    state, out = np.zeros((len(before), cfg.rank)), []
    for t in range(before.shape[1]):
        x, h = before[:, t], hidden[:, t]
        if cfg.kind == "gated":
            x = sigmoid(np.concatenate([h, x], -1) @ head.mix.T + head.bias) * x
        elif cfg.kind == "rnn":
            mixed = np.concatenate([state, x, h], -1) @ head.mix.T + head.bias
            gate, candidate, last = np.split(mixed, 3, -1)
            state = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(candidate)
            x = np.tanh(last)
        out.append(x @ w2.T)
    return np.stack(out, 1)


def test_confidence_knows_earlier_drafts_only():
    """A draft's chance does not depend on the draft: whatever position t draws, chances up to t are the same."""
    p, rng = params(), np.random.default_rng(1)
    hidden = jnp.asarray(rng.standard_normal((3, 4, 32)), jnp.float32)
    logits = jnp.asarray(rng.standard_normal((3, 4, tiny.VOCAB)), jnp.float32)

    @jax.jit
    def run(logits):
        args = (jnp.arange(3), None, None, None)
        tokens, _, before = markov.walk(p.drafter.markov, p.meta.drafter_cfg.markov, hidden, logits, *args)
        return tokens, markov.confidence(p.drafter.confidence, hidden, before)

    tokens, sure = run(logits)
    for t in range(4):
        others, again = run(logits.at[:, t].multiply(-3))
        assert (others[:, t] != tokens[:, t]).all()
        np.testing.assert_array_equal(again[:, : t + 1], sure[:, : t + 1])
        assert t == 3 or (again[:, t + 1] != sure[:, t + 1]).all()


def test_cut_is_per_position():
    """The first chance below the threshold ends the proposal; chances are not multiplied."""
    sure = jnp.array([[0.9, 0.2, 0.95], [0.8, 0.8, 0.8], [0.1, 0.9, 0.9], [0.6, 0.6, 0.59]])
    assert dspark.cut(sure, 0.6).tolist() == [1, 3, 0, 2]
    assert dspark.cut(sure, 0.0).tolist() == [3] * 4


def test_threshold_changes_proposals_and_not_the_text():
    """CTX.3: with a threshold fewer than k drafts a round, sometimes none, and the same text."""
    plain = specjax.decode(tiny.target(), PROMPTS[0], max_new_tokens=40, ignore_eos=True)
    p = params(confidence_threshold=0.55)
    out = specjax.decode(p, PROMPTS[0], max_new_tokens=40, ignore_eos=True)
    assert out.tokens == plain.tokens
    assert 0 < out.stats.proposed_at[0] < out.stats.rounds
    assert out.stats.proposed < 3 * out.stats.rounds
    assert dspark.varies(p.meta.drafter_cfg)
    assert not dspark.varies(params().meta.drafter_cfg)


FEW = 4


@pytest.mark.long
def test_cut_keeps_the_distribution():
    """With drafts drawn, tested and cut, three tokens have the target's joint law."""
    target = testing.tiny_params(2, vocab=FEW, sharpness=1.0)
    p = testing.tiny_drafter(
        target, "dspark", 5, markov=markov.Settings(6, "vanilla", FEW), confidence_threshold=0.4
    )
    n = 3000
    out = specjax.decode(
        p, [1, 2, 3], max_new_tokens=6, temperature=1.0, n=n, rows=n, rule="reject", ignore_eos=True, seed=7
    )
    proposed = sum(s.proposed for s in out.stats) / sum(s.rounds for s in out.stats)
    assert 0.5 < proposed < 2.5  # some proposals are cut, some are not
    seen = np.zeros((FEW,) * 3)
    for tokens in out.tokens:
        seen[tuple(tokens[:3])] += 1
    expected = law(target, [1, 2, 3])
    expected = n * expected / expected.sum()  # of float32 logits
    assert stats.chisquare(seen.ravel(), expected.ravel()).pvalue > 1e-4
    wrong = expected[::-1].ravel()  # and the test can tell laws apart
    assert stats.chisquare(seen.ravel(), wrong).pvalue < 1e-7


def law(target, prompt):
    """Joint law of three tokens at temperature 1."""
    family, cfg = registry.target(target.meta.family), target.meta.target_cfg
    ids = jnp.array([[*prompt, *pair] for pair in itertools.product(range(FEW), repeat=2)], jnp.int32)
    rows, size = ids.shape
    pos = jnp.broadcast_to(jnp.arange(size), ids.shape)
    cache = family.init_cache(cfg, rows, size, 1, jnp.float32)
    out = family.forward(
        target.target, cfg, ids, pos, jnp.full((rows,), size, jnp.int32), cache, TapSpec(), "extend"
    )
    probs = np.asarray(jax.nn.softmax(family.unembed(target.target, cfg, out.hidden[:, -3:]), -1), np.float64)
    probs = probs.reshape(FEW, FEW, 3, FEW)
    return probs[0, 0, 0][:, None, None] * probs[:, 0, 1][:, :, None] * probs[:, :, 2]


def test_refused_configs():
    """A head the settings speak of must be there; thresholds are chances."""
    cfg = params().meta.drafter_cfg
    for wrong, message in (
        ({"confidence_threshold": 1.5}, "from 0 .off. to 1"),
        ({"confidence": False, "confidence_threshold": 0.5}, "no confidence head"),
        ({"markov": None}, "no Markov head"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(cfg, **wrong)


HEADS = {
    "markov_rank": 6,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("origin", ["deepspec", "speculators", "specforge"])
def test_files_with_heads(tmp_path, origin, kind):
    """CKP.2, CKP.1: the kind comes from the tensors; flat or nested, both formats give the same heads."""
    p, said = params(kind, rows=5, k=5), {**HEADS, "markov_head_type": kind}
    config = {
        "deepspec": {**DEEPSPEC, **said},
        "speculators": {
            **SPECULATORS,
            **said,
            "speculators_model_type": "dspark",
            "sample_from_anchor": True,
        },
        "specforge": {**ZLAB, "architectures": ["DSparkDraftModel"], "dflash_config": {**BLOCK, **said}},
    }[origin]
    found = load(folder(tmp_path, config, p), confidence_threshold=0.3)
    drafts = 4 if origin == "speculators" else 5  # as the file says; the others do not
    assert (found.name, found.cfg.layout, found.cfg.k) == ("dspark", "shift", drafts)
    assert found.cfg.markov == p.meta.drafter_cfg.markov
    assert found.cfg.confidence_markov
    assert found.cfg.confidence_threshold == 0.3
    np.testing.assert_array_equal(found.weights.markov.before, p.drafter.markov.before)
    np.testing.assert_array_equal(found.weights.confidence.bias, p.drafter.confidence.bias)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"markov_head_type": "rnn"}, "markov_head_type='rnn', the tensors say 'vanilla'"),
        ({"markov_rank": 256}, "markov_rank=256, the tensors say 6"),
        ({"enable_confidence_head": False}, "enable_confidence_head=False, the tensors say True"),
        ({"confidence_head_with_markov": False}, "confidence_head_with_markov=False, the tensors say True"),
    ],
)
def test_flags_against_tensors(tmp_path, said, message):
    """TAP.8: a flag that the tensors contradict is an error."""
    with pytest.raises(ValueError, match=message):
        load(folder(tmp_path, {**DEEPSPEC, **HEADS, **said}, params()))


def test_deepspec_without_heads_is_dflash(tmp_path):
    """CKP.3: the class is the same; a missing head that the config promises is an error."""
    config = {**DEEPSPEC, "markov_rank": 0, "enable_confidence_head": False}
    assert load(folder(tmp_path / "a", config)).name == "dflash"
    with pytest.raises(ValueError, match="markov_rank=6, the tensors say 0"):
        load(folder(tmp_path / "b", {**DEEPSPEC, **HEADS}))
    with pytest.raises(ValueError, match=r"confidence_head\.proj\.bias"):
        load(
            change(folder(tmp_path / "c", {**DEEPSPEC, **HEADS}, params()), confidence_head__proj__bias=None)
        )
