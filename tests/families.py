"""Small targets of families beyond Llama, and what scripted drafters must do on them."""

import functools

from told import MODES, NEW, PROMPTS, VOCAB, expect_acceptance, told, unused

import specjax
from specjax import testing

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
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}
HYBRID_MOE = HYBRID | {
    "model_type": "qwen3_5_moe_text",
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
LATENT = {
    "model_type": "deepseek_v3",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "max_position_embeddings": 1024,
    "hidden_act": "silu",
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
CONFIGS = {"hybrid": HYBRID, "hybrid_moe": HYBRID_MOE, "latent": LATENT}
SEEDS = {"latent": 5}  # a model that does not fall into a cycle at once


@functools.cache
def target(name: str = "hybrid", vocab: int = VOCAB):
    """Target without a drafter."""
    return testing.tiny_params(SEEDS.get(name, 1), hf=CONFIGS[name] | {"vocab_size": vocab})


@functools.cache
def plain(name: str = "hybrid") -> list[list[int]]:
    """Greedy continuations of all prompts."""
    return specjax.decode(target(name), PROMPTS, max_new_tokens=NEW, rows=3).tokens


#: prompts taken, rows decoded at once
BATCHES = {"one": (1, 1), "ragged": (3, 3), "refill": (5, 3)}
DRIVING = {"loop": ("device", "host"), "rounds": (1, 3, 16), "batch": tuple(BATCHES)}
SCRIPTED = {"mode": (*MODES, "MIXED"), "k": range(1, 9), **DRIVING}


def decodes(case, name: str = "hybrid", drafter: str = "TOLD"):
    """Ids of plain decoding, and the acceptance that belongs to the scripted drafter."""
    count, rows = BATCHES[case["batch"]]
    modes = [case["mode"]] * len(PROMPTS)
    if case["mode"] == "MIXED":
        modes = [MODES[i % 4] for i in range(len(PROMPTS))]
    tokens = plain(name)
    stop = unused(tokens)
    params = told(modes, tokens, base=target(name), stop=stop, name=drafter)
    driving = {key: case[key] for key in ("k", "loop", "rounds")}
    out = specjax.decode(params, PROMPTS[:count], max_new_tokens=NEW, rows=rows, stop=[stop], **driving)
    assert out.tokens == tokens[:count]
    for mode, stats in zip(modes, out.stats, strict=False):
        expect_acceptance(mode, case["k"], 0, stats)
