"""Configs of released models and drafters, as far as shapes go: for tests that need no weights.

``TARGETS`` maps a name to (``config.json``, billions of parameters of the text model as published).
"""

from typing import Any

_COMMON = {"hidden_act": "silu", "attention_bias": False}
_YARN = {"rope_type": "yarn", "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32}


def _model(kind: str, sizes: str, **more: Any) -> dict[str, Any]:
    """``sizes``: width, layers, heads, key heads, head size, feed-forward size, vocabulary, positions."""
    keys = (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "intermediate_size", "vocab_size", "max_position_embeddings",
    )  # fmt: skip
    return {"model_type": kind, **_COMMON, **dict(zip(keys, map(int, sizes.split()), strict=True)), **more}


def _routed(size: int, count: int, top: int, **more: Any) -> dict[str, Any]:
    return {"moe_intermediate_size": size, "num_experts": count, "num_experts_per_tok": top, **more}


SMOLLM2 = _model("llama", "576 30 9 3 64 1536 49152 8192", tie_word_embeddings=True)
LLAMA_8B = _model("llama", "4096 32 32 8 128 14336 128256 131072")
QWEN25_7B = _model("qwen2", "3584 28 28 4 128 18944 152064 32768") | {"attention_bias": None}
QWEN3_4B = _model("qwen3", "2560 36 32 8 128 9728 151936 40960", tie_word_embeddings=True)
QWEN3_8B = _model("qwen3", "4096 36 32 8 128 12288 151936 40960")
QWEN3_30B_A3B = _model(
    "qwen3_moe", "2048 48 32 4 128 6144 151936 40960", **_routed(768, 128, 8, norm_topk_prob=True)
)


def _hybrid(kind: str, sizes: str, values: int, **more: Any) -> dict[str, Any]:
    linear = {"linear_num_key_heads": 16, "linear_num_value_heads": values, "linear_conv_kernel_dim": 4}
    linear |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "full_attention_interval": 4}
    text = _model(f"{kind}_text", sizes, **linear, mtp_num_hidden_layers=1, **more)
    return {"model_type": kind, "text_config": text, "tie_word_embeddings": False}


QWEN36_27B = _hybrid("qwen3_5", "5120 64 24 4 256 17408 248320 262144", 48)
QWEN36_35B_A3B = _hybrid(
    "qwen3_5_moe",
    "2048 40 16 2 256 0 248320 262144",
    32,
    **_routed(512, 256, 8, shared_expert_intermediate_size=512),
)
_LATENT = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_V3 = {"n_shared_experts": 1, "num_experts_per_tok": 8, "norm_topk_prob": True, "scoring_func": "sigmoid"}
_V3 |= {"topk_method": "noaux_tc", "moe_layer_freq": 1, "moe_intermediate_size": 2048, **_LATENT}
DEEPSEEK_V3 = _model("deepseek_v3", "7168 61 128 128 192 18432 129280 163840", **_V3) | {
    "n_routed_experts": 256, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1,
    "rope_scaling": _YARN | {"factor": 40, "original_max_position_embeddings": 4096},
}  # fmt: skip
KIMI_K25 = {
    "model_type": "kimi_k25",
    "tie_word_embeddings": False,
    "text_config": _model("kimi_k2", "7168 61 64 64 112 18432 163840 262144", **_V3) | {
        "n_routed_experts": 384, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.827, "num_nextn_predict_layers": 0, "rope_theta": 50000.0,
        "rope_scaling": _YARN | {"factor": 64, "original_max_position_embeddings": 4096},
    },
}  # fmt: skip

#: Gemma 3 as published: text settings that the files of the larger models leave out are the family's own.
GEMMA3 = {
    "270m": {"model_type": "gemma3_text", "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18}
    | {"num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 262144, "sliding_window": 512}
    | {"max_position_embeddings": 32768, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
    "4b": {
        "model_type": "gemma3",
        "mm_tokens_per_image": 256,
        "vision_config": {"model_type": "siglip_vision_model"},
        "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240}
        | {"num_hidden_layers": 34, "sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
    },
}  # fmt: skip
_SIZES = {
    "26b": (2816, 30, 16, 8, 2112),
    "31b": (5376, 60, 32, 16, 21504),
    "12b": (3840, 48, 16, 8, 15360),
    "e4b": (2560, 42, 8, 2, 10240),
    "e2b": (1536, 35, 8, 1, 6144),
}
_OWN = {
    "26b": {"num_global_key_value_heads": 2, "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8}
    | {"moe_intermediate_size": 704},
    "31b": {"num_global_key_value_heads": 4},
    "12b": {"num_global_key_value_heads": 1},
    "e4b": {"num_kv_shared_layers": 18},
    "e2b": {"num_kv_shared_layers": 20, "use_double_wide_mlp": True},
}
_SIZE_KEYS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
)


def gemma4(name: str, **changes: Any) -> dict[str, Any]:
    """``config.json`` of a released Gemma 4."""
    small = name.startswith("e")
    sizes = dict(zip(_SIZE_KEYS, _SIZES[name], strict=True))
    pattern = 5 if name == "e2b" else 6
    kinds = [
        "sliding_attention" if (i + 1) % pattern else "full_attention"
        for i in range(sizes["num_hidden_layers"])
    ]
    text = {
        "model_type": "gemma4_unified_text" if name == "12b" else "gemma4_text",
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
        "head_dim": 256,
        "global_head_dim": 512,
        "final_logit_softcapping": 30.0,
        "hidden_size_per_layer_input": 256 if small else 0,
        "attention_k_eq_v": not small,
        "sliding_window": 512 if small else 1024,
        "layer_types": kinds,
        "use_bidirectional_attention": None if small else "vision",
        "max_position_embeddings": 131072 if small else 262144,
    } | sizes | _OWN[name] | changes  # fmt: skip
    return {"model_type": "gemma4_unified" if name == "12b" else "gemma4", "text_config": text}


TARGETS: dict[str, tuple[dict[str, Any], float]] = {
    "SmolLM2-135M": (SMOLLM2, 0.135),
    "Llama-3.1-8B": (LLAMA_8B, 8.03),
    "Qwen2.5-7B": (QWEN25_7B, 7.62),
    "Qwen3-8B": (QWEN3_8B, 8.19),
    "Qwen3-30B-A3B": (QWEN3_30B_A3B, 30.5),
    "Qwen3.6-27B": (QWEN36_27B, 27),
    "Qwen3.6-35B-A3B": (QWEN36_35B_A3B, 35),
    "Gemma 3 270M": (GEMMA3["270m"], 0.27),
    "Gemma 4 26B-A4B": (gemma4("26b"), 25.2),
    "Gemma 4 31B": (gemma4("31b"), 30.7),
    "Gemma 4 12B": (gemma4("12b"), 11.9),
    "Gemma 4 E4B": (gemma4("e4b"), 7.5),
    "Gemma 4 E2B": (gemma4("e2b"), 4.6),
    "DeepSeek-V3": (DEEPSEEK_V3, 671),
    "Kimi-K2.5": (KIMI_K25, 1027),
}

_SPEC = {"proposal_type": "greedy", "verifier_accept_k": 1, "accept_tolerance": 0.0}


def _speculators(kind: str, tokens: int, layers: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "speculators_model_type": kind,
        "speculators_config": {"algorithm": kind, "proposal_methods": [_SPEC | {"speculative_tokens": tokens}]},
        "transformer_layer_config": layers,
        "target_hidden_size": None,
        **more,
    }  # fmt: skip


def _layers(kind: str, sizes: str, **more: Any) -> dict[str, Any]:
    """``sizes``: width, layers, heads, key heads, head size, feed-forward size, vocabulary."""
    return _model(kind, f"{sizes} 131072", **more)


def _deepspec(sizes: str) -> dict[str, Any]:
    """DSpark in blocks of seven, made for a Qwen3 of 36 layers."""
    return _layers("qwen3", sizes, tie_word_embeddings=False) | {
        "architectures": ["Qwen3DSparkModel"], "block_size": 7, "mask_token_id": 151669,
        "target_layer_ids": [1, 9, 17, 25, 33], "num_target_layers": 36, "num_anchors": 512, "markov_rank": 256,
        "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True,
    }  # fmt: skip


EAGLE3_31B = _speculators(
    "eagle3",
    3,
    _layers("llama", "5376 1 32 16 256 21504 262144"),
    draft_vocab_size=32000,
    eagle_aux_hidden_state_layer_ids=[2, 30, 57],
    norm_before_residual=True,
    norm_before_fc=False,
)
EAGLE3_KIMI = _layers("kimi_k2", "7168 1 64 64 112 18432 163840", **_LATENT) | {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "draft_vocab_size": 163840,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58], "use_aux_hidden_state": True},
}
DFLASH_8B = _layers("qwen3", "4096 5 32 8 128 12288 151936") | {
    "architectures": ["DFlashDraftModel"], "num_target_layers": 36,
    "dflash_config": {"block_size": 16, "mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
}  # fmt: skip
DFLASH_27B = _layers("qwen3", "5120 5 32 8 128 17408 248320", sliding_window=2048) | {
    "architectures": ["DFlashDraftModel"], "num_target_layers": 64,
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "dflash_config": {"block_size": 16, "mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
}  # fmt: skip
DFLASH_35B = _speculators(
    "dflash",
    7,
    _layers("qwen3", "2048 5 32 4 128 6144 248320"),
    draft_vocab_size=32000,
    aux_hidden_state_layer_ids=[2, 11, 20, 29, 37],
    mask_token_id=248070,
    block_size=8,
    sample_from_anchor=False,
    sliding_window_non_causal=False,
)
DSPARK_8B = _deepspec("4096 5 32 8 128 12288 151936")
DSPARK_4B = _deepspec("2560 5 32 8 128 9728 151936")
DSPARK_31B = _speculators(
    "dspark",
    7,
    _layers("qwen3", "5376 5 32 8 128 21504 262144"),
    draft_vocab_size=32000,
    aux_hidden_state_layer_ids=[2, 16, 30, 44, 57],
    mask_token_id=4,
    block_size=8,
    sample_from_anchor=False,
    sliding_window_non_causal=False,
)
#: Of a target that is not a family here; its widths are enough.
DSPARK_GLM = _speculators(
    "dspark",
    8,
    _layers(
        "qwen3", "6144 3 64 64 64 12288 154880", sliding_window=2048, layer_types=["sliding_attention"] * 3
    ),
    draft_vocab_size=154880,
    aux_hidden_state_layer_ids=[2, 20, 39, 58, 75],
    mask_token_id=154856,
    block_size=8,
    sample_from_anchor=True,
    sliding_window_non_causal=False,
    markov_rank=256,
    markov_head_type="vanilla",
    enable_confidence_head=True,
    confidence_head_with_markov=True,
)
GLM_LIKE = _model("llama", "6144 78 64 8 128 12288 154880 131072")


def assistant(name: str) -> dict[str, Any]:
    """``config.json`` of a Gemma 4 assistant, made for a target of :func:`gemma4`."""
    of = gemma4(name)["text_config"]
    small = name.startswith("e")
    text = {
        "model_type": "gemma4_text", "vocab_size": 262144, "hidden_size": 256 if small else 1024,
        "intermediate_size": 2048 if small else 8192, "num_hidden_layers": 4, "num_kv_shared_layers": 4,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "num_attention_heads": 4 if small else of["num_attention_heads"], "head_dim": 256, "global_head_dim": 512,
        "num_key_value_heads": of["num_key_value_heads"], "sliding_window": of["sliding_window"],
        "num_global_key_value_heads": of.get("num_global_key_value_heads"),
        "attention_k_eq_v": of["attention_k_eq_v"], "hidden_size_per_layer_input": 0,
        "max_position_embeddings": of["max_position_embeddings"],
    }  # fmt: skip
    return {
        "model_type": "gemma4_assistant",
        "architectures": ["Gemma4AssistantForCausalLM"],
        "text_config": {key: value for key, value in text.items() if value is not None},
        "backbone_hidden_size": of["hidden_size"],
        "use_ordered_embeddings": small,
        "num_centroids": 2048,
        "centroid_intermediate_top_k": 32,
    }


#: Name of a target in :data:`TARGETS` -> drafters for it: configs of their folders, or names of methods.
DRAFTERS: dict[str, tuple[Any, ...]] = {
    "Qwen3-8B": (DFLASH_8B, DSPARK_8B, "ngram"),
    "Qwen3.6-27B": ("mtp", DFLASH_27B),
    "Qwen3.6-35B-A3B": ("mtp", DFLASH_35B),
    "Gemma 4 31B": (EAGLE3_31B, DSPARK_31B, assistant("31b"), GEMMA3["270m"]),
    "Gemma 4 26B-A4B": (assistant("26b"),),
    "Gemma 4 12B": (assistant("12b"),),
    "Gemma 4 E2B": (assistant("e2b"),),
    "DeepSeek-V3": ("mtp",),
    "Kimi-K2.5": (EAGLE3_KIMI,),
}
