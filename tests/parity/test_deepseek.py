"""DeepSeek-V3 and Kimi-K2.5 against transformers: latent attention, experts chosen in groups."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from parity import feeding, reference
from safetensors.numpy import load_file, save_file

from specjax.layers.router import route_groups
from specjax.targets import deepseek

YARN = {
    "rope_type": "yarn",
    "rope_theta": 5e4,
    "factor": 16.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
V3 = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 24,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "num_mtp_layers": 0,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,  # not that of the norms of low rank
    "rope_parameters": YARN,
}
KIMI = V3 | {"n_group": 1, "topk_group": 1}
#: What differs in few places is fed whole only.
PLAIN = V3 | {
    "q_lora_rank": None,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
VISION = {
    "patch_size": 14,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}
IDS = np.random.default_rng(1).integers(0, 128, (3, feeding.LENGTH))


def build(settings):
    return reference.make("DeepseekV3ForCausalLM", transformers.DeepseekV3Config(**settings))


def build_kimi():
    """With an image encoder around it."""
    config = transformers.Kimi_K25Config(
        text_config=KIMI | {"model_type": "kimi_k2"},
        vision_config=VISION,
        projection_hidden_size=32,
        tie_word_embeddings=False,
    )
    return reference.make("Kimi_K25ForConditionalGeneration", config)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    model = build(V3)
    folder = reference.save(model, tmp_path_factory.mktemp("v3"))
    return feeding.load(folder), reference.answer(model, IDS)


def test_full_forward(case):
    """TAP: every residual; YaRN, interleaved pairs, groups."""
    feeding.whole(*case)


def test_without_query_rank(tmp_path):
    """Plain rope, queries in one step, two shared experts, weights that are not normalised, tied head."""
    model = build(PLAIN)
    feeding.whole(feeding.load(reference.save(model, tmp_path / "m")), reference.answer(model, IDS))


def test_one_position_at_a_time(case):
    """The absorbed form of attention over the latent cache."""
    feeding.one_by_one(*case)


def test_blocks_at_ragged_offsets(case):
    """Prompts of different length in chunks, then blocks that begin at each row's own end."""
    feeding.ragged_blocks(*case)


def test_after_rollbacks(case):
    """KVR.6."""
    feeding.rollbacks(*case)


def test_rows_do_not_touch_each_other(case):
    """BAT."""
    feeding.rows_apart(*case)


def published(folder, target):
    """The files of a Kimi folder under the names of published ones: ``layers`` for ``blocks``."""
    target.mkdir()
    arrays = load_file(folder / "model.safetensors")
    named = {n.replace("model.blocks.", "model.layers."): x for n, x in arrays.items()}
    save_file(named, target / "model.safetensors")
    hf = json.loads((folder / "config.json").read_text())
    hf["text_config"]["model_type"] = "kimi_k2"
    (target / "config.json").write_text(json.dumps(hf))
    return target


def same(a, b) -> bool:
    return jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()) and x.dtype == y.dtype, a, b))


def test_text_part_of_kimi(tmp_path):
    """As published and as transformers writes it; the image encoder is skipped without a warning."""
    model = build_kimi()
    folder = reference.save(model, tmp_path / "kimi")
    loaded = feeding.load(published(folder, tmp_path / "published"))
    feeding.whole(loaded, reference.answer(model, IDS))
    assert loaded.eos_ids == (1,)
    assert same(feeding.load(folder).weights, loaded.weights)


def test_layouts_of_one_model(tmp_path):
    """Shards with an index, fused experts, and a layer for multi-token prediction behind the others."""
    model = build(V3)
    one = reference.save(model, tmp_path / "one")
    many = reference.save(model, tmp_path / "many", max_shard_size="40KB")
    assert len(list(many.glob("*.safetensors"))) > 2
    loaded = feeding.load(one)
    assert same(feeding.load(many).weights, loaded.weights)
    arrays = load_file(one / "model.safetensors")
    for i in (1, 2):
        prefix = f"model.layers.{i}.mlp.experts."
        gate, up, down = (
            np.stack([arrays.pop(f"{prefix}{e}.{part}_proj.weight") for e in range(8)])
            for part in ("gate", "up", "down")
        )
        arrays |= {f"{prefix}gate_up_proj": np.concatenate([gate, up], 1), f"{prefix}down_proj": down}
    arrays["model.layers.3.eh_proj.weight"] = np.zeros((64, 128), np.float32)
    hf = json.loads((one / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (tmp_path / "fused").mkdir()
    save_file(arrays, tmp_path / "fused" / "model.safetensors")
    (tmp_path / "fused" / "config.json").write_text(json.dumps(hf))
    assert same(feeding.load(tmp_path / "fused").weights, loaded.weights)


def test_choice_stays_float32(tmp_path):
    """NUM.2: the bias that moves the choice of experts is never rounded."""
    folder = reference.save(build(V3), tmp_path / "m")
    wide, narrow = feeding.load(folder).weights, feeding.load(folder, jnp.bfloat16).weights
    np.testing.assert_array_equal(narrow.layers[1].mlp.bias, wide.layers[1].mlp.bias)
    assert narrow.layers[1].mlp.router.dtype == jnp.bfloat16


def test_ties_go_to_the_lower_expert():
    """NUM: equal scores everywhere; the bias moves the choice and not the weight."""
    x, router = jnp.ones((1, 2)), jnp.zeros((8, 2))
    weights, ids = route_groups(x, router, jnp.zeros(8), 3, groups=4, kept=2, scale=2.0)
    assert ids.tolist() == [[0, 1, 2]]
    np.testing.assert_allclose(weights, [[2 / 3] * 3], rtol=1e-6)
    bias = jnp.zeros(8).at[jnp.array([2, 5])].set(jnp.array([0.9, 1.0]))
    weights, ids = route_groups(x, router, bias, 3, groups=4, kept=2, normalise=False)
    assert ids.tolist() == [[5, 2, 3]]  # groups 1 and 2 are the best two
    np.testing.assert_allclose(weights, [[0.5] * 3], rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ({"rope_interleave": False}, "rope_interleave=False"),
        ({"n_group": 3}, "8 experts cannot form 3 groups"),
        ({"n_group": 8}, "8 experts cannot form 8 groups of at least 2"),
        ({"topk_group": 5}, "5 groups kept out of 4"),
        ({"topk_group": 1}, "3 experts per token out of 2"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised with 'fp8'"),
    ],
)
def test_settings_that_are_not_implemented(changes, message):
    """CKP: refused by name before anything is read."""
    with pytest.raises(ValueError, match=message):
        deepseek.config({"model_type": "deepseek_v3"} | V3 | changes)


def test_no_keys_and_values_to_lend(case):
    run = feeding.Runner(case[0], 1)
    with pytest.raises(ValueError, match="latents"):
        run.module.kv_view(run.weights, run.cfg, run.cache, "full")
    assert {kv.k.shape[-1] + kv.v.shape[-1] for kv in run.cache} == {16 + 32}  # rope and rank, no heads
