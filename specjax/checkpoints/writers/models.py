"""Frozen configs of target families as their ``config.json``: for drafters that are layers of such a model."""

import math
from typing import Any

from specjax.checkpoints.writers import keys
from specjax.layers.latent import Latent
from specjax.layers.rope import RopeConfig
from specjax.targets import deepseek_config, gemma4_config, qwen3_5_config
from specjax.targets.gemma import FULL, SLIDING, Kind


def settings(family: str, cfg: Any) -> dict[str, Any]:
    """Keys of the text model of a Qwen3, Qwen3.5 or DeepSeek family."""
    if isinstance(cfg, deepseek_config.Config):
        return _deepseek(cfg)
    if isinstance(cfg, qwen3_5_config.Config):
        return _qwen3_5(cfg)
    return {
        **_common(cfg),
        "model_type": family,
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_dim,
        "intermediate_size": cfg.mlp_size,
        "attention_bias": cfg.qkv_bias,
        "layer_types": ["full_attention"] * cfg.num_layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": cfg.num_layers,
        **keys.rope(cfg.rope, cfg.head_dim),
    }


def _common(cfg: Any) -> dict[str, Any]:
    return {
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.hidden_size,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.heads,
        "max_position_embeddings": cfg.max_positions,
        "rms_norm_eps": cfg.eps,
        "tie_word_embeddings": cfg.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
    }


def _qwen3_5(cfg: qwen3_5_config.Config) -> dict[str, Any]:
    experts = {
        "num_experts": cfg.experts,
        "num_experts_per_tok": cfg.experts_per_token,
        "moe_intermediate_size": cfg.expert_size,
        "shared_expert_intermediate_size": cfg.shared_size,
    }
    return {
        **_common(cfg),
        "model_type": "qwen3_5_moe_text" if cfg.experts else "qwen3_5_text",
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_dim,
        **(experts if cfg.experts else {"intermediate_size": cfg.mlp_size}),
        "layer_types": ["full_attention" if full else "linear_attention" for full in cfg.full],
        "linear_num_key_heads": cfg.key_heads,
        "linear_num_value_heads": cfg.value_heads,
        "linear_key_head_dim": cfg.key_size,
        "linear_value_head_dim": cfg.value_size,
        "linear_conv_kernel_dim": cfg.conv_taps,
        **keys.rope(cfg.rope, cfg.head_dim, always_share=True),
    }


def _deepseek(cfg: deepseek_config.Config) -> dict[str, Any]:
    return {
        **_common(cfg),
        "model_type": "deepseek_v3",
        "num_key_value_heads": cfg.heads,
        "intermediate_size": cfg.dense_size,
        **latent(cfg.latent),
        "n_routed_experts": cfg.experts,
        "n_shared_experts": cfg.shared_size // cfg.expert_size,
        "num_experts_per_tok": cfg.experts_per_token,
        "moe_intermediate_size": cfg.expert_size,
        "first_k_dense_replace": cfg.dense_layers,
        "moe_layer_freq": 1,
        "n_group": cfg.groups,
        "topk_group": cfg.kept_groups,
        "norm_topk_prob": cfg.norm_topk,
        "routed_scaling_factor": cfg.routed_scale,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 1,
        **latent_rope(cfg.rope, cfg.latent),
    }


def latent(cfg: Latent) -> dict[str, Any]:
    """Sizes of latent attention."""
    return {
        "q_lora_rank": cfg.q_rank,
        "kv_lora_rank": cfg.rank,
        "qk_nope_head_dim": cfg.nope,
        "qk_rope_head_dim": cfg.rope,
        "v_head_dim": cfg.value,
    }


def latent_rope(rope: RopeConfig, cfg: Latent) -> dict[str, Any]:
    """Rope with the factor of scores that YaRN adds, which configs state as ``mscale_all_dim``."""
    out = keys.rope(rope, cfg.rope)
    factor = math.sqrt(cfg.scale * math.sqrt(cfg.nope + cfg.rope))
    if rope.kind != "yarn" or math.isclose(factor, 1.0):
        return out
    strength = round((factor - 1) / (0.1 * math.log(rope.factor)), 9)
    for place in (out["rope_parameters"], out["rope_scaling"]):
        place["mscale_all_dim"] = strength
        if rope.attention_factor == 1:  # as published: both alike, from which the factor follows
            del place["attention_factor"]
            place["mscale"] = strength
    return out


def gemma4(cfg: gemma4_config.Config) -> dict[str, Any]:
    """Keys of a Gemma 4 text model without experts and inputs per layer. Sizes of full layers are written as released
    files have them and as transformers writes them now."""
    sliding, full = cfg.sliding, cfg.full
    return {
        **{key: value for key, value in _common(cfg).items() if key != "hidden_act"},
        "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "num_key_value_heads": sliding.kv_heads,
        "head_dim": sliding.head_dim,
        "global_head_dim": full.head_dim,
        **({"num_global_key_value_heads": full.kv_heads} if cfg.keys_from_values else {}),
        "per_layer_config": {str(i): _own(sliding, full) for i in cfg.full_layers},
        "intermediate_size": cfg.dense_size,
        "sliding_window": sliding.window,
        "layer_types": [FULL if i in cfg.full_layers else SLIDING for i in range(cfg.num_layers)],
        "rope_parameters": {
            FULL: keys.nested_rope(full.rope, full.head_dim),
            SLIDING: keys.nested_rope(sliding.rope, sliding.head_dim),
        },
        "final_logit_softcapping": cfg.softcap,
        "attention_k_eq_v": cfg.keys_from_values,
        "num_kv_shared_layers": cfg.shared_layers,
        "use_double_wide_mlp": cfg.double_wide,
        "enable_moe_block": False,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
    }


def _own(sliding: Kind, full: Kind) -> dict[str, int]:
    """What a full layer has in its own entry."""
    same = full.kv_heads == sliding.kv_heads
    return {"head_dim": full.head_dim, **({} if same else {"num_key_value_heads": full.kv_heads})}
