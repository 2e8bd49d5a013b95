"""What serial drafters look like before training: shapes for any target, initial weights, what is refused."""

import dataclasses
import json

import eagle3_tiny
import families
import gemma_tiny
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import registry, testing
from specjax.config import Meta
from specjax.drafters import eagle3, eagle3_model
from specjax.layers.norm import rms_norm
from specjax.targets import deepseek, qwen3, qwen3_5
from specjax.train import init, methods, shape
from specjax.types import ArraySpec, Params

VOCAB = 64
TARGETS = {
    "llama": testing.tiny_config(VOCAB, layers=6),
    "qwen3": testing.tiny_config(VOCAB, model_type="qwen3"),
    "hybrid": families.HYBRID | {"vocab_size": VOCAB},
    "experts": families.HYBRID_MOE | {"vocab_size": VOCAB},
    "latent": families.LATENT | {"vocab_size": VOCAB},
    "gemma3": gemma_tiny.CONFIGS["gemma3"] | {"vocab_size": VOCAB},
    "gemma4": gemma_tiny.CONFIGS["gemma4_small"] | {"vocab_size": VOCAB},
}
SERIAL = ("eagle3", "mtp", "assistant")


def target_of(name: str):
    """(family, config)."""
    hf = TARGETS[name]
    family = registry.target(hf["model_type"])
    return family, family.config(hf)


def shapes_of(specs):
    made = lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype or jnp.float32)  # noqa: E731
    return jax.tree.map(made, specs, is_leaf=lambda x: isinstance(x, ArraySpec))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", SERIAL)
def test_every_target_gets_a_drafter(name, target):
    """VOC.3, CKP.7: a config from nothing but the target's, with weights of the shapes that decode; and it survives
    being saved."""
    family, target_cfg = target_of(target)
    module = methods.method(name)
    if name == "assistant" and target == "latent":
        with pytest.raises(ValueError, match="keeps no keys and values"):
            module.config({}, target_cfg)
        return
    cfg = module.config({}, target_cfg)
    weights = shapes_of(family.abstract(target_cfg))
    made = jax.eval_shape(
        lambda w: module.init(cfg, w, family.shared(w, target_cfg), jax.random.key(0)), weights
    )
    assert made == shapes_of(registry.drafter(name).abstract(cfg))
    assert set(module.frozen(cfg)) <= {field.name for field in dataclasses.fields(made)}
    assert module.needs(cfg).hidden
    meta = Meta(family=TARGETS[target]["model_type"], target_cfg=target_cfg, drafter=name, drafter_cfg=cfg)
    assert Meta.from_json(json.loads(json.dumps(meta.to_json()))) == meta
    recipe = module.recipe(steps=5)
    assert (recipe.method, recipe.steps) == (name, 5)
    assert hash(recipe) is not None


def test_shapes_follow_the_target():
    """Layers of the target's own kind where it has a layer for prediction, else one of Qwen3.5's kind."""
    cfg = {name: target_of(name)[1] for name in TARGETS}
    mtp = methods.method("mtp")
    kinds = {name: type(mtp.config({}, c).model) for name, c in cfg.items()}
    assert kinds == {
        "llama": qwen3.Config, "qwen3": qwen3.Config, "hybrid": qwen3_5.Config, "experts": qwen3_5.Config,
        "latent": deepseek.Config, "gemma3": qwen3.Config, "gemma4": qwen3.Config,
    }  # fmt: skip
    layer = mtp.config({"heads": 8, "mlp_size": 40}, cfg["llama"]).model
    assert (layer.heads, layer.kv_heads, layer.head_dim, layer.mlp_size) == (8, 2, 8, 40)
    assert (layer.rope.dims, layer.experts) == (8, 0)
    assert mtp.config({}, cfg["experts"]).model.experts == 4
    assert methods.method("eagle3").config({}, cfg["llama"]).taps == (2, 3)
    assert [shape.spread_taps(n) for n in (30, 36, 2, 1)] == [(2, 15, 27), (2, 18, 33), (0, 1, 2), (0, 1)]
    assistant = methods.method("assistant")
    assert assistant.config({}, cfg["llama"]).body.full_layers == (0, 1, 2, 3)
    assert assistant.config({}, cfg["gemma4"]).body.full_layers == (3,)
    assert assistant.config({"layers": ["full", "sliding"]}, cfg["gemma4"]).body.full_layers == (0,)
    latent = methods.method("eagle3").config({"body": "latent"}, cfg["latent"])
    assert latent.mla.rank == cfg["latent"].latent.rank
    assert methods.method("eagle3").config({"body": "gemma4"}, cfg["gemma4"]).body.flavour == "gemma4"


def begun(name: str, **settings) -> tuple[Params, object]:
    """A small target with the initial weights of a drafter."""
    base = eagle3_tiny.target()
    module = methods.method(name)
    cfg = module.config(settings, base.meta.target_cfg)
    shared = registry.target("llama").shared(base.target, base.meta.target_cfg)
    return base, cfg, module.init(cfg, base.target, shared, jax.random.key(1))


def test_eagle3_begins_from_the_target():
    """VOC.1, TRN.4: the table says which tokens are drafted; final norm and own head are the target's."""
    base, cfg, p = begun("eagle3", draft_vocab=[6, 1, 2], own_head=True, own_embed=True)
    assert (cfg.head_rows, cfg.reduced, cfg.k) == (3, True, 7)
    assert eagle3_model.target_ids(p, cfg).tolist() == [0, 1, 2]
    module = methods.method("eagle3")
    shared = registry.target("llama").shared(base.target, base.meta.target_cfg)
    p = module.init(cfg, base.target, shared, jax.random.key(1), vocabulary=[6, 1, 2])
    assert eagle3_model.target_ids(p, cfg).tolist() == [1, 2, 6]
    assert np.array_equal(p.head, base.target.head[jnp.array([1, 2, 6])])
    assert np.array_equal(p.embed, base.target.embed)
    assert np.array_equal(p.norm, base.target.norm)
    np.testing.assert_allclose(jnp.std(p.fc), p.fc.shape[1] ** -0.5, rtol=0.1)
    np.testing.assert_allclose(jnp.std(p.layers[0].q), 0.02, rtol=0.1)
    np.testing.assert_allclose(jnp.std(p.layers[0].down), 0.01, rtol=0.1)
    assert np.array_equal(p.layers[0].q_norm, np.ones(8))
    with pytest.raises(ValueError, match="has 2 different ids, the drafter's config 3"):
        module.init(cfg, base.target, shared, jax.random.key(1), vocabulary=[6, 1])
    assert module.frozen(cfg) == ("d2t", "embed")


def test_gains_are_those_of_the_family():
    """Norms that are stored minus one give and take the same gain."""
    made = testing.tiny_params(1, hf=TARGETS["gemma3"])
    stored = made.target.replace(norm=jnp.full(made.target.norm.shape, 0.5))
    assert np.array_equal(init.final_gain(stored), np.full(made.target.norm.shape, 1.5))
    base, _, p = begun("mtp")
    assert np.array_equal(p.norm, base.target.norm)
    hybrid = testing.tiny_params(1, hf=TARGETS["hybrid"])
    module, cfg = methods.method("mtp"), hybrid.meta.target_cfg
    shared = registry.target(hybrid.meta.family).shared(hybrid.target, cfg)
    p = module.init(module.config({}, cfg), hybrid.target, shared, jax.random.key(1))
    np.testing.assert_allclose(p.norm, hybrid.target.norm, rtol=1e-6, atol=1e-6)


def test_assistant_begins_near_the_targets_head():
    """Of states in the span of its directions, the narrow head says what the target's says."""
    base, cfg, p = begun("assistant", width=8)
    inside = jax.random.normal(jax.random.key(2), (5, 8))
    wide = np.asarray(inside) @ np.asarray(p.post).T
    np.testing.assert_allclose(inside @ p.head.T, wide @ np.asarray(base.target.head).T, atol=1e-4)
    states = rms_norm(jax.random.normal(jax.random.key(3), (5, 16)), base.target.norm, 1e-6)
    x = jnp.concatenate([base.target.embed[:5], states], -1)
    halves = [np.square(np.asarray(x[:, s] @ p.pre[:, s].T)).mean() for s in (slice(0, 16), slice(16, 32))]
    assert 0.2 < halves[0] / halves[1] < 5
    lent = registry.target("llama").shared(base.target, base.meta.target_cfg)
    clustered = dataclasses.replace(cfg, centroids=1, top_centroids=1)
    with pytest.raises(ValueError, match="in clusters can be trained on, not begun"):
        methods.method("assistant").init(clustered, base.target, lent, jax.random.key(0))


WRONG = {
    "body": ("eagle3", {"body": "gpt"}, "body must be one of qwen3, llama, gemma4, latent, got 'gpt'"),
    "unknown": ("eagle3", {"depth": 2}, r"does not know the setting\(s\) \['depth'\]"),
    "sizes": ("eagle3", {"body": "latent"}, "has no kv_lora_rank, q_lora_rank, qk_nope_head_dim"),
    "both": ("eagle3", {"fc_norm": True, "norm_before_fc": True}, "exclude each other"),
    "width": ("eagle3", {"transformer": {"hidden_size": 8}}, "no embedding of its own and is 8 wide"),
    "none": ("eagle3", {"draft_vocab": 0}, "from 1 to the target's 64 tokens, got 0"),
    "many": ("eagle3", {"draft_vocab": 65}, "from 1 to the target's 64 tokens, got 65"),
    "ids": ("eagle3", {"draft_vocab": [3, 64]}, r"ids from 3 to 64, the target's are \[0, 64\)"),
    "empty": ("eagle3", {"draft_vocab": []}, "has no ids"),
    "text": ("eagle3", {"draft_vocab": "all"}, "a number of tokens or a list of ids, got 'all'"),
    "taps": ("eagle3", {"taps": (1, 9)}, "taps the residual stream after"),
    "mtp": ("mtp", {"layers": 2}, r"no setting\(s\) \['layers'\]; known: draft_vocab"),
    "heads": ("mtp", {"heads": 3}, "3 query heads cannot share 2 key heads"),
    "cut": ("mtp", {"draft_vocab": [99]}, "ids from 99 to 99"),
    "assistant": ("assistant", {"depth": 2}, r"no setting\(s\) \['depth'\]; known: drafting, heads"),
    "kinds": ("assistant", {"layers": ["sliding"]}, "the target keeps keys of none"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused(case):
    """TAP.2, TAP.7, TAP.8, TRN.4, VOC.2: before anything compiles, naming what was given and what there is."""
    name, settings, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        methods.method(name).config(settings, target_of("llama")[1])


def test_methods_by_name():
    assert methods.method("eagle3") is methods.method("specjax.train.methods.eagle3")
    with pytest.raises(ValueError, match="known: assistant, dflash, dspark, eagle3, mtp"):
        methods.method("medusa")
    assert eagle3.Config is type(begun("eagle3")[1])
