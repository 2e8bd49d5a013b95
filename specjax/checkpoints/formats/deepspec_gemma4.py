"""Gemma 4 layers in DeepSpec's folders (``Gemma4Eagle3Model``, ``Gemma4DSparkModel``), rewritten as the settings that
the other readers know.

Conventions: the config is a copy of the target's, but every layer is one of its full-attention layers: heads of
``global_head_dim`` channels, ``num_global_key_value_heads`` of them where one projection gives keys and values, and the
rope of full attention. Embeddings are scaled by the square root of the width, logits are soft-capped.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from specjax.checkpoints.formats import Files, Found, stripped
from specjax.targets.gemma import FULL, SLIDING

#: The copied config's settings that are read here, or that concern other layers than the drafter's.
READ = {
    "hidden_activation", "final_logit_softcapping", "attention_k_eq_v", "global_head_dim",
    "num_global_key_value_heads", "sliding_window", "sliding_window_pattern", "num_kv_shared_layers",
    "use_double_wide_mlp", "hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block",
    "top_k_experts", "moe_intermediate_size", "expert_intermediate_size", "num_experts", "query_pre_attn_scalar",
    "use_bidirectional_attention", "cache_implementation", "per_layer_config",
}  # fmt: skip
#: Rope of full attention where a file does not say, as in Gemma 4.
_ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
_ATTENTION = "layers.0.self_attn."
#: Parts of target layers that no drafter is known to have.
_ABSENT = (".router.", ".experts.", "per_layer_")


def read(files: Files, reader: Callable[[Files], Found]) -> Found:
    """What ``reader`` makes of the folder, with Gemma 4 layers."""
    shapes = {short: files.shapes[name] for short, name in stripped(files.shapes, "model.").items()}
    _check(files, shapes)
    found = reader(dataclasses.replace(files, hf=_plain(files, shapes)))
    notes = found.notes
    if not _rope(files.hf):
        notes = (*notes, "the file does not state the rope of full attention; Gemma 4's is assumed")
    return dataclasses.replace(found, settings=found.settings | _settings(files, shapes), notes=notes)


def _settings(files: Files, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    return {
        "flavour": "gemma4",
        "values_from_keys": _ATTENTION + "v_proj.weight" not in shapes,
        "input_scale": shapes["norm.weight"][0] ** 0.5,
        "softcap": files.hf.get("final_logit_softcapping"),
    }


def _plain(files: Files, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The config with the geometry of the drafter's own layers and without what is read here."""
    hf = {key: value for key, value in files.hf.items() if key not in READ and value is not None}
    rope = {"rope_theta": _ROPE["rope_theta"], **(_rope(files.hf) or _ROPE)}
    return {**hf, **_heads(files, shapes), "rope_parameters": rope, "hidden_act": "gelu_pytorch_tanh"}


def _rope(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the config says of the rope of full attention, {} if nothing."""
    given = hf.get("rope_parameters") or {}
    return given.get(FULL) or {} if {FULL, SLIDING} & set(given) else given


def _heads(files: Files, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Numbers and size of heads as the tensors show them; ValueError where the config says otherwise."""
    hf, size = files.hf, shapes[_ATTENTION + "k_norm.weight"][0]
    heads, kv_heads = (shapes[f"{_ATTENTION}{part}_proj.weight"][0] // size for part in "qk")
    merged = _ATTENTION + "v_proj.weight" not in shapes
    stated_kv = (hf.get("num_global_key_value_heads") if merged else None) or hf.get("num_key_value_heads")
    override = (
        hf.get("per_layer_config") is not None
    )  # what newer configs have in place of the two global keys
    for name, said, found in (
        ("attention_k_eq_v", hf.get("attention_k_eq_v"), merged),
        ("num_attention_heads", hf.get("num_attention_heads"), heads),
        ("global_head_dim", hf.get("global_head_dim"), size),
        ("key/value heads of full attention", None if override else stated_kv, kv_heads),
    ):
        if said is not None and said != found:
            raise ValueError(f"{files.where}: the config has {name}={said}, the tensors say {found}")
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": size}


def geometry(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers and size of heads as the config alone states them."""
    merged = bool(hf.get("attention_k_eq_v"))
    own: Mapping[str, Any] = next(iter((hf.get("per_layer_config") or {}).values()), {})
    kv_heads = (hf.get("num_global_key_value_heads") if merged else None) or hf.get("num_key_value_heads")
    return {
        "head_dim": own.get("head_dim") or hf.get("global_head_dim") or hf["head_dim"],
        "num_key_value_heads": own.get("num_key_value_heads") or kv_heads,
    }


def _check(files: Files, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """ValueError unless the folder holds the layers this module describes."""
    needed = [
        "norm.weight", *(f"{_ATTENTION}{part}.weight" for part in ("q_proj", "k_proj", "k_norm", "q_norm")),
        "layers.0.pre_feedforward_layernorm.weight", "layers.0.layer_scalar",
    ]  # fmt: skip
    missing = [name for name in needed if name not in shapes]
    if missing:
        raise ValueError(f"{files.where} lacks tensor(s) every drafter with Gemma 4 layers has: {missing}")
    strange = sorted(name for name in shapes if any(part in name for part in _ABSENT))
    if strange:
        raise ValueError(
            f"{files.where}: experts and inputs per layer are not supported in a drafter's layers; it has "
            f"{strange[:3]}"
        )
    activation = files.hf.get("hidden_activation", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        raise ValueError(
            f"{files.where}: hidden_activation={activation!r} in Gemma 4 layers; supported: gelu_pytorch_tanh"
        )
    if SLIDING in (files.hf.get("layer_types") or ()):
        raise ValueError(
            f"{files.where}: layer_types has sliding layers; Gemma 4 layers of drafters attend to all positions"
        )
