"""Frozen settings as Hugging Face spells them: the way back from what the readers made of a config.

Rope is written twice, as ``rope_parameters`` and in the older form of ``rope_theta`` and ``rope_scaling``.
"""

import math
from typing import Any

import numpy as np

from specjax.checkpoints.writers import Given
from specjax.drafters.body import Body
from specjax.layers.rope import RopeConfig

#: Keys that every config has and that change nothing here.
_PLAIN = {
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "tie_word_embeddings": False,
}
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM", "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_text": "Qwen3_5ForCausalLM", "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM", "kimi_k25": "KimiK25ForConditionalGeneration",
    "gemma3_text": "Gemma3ForCausalLM", "gemma3": "Gemma3ForConditionalGeneration",
    "gemma4_text": "Gemma4ForCausalLM", "gemma4": "Gemma4ForConditionalGeneration",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM", "gemma4_unified": "Gemma4UnifiedForConditionalGeneration",
}  # fmt: skip


def architecture(family: str) -> str:
    """Class of a target's family."""
    return _ARCHITECTURES[family]


def dtype(given: Given) -> str:
    """Type that a config states: of the tensors as they are written."""
    if given.dtype != "same":
        return given.dtype
    widest = max(given.tensors.values(), key=lambda t: int(np.prod(t.shape)))
    return widest.dtype.name


def nested_rope(rope: RopeConfig, head_dim: int, always_share: bool = False) -> dict[str, Any]:
    """``rope_parameters`` of one kind of layer. ``always_share``: state the share of channels that turn even if that is
    all of them, where the family's default is another."""
    out: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.factor != 1 or rope.kind in ("linear", "llama3", "yarn"):
        out["factor"] = rope.factor
    if rope.kind == "llama3":
        out |= {"low_freq_factor": rope.low_freq, "high_freq_factor": rope.high_freq}
    if rope.kind == "yarn":
        out |= {
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "attention_factor": rope.attention_factor,
        }
        out |= {} if rope.truncate else {"truncate": False}
    if rope.kind in ("llama3", "yarn"):
        out["original_max_position_embeddings"] = rope.original_max
    if always_share or rope.dims != head_dim or rope.kind == "proportional":
        share = rope.dims / head_dim
        out["partial_rotary_factor"] = (
            share if int(share * head_dim) == rope.dims else math.nextafter(share, 1)
        )
    return out


def rope(cfg: RopeConfig, head_dim: int, always_share: bool = False) -> dict[str, Any]:
    """Both forms of it."""
    nested = nested_rope(cfg, head_dim, always_share)
    flat: dict[str, Any] = {
        key: nested[key] for key in ("rope_theta", "partial_rotary_factor") if key in nested
    }
    scaling = {key: value for key, value in nested.items() if key not in flat}
    return {"rope_parameters": nested, **flat, "rope_scaling": None if cfg.kind == "default" else scaling}


def transformer(body: Body, given: Given, rows: int) -> dict[str, Any]:
    """A plain body's layers as the config of a Qwen3, or of a Llama where queries and keys have no norm.

    ``rows``: of the embedding, which is the target's vocabulary.
    """
    kind = (
        {"model_type": "qwen3", "max_window_layers": body.layers} if body.qk_norm else {"model_type": "llama"}
    )
    more = {} if body.qk_norm else {"mlp_bias": False, "pretraining_tp": 1}
    return {
        **kind,
        **_PLAIN,
        "hidden_size": body.hidden_size,
        "intermediate_size": body.mlp_size,
        "num_hidden_layers": body.layers,
        "num_attention_heads": body.heads,
        "num_key_value_heads": body.kv_heads,
        "head_dim": body.head_dim,
        "hidden_act": "silu",
        "attention_bias": body.qkv_bias,
        "rms_norm_eps": body.eps,
        "vocab_size": rows,
        "max_position_embeddings": int(given.target.cfg.max_positions),
        **windows(body),
        **rope(body.rope, body.head_dim),
        **more,
    }


def windows(body: Body) -> dict[str, Any]:
    """Which layers slide, and how far back they see."""
    size = next((w for w in body.windows if w is not None), None)
    kinds = ["full_attention" if w is None else "sliding_attention" for w in body.windows]
    if not body.qk_norm and size is None:
        return {}
    return {"layer_types": kinds, "sliding_window": size, "use_sliding_window": size is not None}


def body_problems(body: Body) -> list[tuple[Any, str]]:
    """What the config of a Qwen3 or a Llama cannot say of a body."""
    biased = "q, k, v have" if body.qkv_bias else "o has"
    return [
        (body.flavour != "plain", f"its layers are Gemma's (flavour={body.flavour!r})"),
        (
            body.qkv_bias != body.o_bias,
            f"of its projections only {biased} a bias",
        ),
        (
            len({w for w in body.windows if w is not None}) > 1,
            f"its layers have different windows {body.windows}",
        ),
    ]


def gemma(body: Body, given: Given, softcap: float | None) -> dict[str, Any]:
    """A body of Gemma 4's full-attention layers as the config of a Gemma 4 text model."""
    shared = {"num_global_key_value_heads": body.kv_heads} if body.values_from_keys else {}
    return {
        "model_type": "gemma4_text",
        **_PLAIN,
        "hidden_size": body.hidden_size,
        "intermediate_size": body.mlp_size,
        "num_hidden_layers": body.layers,
        "num_attention_heads": body.heads,
        "num_key_value_heads": body.kv_heads,
        **shared,
        "head_dim": body.head_dim,
        "global_head_dim": body.head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "attention_k_eq_v": body.values_from_keys,
        "rms_norm_eps": body.eps,
        "layer_types": ["full_attention"] * body.layers,
        "rope_parameters": {
            "full_attention": nested_rope(body.rope, body.head_dim),
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "final_logit_softcapping": softcap,
        "vocab_size": int(given.target.cfg.vocab_size),
        "max_position_embeddings": int(given.target.cfg.max_positions),
    }
