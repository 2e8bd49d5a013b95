"""One model in every layout files come in: the weights are the same arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parity import reference
from safetensors.numpy import load_file, save_file

from specjax import checkpoints


def load(folder, dtype=jnp.float32):
    return checkpoints.load_target(checkpoints.hub.resolve(folder), dtype)


def same(a, b) -> bool:
    return jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()) and x.dtype == y.dtype, a, b))


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_shards_written_by_transformers(name, tmp_path):
    """CKP.8"""
    model = reference.build(name)
    one = load(reference.save(model, tmp_path / "one"))
    many = reference.save(model, tmp_path / "many", max_shard_size="40KB")
    assert len(list(many.glob("*.safetensors"))) > 2
    loaded = load(many)
    assert same(loaded.weights, one.weights)
    assert loaded.cfg == one.cfg


def test_fused_experts(tmp_path):
    """``gate_up_proj`` and ``down_proj`` as three-dimensional tensors, as newer exports have them."""
    one = reference.save(reference.build("qwen3_moe"), tmp_path / "one")
    arrays, fused = load_file(one / "model.safetensors"), {}
    prefixes = {n.split(".experts.")[0] + ".experts." for n in arrays if ".experts." in n}
    for prefix in prefixes:
        gate, up, down = (
            np.stack([arrays.pop(f"{prefix}{e}.{part}_proj.weight") for e in range(8)])
            for part in ("gate", "up", "down")
        )
        fused |= {f"{prefix}gate_up_proj": np.concatenate([gate, up], 1), f"{prefix}down_proj": down}
    (tmp_path / "fused").mkdir()
    save_file(arrays | fused, tmp_path / "fused" / "model.safetensors")
    (tmp_path / "fused" / "config.json").write_text((one / "config.json").read_text())
    assert same(load(tmp_path / "fused").weights, load(one).weights)


def test_bfloat16_files_in_any_type(tmp_path):
    """NUM.2: a bfloat16 file loads exactly in float32 and unchanged in bfloat16."""
    model = reference.build("qwen3").bfloat16()
    folder = reference.save(model, tmp_path / "m")
    wide, narrow = load(folder).weights, load(folder, jnp.bfloat16).weights
    assert same(jax.tree.map(lambda x: x.astype(jnp.float32), narrow), wide)
    stored = model.model.layers[1].mlp.up_proj.weight.detach().float().numpy()
    np.testing.assert_array_equal(wide.layers[1].mlp.up, stored)


def test_generation_settings_written_by_transformers(tmp_path):
    model = reference.build("llama")
    model.generation_config.eos_token_id = [2, 9]
    model.generation_config.temperature = 0.6
    model.generation_config.do_sample = True
    loaded = load(reference.save(model, tmp_path / "m"))
    assert loaded.eos_ids == (2, 9)
    assert loaded.generation["temperature"] == 0.6
