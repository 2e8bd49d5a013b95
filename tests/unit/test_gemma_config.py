"""Gemma configs: the released models by size, older and sparse files, and every setting that is refused."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import pytest
from published import GEMMA3, gemma4

from specjax import registry
from specjax.config import from_dict
from specjax.types import ArraySpec, tree_bytes


def made(hf):
    module = registry.target(hf["model_type"])
    return module, module.config(hf)


def size(module, cfg):
    specs = jax.tree.leaves(module.abstract(cfg), is_leaf=lambda x: isinstance(x, ArraySpec))
    return sum(math.prod(s.shape) for s in specs)


def test_gemma3_sizes():
    module, cfg = made(GEMMA3["270m"])
    assert cfg.full_layers == (5, 11, 17)
    assert (cfg.scale, cfg.tied, cfg.softcap) == (0.0625, True, None)
    assert (cfg.full.rope.theta, cfg.sliding.rope.theta, cfg.sliding.window) == (1e6, 1e4, 512)
    assert round(size(module, cfg) / 1e6) == 268
    module, cfg = made(GEMMA3["4b"])
    assert (cfg.heads, cfg.full.kv_heads, cfg.vocab_size, cfg.max_positions) == (8, 4, 262208, 131072)
    assert (cfg.full.rope.kind, cfg.full.rope.factor, cfg.sliding.rope.kind) == ("linear", 8.0, "default")
    assert round(size(module, cfg) / 1e8) == 39


BILLIONS = {"26b": 25.2, "31b": 30.7, "12b": 11.9, "e4b": 7.5, "e2b": 4.6}


@pytest.mark.parametrize("name", BILLIONS)
def test_gemma4_sizes(name):
    module, cfg = made(gemma4(name))
    assert size(module, cfg) / 1e9 == pytest.approx(BILLIONS[name], abs=0.1)
    assert (cfg.full.rope.dims, cfg.full.rope.pair, cfg.sliding.rope.dims) == (128, 256, 256)
    assert cfg.num_layers - 1 in cfg.full_layers


#: bytes per token of text, and bytes per position of all rings (bfloat16)
MEMORY = {"26b": (10240, 25 * 8192), "31b": (40960, 50 * 16384), "12b": (8192, 40 * 8192)}
MEMORY |= {"e4b": (16384, 20 * 2048), "e2b": (6144, 12 * 1024)}


@pytest.mark.parametrize("name", MEMORY)
def test_gemma4_cache_bytes(name):
    """KVR.1: only full layers with keys of their own grow, and half as fast where values are all they keep."""
    module, cfg = made(gemma4(name))
    of = lambda slots: tree_bytes(  # noqa: E731
        jax.eval_shape(lambda: module.init_cache(cfg, 1, slots, 8, jnp.bfloat16))
    )
    per_token, ring = MEMORY[name]
    assert of(2048) - of(1024) == 1024 * per_token
    rings = of(1024) - 1024 * per_token
    positions = cfg.sliding.window + 8
    assert rings == positions * (ring + 4 * (cfg.cached - sum(i < cfg.cached for i in cfg.full_layers)))


@pytest.mark.parametrize("hf", [GEMMA3["4b"], gemma4("26b"), gemma4("e2b")])
def test_configs_survive_json(hf):
    """A saved model is rebuilt from them."""
    cfg = made(hf)[1]
    assert from_dict(type(cfg), json.loads(json.dumps(dataclasses.asdict(cfg)))) == cfg


def test_gemma4_mlp_size_is_the_widest_activation():
    """Estimates of memory go by it."""
    assert made(gemma4("26b"))[1].mlp_size == 8 * 704
    assert made(gemma4("e2b"))[1].mlp_size == 2 * 6144
    assert made(gemma4("e4b"))[1].mlp_size == 10240


def test_last_layer_without_a_list_of_types():
    hf = gemma4("31b", num_hidden_layers=8)
    del hf["text_config"]["layer_types"]
    assert made(hf)[1].full_layers == (5, 7)


REFUSED4 = [
    ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'"),
    ({"attention_bias": True}, "attention_bias=True"),
    ({"hidden_activation": "silu"}, "hidden_activation='silu'"),
    ({"layer_types": ["full_attention"] + ["sliding_attention"] * 29}, "the last layer must attend to all"),
    ({"layer_types": ["full_attention"]}, "1 entries for 30 layers"),
    ({"layer_types": ["chunked_attention"] * 30}, "of types.*chunked_attention"),
    ({"num_kv_shared_layers": 30}, "num_kv_shared_layers is 30 of 30"),
    ({"num_kv_shared_layers": 26}, "no earlier layer is of type full_attention"),
    ({"top_k_experts": 200}, "200 experts per token out of 128"),
    ({"num_key_value_heads": 5}, "16 query heads for 5 key heads"),
    ({"hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 99}, "exist for 99 of 262144 token ids"),
    ({"per_layer_config": {"5": {"head_dim": 64}}}, "alike for all full layers"),
    ({"per_layer_config": {"0": {"head_dim": 64}}}, "alike for all full layers"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "one entry per type of layer"),
    ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, "unknown rope type 'dynamic'"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantised with 'fp8'"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "said"), REFUSED4)
def test_gemma4_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        made(gemma4("26b", **changes))


REFUSED3 = [
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
    ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ({"sliding_window": None}, "no sliding_window"),
    (
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 2e6}}},
        r"rope_theta is 1000000\.0 at top level but 2000000\.0",
    ),
]


@pytest.mark.parametrize(("changes", "said"), REFUSED3)
def test_gemma3_refused(changes, said):
    """TAP.4 among others: rope said twice must agree."""
    with pytest.raises(ValueError, match=said):
        made(GEMMA3["270m"] | changes)


def test_an_unknown_setting_is_reported():
    with pytest.warns(UserWarning, match="altup_num_inputs"):
        made(gemma4("e2b", altup_num_inputs=4))


def test_views_of_kinds_that_are_not_there():
    module, cfg = made(GEMMA3["270m"] | {"layer_types": ["sliding_attention"] * 18})
    weights, cache = module.abstract(cfg), module.init_cache(cfg, 1, 4, 1, jnp.float32)
    with pytest.raises(ValueError, match="no full layer"):
        module.kv_view(weights, cfg, cache, "full")
    with pytest.raises(ValueError, match="'full' and 'sliding', not 'global'"):
        module.kv_view(weights, cfg, cache, "global")
