"""Settings of DeepSeek-V3, Kimi-K2 and K2.5 targets, from the text model's config or the multimodal whole's."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from specjax.layers.latent import Latent, latent
from specjax.layers.rope import RopeConfig, rope_config
from specjax.targets.hf import check_config, text_part


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Frozen settings. The first ``dense_layers`` have no experts."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    heads: int
    mlp_size: int
    max_positions: int
    eps: float
    rope: RopeConfig
    tied: bool
    latent: Latent
    dense_layers: int
    dense_size: int
    experts: int
    experts_per_token: int
    expert_size: int
    shared_size: int  # 0 = no expert that serves every token
    groups: int
    kept_groups: int
    norm_topk: bool
    routed_scale: float
    mtp_layers: int  # behind the others in the checkpoint; not the target's


def config(hf: Mapping[str, Any]) -> Config:
    """Config from ``config.json`` of a deepseek_v3, kimi_k2 or kimi_k25 checkpoint."""
    text = text_part(hf)
    check_config(text, _KNOWN, _FIXED)
    chosen, size = int(text["num_experts_per_tok"]), int(text["moe_intermediate_size"])
    beside = int(text.get("n_shared_experts") or 0) * size
    out = Config(
        vocab_size=int(text["vocab_size"]),
        hidden_size=int(text["hidden_size"]),
        num_layers=int(text["num_hidden_layers"]),
        heads=int(text["num_attention_heads"]),
        mlp_size=max(int(text["intermediate_size"]), chosen * size + beside),
        max_positions=int(text["max_position_embeddings"]),
        eps=float(text.get("rms_norm_eps", 1e-6)),
        rope=rope_config(text, int(text["qk_rope_head_dim"])),
        tied=bool(text.get("tie_word_embeddings", False)),
        latent=latent(text),
        dense_layers=int(text.get("first_k_dense_replace") or 0),
        dense_size=int(text["intermediate_size"]),
        experts=int(text["n_routed_experts"]),
        experts_per_token=chosen,
        expert_size=size,
        shared_size=beside,
        groups=int(text.get("n_group") or 1),
        kept_groups=int(text.get("topk_group") or 1),
        norm_topk=bool(text.get("norm_topk_prob", True)),
        routed_scale=float(text.get("routed_scaling_factor", 1.0)),
        mtp_layers=int(text.get("num_nextn_predict_layers", text.get("num_mtp_layers")) or 0),
    )
    _check_experts(out)
    return out


def _check_experts(cfg: Config) -> None:
    """ValueError where the choice of experts is not possible."""
    size, rest = divmod(cfg.experts, cfg.groups)
    if rest or (cfg.groups > 1 and size < 2):
        raise ValueError(f"deepseek: {cfg.experts} experts cannot form {cfg.groups} groups of at least 2")
    if not 0 < cfg.kept_groups <= cfg.groups:
        raise ValueError(f"deepseek: {cfg.kept_groups} groups kept out of {cfg.groups}")
    if not 0 < cfg.experts_per_token <= cfg.kept_groups * size:
        raise ValueError(
            f"deepseek: {cfg.experts_per_token} experts per token out of {cfg.kept_groups * size}"
        )


_KNOWN = {
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "intermediate_size", "max_position_embeddings", "rms_norm_eps", "q_lora_rank", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_routed_experts", "n_shared_experts",
    "num_experts_per_tok", "moe_intermediate_size", "first_k_dense_replace", "n_group", "topk_group",
    "norm_topk_prob", "routed_scaling_factor", "num_nextn_predict_layers", "num_mtp_layers",
    "head_dim", "qk_head_dim",  # follow from the sizes above
    "ep_size", "seq_aux", "aux_loss_alpha",  # concern training and placement
}  # fmt: skip
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "moe_layer_freq": (1, None),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "rope_interleave": (True, None),
    "pretraining_tp": (1, None),
}
