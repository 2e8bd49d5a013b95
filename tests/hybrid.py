"""A small Qwen3.5: one layer of gated delta rule, one of gated attention."""

import functools

from told import VOCAB

from specjax import testing

DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}
HYBRID = {
    "model_type": "qwen3_5_text",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 1024,
    "hidden_act": "silu",
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    **DELTA,
}
HYBRID_MOE = HYBRID | {
    "model_type": "qwen3_5_moe_text",
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


@functools.cache
def hybrid(vocab: int = VOCAB, moe: bool = False, seed: int = 1):
    """Target without a drafter."""
    return testing.tiny_params(seed, hf=(HYBRID_MOE if moe else HYBRID) | {"vocab_size": vocab})
