"""Qwen3.5 and Qwen3.6 against transformers: gated delta rule, gated attention, shared expert."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from parity import feeding, reference
from safetensors.numpy import load_file, save_file

TEXT = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
MOE = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
DENSE = {"intermediate_size": 96}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
MODELS = {
    "dense": ("Qwen3_5", TEXT | DENSE | {"tie_word_embeddings": True}),
    "moe": ("Qwen3_5Moe", TEXT | MOE),
}


def build(name: str):
    stem, settings = MODELS[name]
    return reference.make(f"{stem}ForCausalLM", getattr(transformers, f"{stem}TextConfig")(**settings))


def build_whole(name: str):
    """With an image encoder around it."""
    stem, settings = MODELS[name]
    config = getattr(transformers, f"{stem}Config")(
        text_config=settings,
        vision_config=VISION,
        tie_word_embeddings=settings.get("tie_word_embeddings", False),
    )
    return reference.make(f"{stem}ForConditionalGeneration", config)


IDS = np.random.default_rng(1).integers(0, 128, (3, feeding.LENGTH))


@pytest.fixture(scope="module", params=list(MODELS))
def case(request, tmp_path_factory):
    model = build(request.param)
    folder = reference.save(model, tmp_path_factory.mktemp(request.param))
    return feeding.load(folder), reference.answer(model, IDS)


def test_full_forward(case):
    """TAP.5: partial rotary, every tap."""
    feeding.whole(*case)


@pytest.mark.parametrize("case", ["dense"], indirect=True)
def test_one_position_at_a_time(case):
    feeding.one_by_one(*case)


def test_blocks_at_ragged_offsets(case):
    """Prompts of different length in chunks, then blocks that begin at each row's own end."""
    feeding.ragged_blocks(*case)


def test_after_rollbacks(case):
    """KVR.5, KVR.6: rejected tokens leave no trace in the recurrent states."""
    feeding.rollbacks(*case)


def test_rows_do_not_touch_each_other(case):
    """BAT."""
    feeding.rows_apart(*case)


def same(a, b) -> bool:
    return jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()) and x.dtype == y.dtype, a, b))


@pytest.mark.parametrize("name", MODELS)
def test_text_part_of_a_multimodal_checkpoint(name, tmp_path):
    """The image encoder is skipped without a warning; weights and answers are those of the text alone."""
    model = build_whole(name)
    loaded = feeding.load(reference.save(model, tmp_path / "whole", max_shard_size="60KB"))
    assert len(list((tmp_path / "whole").glob("*.safetensors"))) > 2
    feeding.whole(loaded, reference.answer(model, IDS))


def test_layouts_of_one_model(tmp_path):
    """Experts fused, as official files have them, or one by one; multi-token prediction beside them."""
    one = reference.save(build("moe"), tmp_path / "one")
    arrays = load_file(one / "model.safetensors")
    fused = dict(arrays)
    for i in range(4):
        prefix = f"model.layers.{i}.mlp.experts."
        gate, up, down = (
            np.stack([fused.pop(f"{prefix}{e}.{part}_proj.weight") for e in range(8)])
            for part in ("gate", "up", "down")
        )
        fused |= {f"{prefix}gate_up_proj": np.concatenate([gate, up], 1), f"{prefix}down_proj": down}
    fused = {n.replace("model.", "model.language_model.", 1): x for n, x in fused.items()}
    fused["mtp.fc.weight"] = fused["model.visual.pos_embed.weight"] = np.zeros((2, 2), np.float32)
    (tmp_path / "fused").mkdir()
    save_file(fused, tmp_path / "fused" / "model.safetensors")
    hf = json.loads((one / "config.json").read_text())
    whole = {
        "model_type": "qwen3_5_moe",
        "text_config": hf | {"eos_token_id": 7},
        "tie_word_embeddings": False,
    }
    (tmp_path / "fused" / "config.json").write_text(json.dumps(whole))
    loaded, plain = feeding.load(tmp_path / "fused"), feeding.load(one)
    assert same(loaded.weights, plain.weights)
    assert loaded.cfg == plain.cfg
    assert loaded.eos_ids == (7,)


def test_decay_stays_float32(tmp_path):
    """NUM.2: what a decay is made of is never rounded, whatever the type of model and file."""
    model = build("dense")
    stored = model.model.layers[0].linear_attn.A_log.detach().numpy().copy()
    folder = reference.save(model, tmp_path / "m")
    delta = feeding.load(folder, jnp.bfloat16).weights.layers[0].mixer
    np.testing.assert_array_equal(delta.a_log, stored)
    assert delta.dt_bias.dtype == jnp.float32
    assert delta.qkv.dtype == jnp.bfloat16


def test_settings_that_are_not_implemented():
    """CKP: refused by name before anything is read."""
    from specjax.targets import qwen3_5

    hf = {"model_type": "qwen3_5_text"} | TEXT | DENSE
    assert qwen3_5.config(hf).full == (False, False, False, True)
    every = {k: v for k, v in hf.items() if k != "layer_types"} | {"full_attention_interval": 2}
    assert qwen3_5.config(every).full == (False, True, False, True)
    assert qwen3_5.config(hf).rope.dims == 8
    with pytest.raises(ValueError, match="attn_output_gate=False"):
        qwen3_5.config(hf | {"attn_output_gate": False})
    with pytest.raises(ValueError, match="sliding_attention"):
        qwen3_5.config(hf | {"layer_types": ["sliding_attention"] * 4})
    with pytest.raises(ValueError, match="fp8"):
        qwen3_5.config(
            {"model_type": "qwen3_5", "text_config": hf, "quantization_config": {"quant_method": "fp8"}}
        )
    with pytest.raises(ValueError, match="3 value heads cannot share 2"):
        qwen3_5.config(hf | {"linear_num_value_heads": 3})
    with pytest.raises(ValueError, match="3 layer types for 4 layers"):
        qwen3_5.config(hf | {"layer_types": ["full_attention"] * 3})
    with pytest.raises(ValueError, match="9 experts per token out of 8"):
        qwen3_5.config(hf | MOE | {"model_type": "qwen3_5_moe_text", "num_experts_per_tok": 9})


def test_keys_and_values_lent(case):
    """The last attention layer's; a window there is none of."""
    run = feeding.Runner(case[0])
    run.step(IDS, [0] * 3, [feeding.LENGTH] * 3, "extend")
    view = run.module.kv_view(run.weights, run.cfg, run.cache, "full")
    assert view.k.shape == (3, 2, feeding.SLOTS, 32)
    assert view.pos.shape == (3, feeding.SLOTS)
    with pytest.raises(ValueError, match="sliding"):
        run.module.kv_view(run.weights, run.cfg, run.cache, "sliding")
    assert run.module.min_resume(run.cfg, 30) == 30
    attention = dataclasses.replace(run.cfg, full=(True,) * 4)
    assert run.module.min_resume(attention, 30) == 1
