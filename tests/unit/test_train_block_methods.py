"""Training of DFlash and DSpark drafters: configs, initial weights, losses, and a short run that must pay."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import train_blocks as tiny
from block_tiny import shared

from specjax import registry, testing
from specjax.drafters import dflash as decoding, dflash2
from specjax.drafters.dflash_config import Convolution
from specjax.train import block, step
from specjax.train.methods import dflash, dspark
from specjax.train.types import Terms

SMOLLM2 = testing.tiny_config(
    vocab=49152, width=576, layers=30, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
    intermediate_size=1536, rope_theta=1e5,
)  # fmt: skip


def target_cfg(hf=SMOLLM2):
    return registry.target(hf["model_type"]).config(hf)


def test_usual_shape():
    """Four layers like the target's, seven drafts from seven rows, five taps by z-lab's rule."""
    cfg = dflash.config({"mask_id": 16}, target_cfg())
    assert cfg.taps == (2, 9, 15, 21, 28)  # behind layers 1, 8, 14, 20, 27
    assert (cfg.layout, cfg.rows, cfg.k, cfg.mask_id) == ("shift", 7, 7, 16)
    assert (cfg.body.layers, cfg.body.heads, cfg.body.kv_heads, cfg.body.mlp_size) == (4, 9, 3, 1536)
    assert cfg.body.rope.theta == 1e5
    assert not any(cfg.causal)
    size = lambda how, c: sum(np.prod(x.shape) for x in jax.tree.leaves(  # noqa: E731
        registry.drafter(how).abstract(c), is_leaf=lambda s: hasattr(s, "names")))  # fmt: skip
    assert size("dflash", cfg) == pytest.approx(15.8e6, rel=0.01)
    spark = dspark.config({"mask_id": 16}, target_cfg())
    assert (spark.markov.rank, spark.markov.kind, spark.markov.vocab) == (64, "vanilla", 49152)
    assert spark.confidence
    assert spark.confidence_markov
    assert size("dspark", spark) == pytest.approx(22.1e6, rel=0.01)
    assert dflash.usual_taps(2) == (0, 1, 2)
    assert dflash.usual_taps(9) == (2, 3, 5, 6, 7)


def test_settings():
    """What is asked for is what the config says."""
    asked = {
        "mask_embedding": True, "layers": 2, "drafts": 4, "layout": "fill", "taps": (1, 30), "k": 3,
        "transformer": {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64},
        "causal": (False, True), "window_from": "anchor", "draft_vocab": range(100), "conv": (2, 16),
    }  # fmt: skip
    cfg = dflash.config(asked, target_cfg())
    assert (cfg.rows, cfg.k, cfg.taps, cfg.body.windows) == (5, 3, (1, 30), (None, 64))
    assert (cfg.causal, cfg.window_from, cfg.draft_vocab, cfg.own_head) == ((False, True), "anchor", 100, 100)
    assert (cfg.mask_embedding, cfg.conv) == (True, Convolution(2, 16))
    plain = dspark.config({"mask_id": 1, "markov_rank": 0, "confidence": False}, target_cfg())
    assert (plain.markov, plain.confidence, plain.confidence_markov) == (None, False, False)
    gated = dspark.config({"mask_id": 1, "markov_kind": "gated", "body": "gemma4"}, target_cfg())
    assert (gated.markov.kind, gated.body.flavour) == ("gated", "gemma4")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "needs a mask: mask_id="),
        ({"mask_id": 49152}, "outside the embedding"),
        ({"mask_id": 1, "layers": 0}, "layers must be a whole number"),
        ({"mask_id": 1, "drafts": True}, "drafts must be a whole number"),
        ({"mask_id": 1, "body": "mamba"}, "body must be one of qwen3, gemma4"),
        ({"mask_id": 1, "depth": 3}, "does not know the setting"),
        ({"mask_id": 1, "taps": (1, 31)}, "the target has 30"),
        ({"mask_id": 1, "draft_vocab": 50000}, "from 1 to the target's 49152"),
        ({"mask_id": 1, "markov_kind": "lstm"}, "Markov head must be one of"),
    ],
)
def test_settings_that_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        dspark.config(settings, target_cfg())


def tiny_cfg(how, **settings):
    p = tiny.target()
    return how.config({"mask_id": 7, "layers": 2, "drafts": 4, **settings}, p.meta.target_cfg)


def test_initial_weights():
    """Tables and final norm are the target's; heads and convolutions change nothing at first."""
    p = tiny.target()
    lent = shared(p)
    cfg = tiny_cfg(dspark, draft_vocab=5, mask_embedding=True, markov_kind="rnn")
    made = dspark.init(cfg, p.target, lent, jax.random.key(0), [0, 2, 3, 6, 7])
    ids = decoding.target_ids(made.backbone)
    assert ids.tolist() == [0, 2, 3, 6, 7]
    np.testing.assert_array_equal(made.backbone.head, lent.head[ids])
    np.testing.assert_array_equal(made.backbone.norm, p.target.norm)
    np.testing.assert_array_equal(made.backbone.mask, lent.embed[7])
    assert not made.markov.after.any()
    assert 0.08 < made.markov.before.std() < 0.12
    trained, fixed = step.split(made, dspark.frozen(cfg))
    assert trained.backbone.head is fixed.backbone.norm is trained.backbone.d2t is None
    assert trained.backbone.mask is not None
    with pytest.raises(ValueError, match="4 different ids, the drafter's config 5"):
        dspark.init(cfg, p.target, lent, jax.random.key(0), [0, 2, 3, 6])

    plain = dflash.config({"mask_id": 7, "layers": 2, "drafts": 4}, p.meta.target_cfg)
    more = dataclasses.replace(plain, conv=Convolution(2, 8))
    a, b = (dflash.init(c, p.target, lent, jax.random.key(0)) for c in (plain, more))
    x = jax.random.normal(jax.random.key(1), (2, 4, 32))
    np.testing.assert_array_equal(dflash2.around(b.convs[0].mlp, more.conv, x, lambda y: 2 * y), 2 * x)
    assert a.convs is None
    with pytest.raises(ValueError, match="to freeze"):
        step.split(made, ("backbone.top",))


def random_batch(cfg, seed=0):
    batch = tiny.batch(seed=seed)
    return batch, tiny.features(cfg, batch)


@functools.cache
def loss_of(kind: str, terms: Terms, **changes):
    """Loss, metrics and gradients of a kind on a random batch."""
    p, how = tiny.params(kind), tiny.method(kind)
    cfg = p.meta.drafter_cfg
    batch, given = random_batch(cfg)
    recipe = how.recipe(**{"terms": terms, "anchors": 9, "chunks": 2, **changes})
    run = lambda w: how.loss(w, shared(p), cfg, recipe, batch, given, jax.random.key(3))  # noqa: E731
    (value, found), slopes = jax.jit(jax.value_and_grad(run, has_aux=True, allow_int=True))(p.drafter)
    return value, found, slopes


DEEPSPEC = (("ce", 0.1), ("l1", 0.9), ("confidence", 1.0))


@pytest.mark.parametrize("kind", ["rnn", pytest.param("vanilla", marks=pytest.mark.long)])
def test_deepspecs_loss_summed_out(kind):
    """The terms, their weights by position, the confidence and its label, position by position in float64."""
    p, cfg = tiny.params(kind), tiny.params(kind).meta.drafter_cfg
    batch, given = random_batch(cfg)
    places = block.anchors(batch, 9, jax.random.key(3))
    truth = jax.tree.map(np.asarray, block.labels(batch, cfg, places))
    hidden = block.rows(tiny.backbone(p), shared(p), cfg, batch, given, places.at)
    base = np.asarray(
        decoding.unembed(tiny.backbone(p), shared(p), cfg, hidden.reshape(-1, 4, 32)), np.float64
    )
    taught = np.asarray(block.teacher(given.hidden, cfg, places)) @ np.asarray(shared(p).head, np.float64).T
    vectors, before = dspark.forced(p.drafter.markov, cfg.markov, jnp.asarray(truth.previous), hidden)
    logits = (
        base.reshape(*truth.tokens.shape, -1)
        + np.asarray(vectors, np.float64) @ np.asarray(p.drafter.markov.after).T
    )
    q, t = (np.exp(x - x.max(-1, keepdims=True)) for x in (logits, taught))
    q, t = q / q.sum(-1, keepdims=True), t / t.sum(-1, keepdims=True)
    ce = -np.log(np.take_along_axis(q, truth.tokens[..., None], -1)[..., 0])
    l1 = np.abs(q - t).sum(-1)
    read = (
        np.concatenate([hidden, before], -1) @ np.asarray(p.drafter.confidence.weight)[0]
        + p.drafter.confidence.bias
    )
    sure, label = 1 / (1 + np.exp(-np.asarray(read, np.float64))), 1 - l1 / 2
    bce = -(label * np.log(sure) + (1 - label) * np.log(1 - sure))
    weight = truth.counted * np.exp(-np.arange(4) / 4)
    mean = lambda x: np.nansum(np.where(weight > 0, weight * x, 0)) / weight.sum()  # noqa: E731
    value, found, _ = loss_of(kind, DEEPSPEC)
    assert value == pytest.approx(0.1 * mean(ce) + 0.9 * mean(l1) + mean(bce), rel=1e-5)
    right = (logits.argmax(-1) == truth.tokens) & truth.counted
    for i in range(4):
        total, n = found[f"accuracy_{i}"]
        assert (int(total), int(n)) == (right[..., i].sum(), truth.counted[..., i].sum())
    total, n = found["tau"]
    assert total / n == pytest.approx(1 + np.cumprod(right, -1).sum() / truth.counted[..., 0].sum())
    assert found["loss"][0] / found["loss"][1] == pytest.approx(float(value), rel=1e-6)
    assert found["confidence"][0] / found["confidence"][1] == pytest.approx(
        bce[truth.counted].mean(), rel=1e-4
    )


@pytest.mark.parametrize(
    ("kind", "terms", "changes"),
    [
        pytest.param("dflash2", (("ce", 1.0), ("selector", 1.0)), {}, marks=pytest.mark.long),
        pytest.param("reduced", (("kl", 1.0),), {}, marks=pytest.mark.long),
        pytest.param("reduced rnn", (("ce", 0.1), ("l1", 0.9)), {}, marks=pytest.mark.long),
        pytest.param("mask", (("ce", 1.0),), {"dpace": 0.5}, marks=pytest.mark.long),
        pytest.param("gemma4", (("nla", 1.0),), {}, marks=pytest.mark.long),
        pytest.param("gated", DEEPSPEC, {"dpace": 0.5}, marks=pytest.mark.long),
    ],
)
def test_gradients_are_slopes(kind, terms, changes):
    """A step along the gradient changes the loss by as much as the gradient says, and every trained array has one."""
    p, how = tiny.params(kind), tiny.method(kind)
    cfg = p.meta.drafter_cfg
    batch, given = random_batch(cfg)
    value, _, slopes = loss_of(kind, terms, **changes)
    assert np.isfinite(value)
    trained, _ = step.split(p.drafter, how.frozen(cfg))
    slope = jax.tree.map(lambda w, g: None if w is None else g, trained, slopes, is_leaf=lambda x: x is None)
    for path, x in jax.tree_util.tree_leaves_with_path(slope):
        assert np.isfinite(x).all(), path
        assert np.abs(x).max() > 0 or "confidence" in str(path), path
    if "dpace" in changes:
        return  # its weights are not differentiated
    norm = np.sqrt(sum(float(jnp.sum(x * x)) for x in jax.tree.leaves(slope)))
    recipe = how.recipe(terms=terms, anchors=9, chunks=2)
    run = jax.jit(lambda w: how.loss(w, shared(p), cfg, recipe, batch, given, jax.random.key(3))[0])
    size = 2e-3 / norm
    moved = lambda sign: step.merge(  # noqa: E731
        jax.tree.map(lambda w, g: w + sign * size * g, trained, slope),
        step.split(p.drafter, how.frozen(cfg))[1],
    )
    assert run(moved(1)) - run(moved(-1)) == pytest.approx(2 * size * norm**2, rel=0.05)


def test_terms_that_the_drafter_has_no_part_for():
    for kind, terms, words in (
        ("fill", (("ce", 1.0), ("selector", 1.0)), "needs a drafter with a candidate selector"),
        ("fill", (("confidence", 1.0),), "give each once"),
        ("rnn", (("selector", 1.0),), "give each once"),
    ):
        with pytest.raises(ValueError, match=words):
            loss_of(kind, terms)
    for change in ({"anchors": 0}, {"gamma": 0.0}, {"dpace": 1.5}):
        with pytest.raises(ValueError, match=next(iter(change))):
            loss_of("fill", (("ce", 1.0),), **change)
    p = tiny.params("rnn")
    bare = dataclasses.replace(p.meta.drafter_cfg, confidence=False, confidence_markov=False)
    batch, given = random_batch(bare)
    weights = dataclasses.replace(p.drafter, confidence=None)
    with pytest.raises(ValueError, match="needs a drafter with a confidence head"):
        dspark.loss(weights, shared(p), bare, dspark.recipe(), batch, given, jax.random.key(0))
