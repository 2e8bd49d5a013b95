"""Gemma targets small enough to decode with: windows of six positions, so that a few dozen tokens wrap every ring."""

import functools
from typing import Any

import jax.numpy as jnp

from specjax import testing
from specjax.types import Params

VOCAB, WINDOW = 48, 6
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": False,  # a random tied model repeats its last token
}
_GEMMA4 = _COMMON | {
    "model_type": "gemma4_text",
    "global_head_dim": 32,
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": _COMMON | {"model_type": "gemma3_text", "query_pre_attn_scalar": 16},
    "gemma4_moe": _GEMMA4
    | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "enable_moe_block": True}
    | {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    "gemma4_small": _GEMMA4
    | {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    | {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
}


@functools.cache
def params(name: str, seed: int = 0) -> Params:
    """A float32 target whose heads weigh keys unevenly, so that one wrong key changes the tokens."""
    return uneven(testing.tiny_params(seed, hf=CONFIGS[name]), name)


def uneven(made: Params, name: str) -> Params:
    """A target with attention that prefers some keys."""
    gain = 2.0 if name == "gemma3" else 3.0  # its norm weights are stored minus one
    layers = tuple(layer.replace(q_norm=jnp.full_like(layer.q_norm, gain)) for layer in made.target.layers)
    return made.replace(target=made.target.replace(layers=layers))
