"""Text models inside larger checkpoints, and what becomes of families with more than arrays of one type."""

import jax.numpy as jnp
import numpy as np
import pytest
from families import target
from told import PROMPTS, told

import specjax
from specjax.checkpoints.load import eos_union, renamed
from specjax.targets.hf import text_part


def test_names_of_the_text_part():
    """CKP: the first prefix that fits is replaced; two tensors for one weight are an error."""
    stored = {"model.language_model.a": 1, "lm_head": 2, "tower.model.language_model.b": 3}
    get, names = renamed(stored.__getitem__, set(stored), {"model.language_model.": "model."}, "here")
    assert names == {"model.a", "lm_head", "tower.model.language_model.b"}
    assert get("model.a") == 1
    with pytest.raises(ValueError, match=r"here: .*model\.a.* would be the same weight"):
        renamed(stored.__getitem__, {*stored, "model.a"}, {"model.language_model.": "model."}, "here")


def test_settings_of_the_text_part():
    """The whole decides about tied weights and quantisation; all else is the text model's."""
    inner = {"model_type": "text", "tie_word_embeddings": True, "hidden_size": 8, "eos_token_id": [1, 2]}
    whole = {"model_type": "whole", "text_config": inner, "hidden_size": 9, "quantization_config": {"a": 1}}
    assert text_part(inner) == inner
    assert text_part(whole) == inner | {"quantization_config": {"a": 1}}
    assert text_part(whole | {"tie_word_embeddings": False})["tie_word_embeddings"] is False
    assert eos_union(whole, whole["text_config"], {"eos_token_id": 5}) == (1, 2, 5)


@pytest.mark.parametrize("name", ["hybrid", "latent"])
def test_saved_and_cast(name, tmp_path):
    """NUM.2: every field of the config survives; arrays that are always float32 stay so in any type."""
    params = specjax.cast(target(name), "bfloat16")
    specjax.save(params, tmp_path / "m")
    loaded = specjax.load(tmp_path / "m")
    assert loaded.meta.target_cfg == params.meta.target_cfg
    layer = loaded.target.layers[0 if name == "hybrid" else 1]
    wide = [layer.mixer.a_log, layer.mixer.dt_bias] if name == "hybrid" else [layer.mlp.bias]
    assert {x.dtype for x in wide} == {jnp.dtype("float32")}
    assert loaded.target.embed.dtype == jnp.bfloat16
    explanation = specjax.explain(loaded, [1, 2, 3])
    assert explanation.cache_bytes > 0


def test_recurrent_state_beside_bfloat16():
    """NUM.2: activations, cache and tape in bfloat16 around a float32 state; every draft that is right is kept."""
    params = specjax.cast(target("hybrid"), "bfloat16")
    plain = specjax.decode(params, PROMPTS[:2], max_new_tokens=12, rows=2).tokens
    known = [*plain, *([[0] * 12] * (len(PROMPTS) - 2))]
    drafted = specjax.decode(
        told(["ALWAYS_RIGHT"] * len(PROMPTS), known, base=params), PROMPTS[:2], max_new_tokens=12, rows=2, k=2
    )
    same = np.asarray(plain) == np.asarray(drafted.tokens)
    assert same[:, 0].all()
    assert same.mean() > 0.5  # near-ties may part the texts
    assert sum(s.accepted for s in drafted.stats) > 0
