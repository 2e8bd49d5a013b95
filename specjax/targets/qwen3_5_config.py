"""Settings of Qwen3.5 and Qwen3.6 targets, from the config of the text model or of the multimodal whole."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from specjax.layers.rope import RopeConfig, rope_config
from specjax.targets.hf import check_config, text_part

_KINDS = ("linear_attention", "full_attention")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Frozen settings. ``full`` says of each layer whether it is attention rather than the gated delta rule."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_size: int
    max_positions: int
    eps: float
    rope: RopeConfig
    tied: bool
    full: tuple[bool, ...]
    key_heads: int  # of the delta rule, as the next four
    value_heads: int
    key_size: int
    value_size: int
    conv_taps: int
    experts: int = 0  # 0 = dense
    experts_per_token: int = 0
    expert_size: int = 0
    shared_size: int = 0

    @property
    def channels(self) -> int:
        """Convolved channels: queries, keys and values of the delta rule."""
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size


def config(hf: Mapping[str, Any]) -> Config:
    """Config from ``config.json`` of a qwen3_5 or qwen3_5_moe checkpoint, with or without its image encoder."""
    text = text_part(hf)
    check_config(text, _KNOWN, _FIXED)
    moe = "moe" in text["model_type"]
    head_dim = int(text.get("head_dim", 256))
    out = Config(
        vocab_size=int(text["vocab_size"]),
        hidden_size=int(text["hidden_size"]),
        num_layers=int(text["num_hidden_layers"]),
        heads=int(text["num_attention_heads"]),
        kv_heads=int(text["num_key_value_heads"]),
        head_dim=head_dim,
        mlp_size=_experts_width(text) if moe else int(text["intermediate_size"]),
        max_positions=int(text["max_position_embeddings"]),
        eps=float(text.get("rms_norm_eps", 1e-6)),
        rope=rope_config({"partial_rotary_factor": 0.25, **text}, head_dim),
        tied=bool(text.get("tie_word_embeddings", False)),
        full=_layers(text),
        key_heads=int(text["linear_num_key_heads"]),
        value_heads=int(text["linear_num_value_heads"]),
        key_size=int(text["linear_key_head_dim"]),
        value_size=int(text["linear_value_head_dim"]),
        conv_taps=int(text["linear_conv_kernel_dim"]),
        **(_moe(text) if moe else {}),
    )
    if out.value_heads % out.key_heads:
        raise ValueError(f"qwen3_5: {out.value_heads} value heads cannot share {out.key_heads} key heads")
    return out


def _layers(text: Mapping[str, Any]) -> tuple[bool, ...]:
    """Which layers are full attention: as listed, or every ``full_attention_interval``-th."""
    kinds, count = text.get("layer_types"), int(text["num_hidden_layers"])
    if kinds is None:
        every = int(text.get("full_attention_interval", 4))
        return tuple((i + 1) % every == 0 for i in range(count))
    if other := sorted(set(kinds) - set(_KINDS)):
        raise ValueError(f"qwen3_5: config has layer type(s) {other}; supported: {', '.join(_KINDS)}")
    if len(kinds) != count:
        raise ValueError(f"qwen3_5: {len(kinds)} layer types for {count} layers")
    return tuple(kind == "full_attention" for kind in kinds)


def _moe(text: Mapping[str, Any]) -> dict[str, int]:
    out = {
        "experts": int(text["num_experts"]),
        "experts_per_token": int(text["num_experts_per_tok"]),
        "expert_size": int(text["moe_intermediate_size"]),
        "shared_size": int(text["shared_expert_intermediate_size"]),
    }
    if not 0 < out["experts_per_token"] <= out["experts"]:
        raise ValueError(f"qwen3_5: {out['experts_per_token']} experts per token out of {out['experts']}")
    return out


def _experts_width(text: Mapping[str, Any]) -> int:
    """Feed-forward activations of a position: those of its experts and of the shared one."""
    chosen = int(text["num_experts_per_tok"]) * int(text["moe_intermediate_size"])
    return chosen + int(text["shared_expert_intermediate_size"])


_KNOWN = {
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "max_position_embeddings", "rms_norm_eps", "layer_types", "full_attention_interval",
    "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
    "linear_num_value_heads", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings",  # concern the drafter in the file
}  # fmt: skip
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "attn_output_gate": (True, None),
    "output_gate_type": ("swish", "silu", None),
    "mamba_ssm_dtype": ("float32", None),
    "mlp_only_layers": ([], None),
}
