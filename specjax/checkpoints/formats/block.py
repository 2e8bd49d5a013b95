"""What the files of block drafters (DFlash, DSpark) have in common, whatever their format."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from specjax.checkpoints.formats import EMBED, HEAD, Files, vocabulary
from specjax.targets.hf import check_config

#: Keys of a transformer config that :func:`specjax.drafters.body.body` reads or that change nothing here.
BODY = {
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "hidden_act", "attention_bias", "mlp_bias", "layer_types", "sliding_window",
    "use_sliding_window", "max_window_layers", "max_position_embeddings", "vocab_size", "pretraining_tp",
}  # fmt: skip
#: Settings whose other values are not implemented.
FIXED = {
    "attention_sink_bias": (False, None),
    "attention_value_scale": (1.0, 1, None),
    "is_neox_style": (True, None),
    "target_hidden_norms": (False, None),
}
#: Tensors that are not read, by the end of their name.
SKIPPED = {
    **vocabulary.SKIPPED,
    "d2t": "a map that is the identity",
    "verifier_lm_head.weight": "copy of the target's head, used in training",
    "verifier_norm.weight": "copy of the target's norm, used in training",
}


def merged(files: Files, section: str, names: Collection[str]) -> dict[str, Any]:
    """Settings ``names`` from the config's top level and its dict ``section``, wherever each is given.

    ValueError when a setting is given in both places with different values.
    """
    nested, out = files.hf.get(section) or {}, {}
    for name in names:
        given = [place[name] for place in (files.hf, nested) if place.get(name) is not None]
        if len(given) == 2 and given[0] != given[1]:
            raise ValueError(
                f"{files.where}: {name} is {given[0]!r} at the config's top level and {given[1]!r} in {section}"
            )
        if given:
            out[name] = given[0]
    return out


def check(files: Files, config: Mapping[str, Any], known: Collection[str]) -> None:
    """ValueError for a setting that is not implemented, a loud warning for one nobody knows."""
    check_config({**config, "model_type": files.where}, BODY | set(known), FIXED)


def transformer(files: Files, names: Mapping[str, str], config: Mapping[str, Any]) -> dict[str, Any]:
    """Transformer keys with what the config leaves out taken from the tensors' shapes.

    Configs may omit values that equal a library's defaults; shapes say the same. What they do not say
    (epsilon, rope base) has the Qwen3 defaults, 1e-6 and 10000.
    """
    shape = {short: files.shapes[name] for short, name in names.items()}
    first = "layers.0.self_attn."
    missing = [n for n in ("norm.weight", first + "k_norm.weight", "fc.weight") if n not in shape]
    if missing:
        raise ValueError(f"{files.where} lacks tensor(s) every DFlash drafter has: {missing}")
    head_dim = shape[first + "k_norm.weight"][0]
    heads = lambda kind: shape.get(f"{first}{kind}_proj.weight", (0,))[0] // head_dim  # noqa: E731
    layers = {int(m[1]) for m in map(re.compile(r"layers\.(\d+)\.").match, names) if m}
    seen = {
        "hidden_size": shape["norm.weight"][0],
        "head_dim": head_dim,
        "num_attention_heads": heads("q"),
        "num_key_value_heads": heads("k"),
        "intermediate_size": shape.get("layers.0.mlp.gate_proj.weight", (0,))[0],
        "num_hidden_layers": len(layers),
    }
    out = {**seen, **{key: value for key, value in config.items() if value is not None}}
    rope = out.get("rope_parameters") or {}
    if "sliding_attention" in rope:  # one entry per layer type
        out["rope_parameters"] = rope["sliding_attention"]
    return out


def tensors(
    files: Files, names: dict[str, str], draft_vocab: int | None = None, full: int | None = None
) -> dict[str, Any]:
    """Settings of a block drafter that follow from its tensors.

    ``draft_vocab`` and ``full``: sizes of the draft vocabulary and of its target's, as the config states them. A
    map that is the identity is dropped from ``names``.
    """
    size = vocabulary.reduced(files, names, draft_vocab, full)
    for name in (vocabulary.T2D, *((vocabulary.D2T,) if size is None else ())):
        names.pop(name, None)
    rows = lambda name: files.shapes[names[name]][0] if name in names else None  # noqa: E731
    return {
        "fc_width": files.shapes[names["fc.weight"]][1],
        "embed_rows": rows(EMBED),
        "head_rows": rows(HEAD),
        "mask_embedding": "mask_embedding" in names,
        "draft_vocab": size,
    }


def dflash2(files: Files, names: Mapping[str, str], said: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of DFlash2's parts, if the tensors are there; ValueError when the config says otherwise."""
    out: dict[str, Any] = {}
    shape = lambda name: files.shapes.get(names.get(name, ""))  # noqa: E731
    base = shape("layers.0.attention_conv.base_kernel")
    project = shape("layers.0.attention_conv.kernel_projection.weight")
    if base and project:
        _, taps, width = base
        out["conv"] = (taps, 2 * taps * width // project[0])
    codes = shape("candidate_selector.predecessor_codebook")
    if codes:
        out["selector"] = (codes[1], int(said.get("selector_top_k", 16)))
    stated = {
        "conv_kernel_size": out.get("conv", (None, None))[0],
        "conv_group_size": out.get("conv", (None, None))[1],
        "selector_rank": out.get("selector", (None,))[0],
    }
    for key, found in stated.items():
        if key in said and said[key] != found:
            raise ValueError(
                f"{files.where}: config has {key}={said[key]}, the tensors say {found or 'there is none'}"
            )
    return out


#: Keys of DFlash2's parts.
DFLASH2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def sliding(config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Which layers slide."""
    kinds = config.get("layer_types") or ["full_attention"] * layers
    return tuple(kind == "sliding_attention" for kind in kinds)


def default_taps(target_layers: int, layers: int) -> tuple[int, ...]:
    """Layers z-lab and DeepSpec tap when a config names none, as many as the drafter has layers (ids are
    outputs of layers). Halves round to even, as Python's ``round`` does."""
    if layers == 1:
        return (target_layers // 2,)
    return tuple(round(1 + i * (target_layers - 4) / (layers - 1)) for i in range(layers))


def renamed(names: Mapping[str, str], changes: Mapping[str, str]) -> dict[str, str]:
    """``names`` with other short names where ``changes`` has one."""
    return {changes.get(short, short): name for short, name in names.items()}
