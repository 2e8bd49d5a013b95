"""Settings of Gemma 4 text models, from the released files, older dumps and what transformers writes."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from specjax.targets import gemma
from specjax.targets.gemma import FULL, SLIDING, Kind
from specjax.targets.hf import check_config, text_part

_DEFAULTS: dict[str, Any] = gemma.DEFAULTS | {
    "vocab_size": 262144,
    "sliding_window": 512,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "enable_moe_block": False,
}
_KNOWN = gemma.KNOWN | {
    *_DEFAULTS, "vocab_size_per_layer_input", "hidden_size_per_layer_input", "num_experts", "top_k_experts",
    "moe_intermediate_size", "expert_intermediate_size", "global_head_dim", "num_global_key_value_heads",
    "per_layer_config", "sliding_window_pattern",
    "query_pre_attn_scalar",  # some files still have it; Gemma 4 does not scale scores
}  # fmt: skip
_FIXED = gemma.FIXED | {
    "use_bidirectional_attention": (None, False, "vision"),  # "vision": among image tokens only
    "attn_logit_softcapping": (None,),
}
_ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(gemma.Base):
    """Frozen settings of a Gemma 4 target.

    ``dense_size``: width of the plain feed-forward block, twice that in the last ``shared_layers`` if
    ``double_wide``. Those layers read keys and values of an earlier one. ``keys_from_values``: full layers
    have one projection for both. ``experts`` 0: no experts. ``per_layer_size`` 0: no inputs per layer.
    """

    dense_size: int
    double_wide: bool
    shared_layers: int
    keys_from_values: bool
    experts: int
    experts_per_token: int
    expert_size: int
    per_layer_size: int

    @property
    def cached(self) -> int:
        """Layers with keys and values of their own; they come first."""
        return self.num_layers - self.shared_layers

    @property
    def mlp_size(self) -> int:
        """Widest feed-forward activation of a position."""
        widest = self.dense_size * (2 if self.double_wide and self.shared_layers else 1)
        return max(widest, self.experts_per_token * self.expert_size)

    def dense_of(self, layer: int) -> int:
        """Width of a layer's plain feed-forward block."""
        return self.dense_size * (2 if self.double_wide and layer >= self.cached else 1)

    def values_only(self, layer: int) -> bool:
        """Whether a layer's keys are made of its values."""
        return self.keys_from_values and layer in self.full_layers


def config(hf: Mapping[str, Any]) -> Config:
    """Config from ``config.json`` of a gemma4, gemma4_unified, gemma4_text or gemma4_unified_text checkpoint."""
    given = text_part(hf)
    check_config(given, _KNOWN, _FIXED)
    text = _DEFAULTS | {key: value for key, value in given.items() if value is not None}
    layers, shared = int(text["num_hidden_layers"]), int(text["num_kv_shared_layers"])
    full = _full_layers(text, layers)
    _check_shared(full, layers, shared)
    return Config(
        **gemma.base_config(text, full, _sliding(text), _full(text, full)),
        dense_size=int(text["intermediate_size"]),
        double_wide=bool(text["use_double_wide_mlp"]),
        shared_layers=shared,
        keys_from_values=bool(text["attention_k_eq_v"]),
        per_layer_size=_per_layer_size(given, text),
        **_experts(text),
    )


def _full_layers(text: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    full = gemma.full_layers(text, int(text.get("sliding_window_pattern", 6)))
    if layers - 1 in full:
        return full
    if "layer_types" in text:
        raise ValueError(
            "gemma4: the last layer must attend to all positions, but layer_types says otherwise"
        )
    return (*full, layers - 1)


def _check_shared(full: tuple[int, ...], layers: int, shared: int) -> None:
    """Every kind of layer that reads somebody else's keys needs one that has them."""
    if not 0 <= shared < layers:
        raise ValueError(f"gemma4: num_kv_shared_layers is {shared} of {layers} layers")
    own, others = range(layers - shared), range(layers - shared, layers)
    for kind in {i in full for i in others} - {i in full for i in own}:
        raise ValueError(
            f"gemma4: the last {shared} layers share keys of earlier layers of their type, but no earlier layer is of "
            f"type {FULL if kind else SLIDING}"
        )


def _sliding(text: Mapping[str, Any]) -> Kind:
    head_dim = int(text["head_dim"])
    return Kind(
        kv_heads=int(text["num_key_value_heads"]),
        head_dim=head_dim,
        rope=gemma.kind_rope(text, SLIDING, head_dim, {}, _ROPE[SLIDING]),
        window=int(text["sliding_window"]),
    )


def _full(text: Mapping[str, Any], layers: tuple[int, ...]) -> Kind:
    """Full layers have heads of another size, and fewer for keys and values where these are one projection."""
    kv_heads = text["num_key_value_heads"]
    if text["attention_k_eq_v"]:
        kv_heads = text.get("num_global_key_value_heads", kv_heads)
    head_dim = text.get("global_head_dim", 512)
    if "per_layer_config" in text:
        own = _overrides(text["per_layer_config"], layers)
        kv_heads = own.get("num_key_value_heads", text["num_key_value_heads"])
        head_dim = own.get("head_dim", text["head_dim"])
    head_dim = int(head_dim)
    return Kind(
        kv_heads=int(kv_heads),
        head_dim=head_dim,
        rope=gemma.kind_rope(text, FULL, head_dim, {}, _ROPE[FULL]),
    )


def _overrides(per_layer: Mapping[str, Any], layers: tuple[int, ...]) -> dict[str, Any]:
    """What transformers writes in place of the two keys of full layers: the same for each of them."""
    entries = {int(i): entry for i, entry in per_layer.items() if entry}
    full = [entries.pop(i, {}) for i in layers]
    known = {"head_dim", "num_key_value_heads"}
    if entries or any(entry != full[0] or set(entry) - known for entry in full):
        raise ValueError(
            "gemma4: per_layer_config must set head_dim and num_key_value_heads, alike for all full layers and for no "
            f"other; it is {dict(per_layer)}"
        )
    return dict(full[0])


def _per_layer_size(given: Mapping[str, Any], text: Mapping[str, Any]) -> int:
    """Width of the inputs per layer: 256 where the file does not say, none where it says null."""
    unified = given.get("model_type") == "gemma4_unified_text"
    size = int(given.get("hidden_size_per_layer_input", 0 if unified else 256) or 0)
    ids = int(text.get("vocab_size_per_layer_input", text["vocab_size"]))
    if size and ids < int(text["vocab_size"]):
        raise ValueError(
            f"gemma4: inputs per layer exist for {ids} of {text['vocab_size']} token ids; every id needs one"
        )
    return size


def _experts(text: Mapping[str, Any]) -> dict[str, int]:
    if not text["enable_moe_block"]:
        return {"experts": 0, "experts_per_token": 0, "expert_size": 0}
    size = text["moe_intermediate_size" if "moe_intermediate_size" in text else "expert_intermediate_size"]
    out = {
        "experts": int(text["num_experts"]),
        "experts_per_token": int(text["top_k_experts"]),
        "expert_size": int(size),
    }
    if not 0 < out["experts_per_token"] <= out["experts"]:
        raise ValueError(f"gemma4: {out['experts_per_token']} experts per token out of {out['experts']}")
    return out
