"""Tiny random Gemma models of transformers, with no weight, scale or scalar at its trivial initial value."""

import torch
import transformers

COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "sliding_window": 8,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "head_dim": 32,
    "eos_token_id": [1, 106],
}


def rope(full: dict, sliding: float = 1e4) -> dict:
    """An entry per type of layer."""
    plain = {"rope_type": "default", "rope_theta": sliding}
    return {"full_attention": full, "sliding_attention": plain}


PLAIN = {"rope_type": "default", "rope_theta": 1e6}
LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
GEMMA3 = COMMON | {"num_key_value_heads": 1, "query_pre_attn_scalar": 24, "rope_parameters": rope(PLAIN)}
GEMMA4 = COMMON | {
    "vocab_size_per_layer_input": 128,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "global_head_dim": 64,
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "rope_parameters": rope(PROPORTIONAL),
}
SMALL = GEMMA4 | {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "num_global_key_value_heads": None,
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
}
MOE = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32}

#: name -> (class stem, settings)
MODELS = {
    "gemma3": ("Gemma3", GEMMA3),
    "gemma3_scaled": (
        "Gemma3",
        GEMMA3
        | {"num_key_value_heads": 2, "rope_parameters": rope(LINEAR), "final_logit_softcapping": 3.0}
        | {"tie_word_embeddings": False},
    ),
    "gemma4_dense": ("Gemma4", GEMMA4),
    "gemma4_moe": ("Gemma4", GEMMA4 | MOE),
    "gemma4_e2b": ("Gemma4", SMALL),
    "gemma4_e4b": (
        "Gemma4",
        SMALL | {"use_double_wide_mlp": False, "num_kv_shared_layers": 2, "num_hidden_layers": 5}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"] + ["full_attention"] * 2},
    ),
    "gemma4_own_values": ("Gemma4", GEMMA4 | {"attention_k_eq_v": False, "final_logit_softcapping": None}),
}  # fmt: skip


def config(name: str, **more):
    """transformers' config of a model."""
    stem, settings = MODELS[name]
    out = getattr(transformers, f"{stem}TextConfig")(**settings | more)
    out._attn_implementation = "eager"
    return out


def build(name: str, seed: int = 0, **more):
    """Float32 model that transformers computes in full."""
    model = getattr(transformers, f"{MODELS[name][0]}ForCausalLM")(config(name, **more)).float().eval()
    fill(model, seed)
    return model


def fill(model, seed: int) -> None:
    """Seeded values everywhere. Gemma 4 does not scale attention scores, so its head norms are small as in trained
    models: scores of standard deviation 8 would magnify rounding a hundredfold."""
    unscaled = model.config.get_text_config().model_type.startswith("gemma4")
    torch.manual_seed(seed)
    with torch.no_grad():
        for key, p in [*model.named_parameters(), *model.named_buffers()]:
            if p.ndim >= 2:
                p.copy_(torch.randn_like(p) * 0.6 / p.shape[-1] ** 0.5)
            elif "norm" in key or (key.endswith(("scale", "layer_scalar")) and "embed" not in key):
                p.add_(0.2 * torch.randn_like(p))
                if unscaled and key.endswith(("q_norm.weight", "k_norm.weight")):
                    p.mul_(p.shape[0] ** -0.25)
        if model.config.get_text_config().tie_word_embeddings:
            model.tie_weights()
