"""What the files of EAGLE-3 drafters have in common, whatever their format.

Facts come from the tensors where they can; a flag of the config that contradicts them is an error.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from specjax.checkpoints.formats import EMBED, HEAD, Files, stripped, vocabulary
from specjax.targets.hf import check_config

#: Keys of the layers' config that are read, or that change nothing in one dense decoder layer.
LAYERS = {
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "hidden_act", "attention_bias", "mlp_bias", "layer_types", "sliding_window",
    "max_window_layers", "max_position_embeddings", "vocab_size", "use_sliding_window",
    # latent attention
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    # experts of the target a config was copied from: the drafter's feed-forward is dense
    "n_routed_experts", "n_shared_experts", "moe_intermediate_size", "first_k_dense_replace", "num_experts_per_tok",
    "topk_method", "scoring_func", "norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group", "ep_size",
    "moe_layer_freq", "aux_loss_alpha", "seq_aux", "num_nextn_predict_layers", "num_experts",
    "decoder_sparse_step", "mlp_only_layers",
}  # fmt: skip
#: Settings whose other values are not implemented.
FIXED = {
    "pretraining_tp": (1, None),
    "mla_use_nope": (False, None),
    "parallel_drafting": (False, None),
}
#: Drafter settings that are handed on as they are.
FLAGS = ("norm_before_residual", "norm_output", "logit_scale", "target_hidden_size")
#: Drafter settings that the tensors show: setting -> the tensor that is there if it is true.
SHOWN = {"norm_before_fc": "input_norm.weight", "fc_norm": "fc_norm.0.weight"}
#: Keys that say how many states are fused.
COUNTS = ("num_aux_hidden_states", "num_aux_layers", "num_eagle_features")
SKIPPED = {
    **vocabulary.SKIPPED,
    "d2t": "a map that is the identity",
    "verifier_lm_head.weight": "copy of the target's head, used in training",
    "verifier_norm.weight": "copy of the target's norm, used in training",
}
_ATTENTION = "layers.0.self_attn."
_MIDLAYER = re.compile(r"^midlayer\.(?=(\d+\.)?)")


def check(files: Files, config: Mapping[str, Any], known: Collection[str]) -> None:
    """ValueError for a setting that is not implemented, a loud warning for one nobody knows."""
    check_config({**config, "model_type": files.where}, LAYERS | set(known), FIXED)


def names(files: Files) -> dict[str, str]:
    """Names the drafter uses -> names in the file: no ``model.``, and ``layers.`` for ``midlayer.``.

    Raises ValueError when the tensors are not those of a serial EAGLE-3 drafter.
    """
    out = {}
    for short, name in stripped(files.shapes, "model.").items():
        found = _MIDLAYER.match(short)
        prefix = "" if found is None else "layers." if found[1] else "layers.0."
        out[prefix + (short if found is None else short[found.end() :])] = name
    if "mask_hidden" in out:
        raise ValueError(
            f"{files.where}: a parallel EAGLE drafter (it has mask_hidden), which is not supported"
        )
    if "layers.0.hidden_norm.weight" not in out or "norm.weight" not in out:
        raise ValueError(
            f"{files.where}: no EAGLE-3 drafter, which has norm.weight and layers.0.hidden_norm.weight (or "
            "midlayer.hidden_norm.weight); heads of EAGLE 1 and 2 are not supported"
        )
    return out


def settings(
    files: Files, names: dict[str, str], layers: Mapping[str, Any], said: Mapping[str, Any]
) -> dict[str, Any]:
    """Settings of the drafter but ``taps`` and ``k``. ``layers``: the layers' config, ``said``: the drafter's.

    Removes from ``names`` what is not read as a weight. Raises ValueError when config and tensors disagree.
    """
    config = _completed(files, names, layers)
    if config.get("tie_word_embeddings") and EMBED in names and HEAD not in names:
        names[HEAD] = names[EMBED]
    rows = config.get("vocab_size", files.target.vocab_size)
    size = vocabulary.reduced(files, names, said.get("draft_vocab_size"), rows)
    for name in (vocabulary.T2D, *((vocabulary.D2T,) if size is None else ())):
        names.pop(name, None)
    return {
        "transformer": {**config, "vocab_size": rows},
        "draft_vocab_size": _head_rows(files, names, size, said),
        "reduced": size is not None,
        "fc_inputs": files.shapes[names["fc.weight"]][-1] if "fc.weight" in names else None,
        "latent": f"{_ATTENTION}kv_a_proj_with_mqa.weight" in names,
        "qk_norm": _ATTENTION + "q_norm.weight" in names,
        "o_bias": _ATTENTION + "o_proj.bias" in names,
        **{flag: _shown(files, names, said, flag, name) for flag, name in SHOWN.items()},
        **{flag: said[flag] for flag in FLAGS if said.get(flag) is not None},
    }


def _completed(files: Files, names: Mapping[str, str], given: Mapping[str, Any]) -> dict[str, Any]:
    """The layers' config, with what it leaves out taken from the tensors' shapes."""
    shape = {short: files.shapes[name] for short, name in names.items()}
    config = {key: value for key, value in given.items() if value is not None}
    layers = {int(m[1]) for m in map(re.compile(r"layers\.(\d+)\.").match, names) if m}
    config.setdefault("hidden_size", shape["norm.weight"][0])
    config.setdefault("num_hidden_layers", len(layers))
    if "layers.0.mlp.gate_proj.weight" in shape:
        config.setdefault("intermediate_size", shape["layers.0.mlp.gate_proj.weight"][0])
    if "head_dim" not in config and _ATTENTION + "k_proj.weight" in shape and "num_attention_heads" in config:
        config["head_dim"] = shape[_ATTENTION + "q_proj.weight"][0] // int(config["num_attention_heads"])
    rope = config.get("rope_parameters") or {}
    if "sliding_attention" in rope:  # one entry per kind of layer
        config["rope_parameters"] = rope["sliding_attention"]
    return _with_bias(files, names, config)


def _with_bias(files: Files, names: Mapping[str, str], config: dict[str, Any]) -> dict[str, Any]:
    """``attention_bias`` as the tensors show it; a config that says otherwise is an error."""
    stored, said = _ATTENTION + "q_proj.bias" in names, config.get("attention_bias")
    if said is not None and bool(said) != stored:
        raise ValueError(
            f"{files.where}: the config has attention_bias={said}, but {_ATTENTION}q_proj.bias is "
            f"{'there' if stored else 'missing'}"
        )
    return {**config, "attention_bias": stored}


def _shown(files: Files, names: Mapping[str, str], said: Mapping[str, Any], flag: str, tensor: str) -> bool:
    stored, given = tensor in names, said.get(flag)
    if given is not None and bool(given) != stored:
        raise ValueError(
            f"{files.where}: the config has {flag}={given}, but {tensor} is {'there' if stored else 'missing'}"
        )
    return stored


def _head_rows(files: Files, names: Mapping[str, str], reduced: int | None, said: Mapping[str, Any]) -> int:
    """Size of the draft vocabulary; ValueError when table, map and config disagree."""
    stated = said.get("draft_vocab_size")
    sizes = {"draft_vocab_size": stated, "d2t": reduced}
    if HEAD in names:
        sizes[HEAD] = files.shapes[names[HEAD]][0]
    given = {name: int(size) for name, size in sizes.items() if size is not None}
    if len(set(given.values())) > 1:
        raise ValueError(f"{files.where}: the size of the draft vocabulary is stated differently: {given}")
    return next(iter(given.values()), files.target.vocab_size)


def default_taps(files: Files, notes: list[str]) -> tuple[int, ...]:
    """The streams every EAGLE-3 trainer taps unless told otherwise: after 2, L/2 and L - 3 layers."""
    layers = int(files.target.num_layers)
    taps = (2, layers // 2, layers - 3)
    notes.append(
        f"the file does not state which layers it taps; after layers {list(taps)} of {layers} is assumed (taps=...)"
    )
    return taps


def check_counts(files: Files, said: Mapping[str, Any], taps: Collection[int]) -> None:
    """ValueError when the config counts other taps than it lists."""
    for key in COUNTS:
        if said.get(key) is not None and int(said[key]) != len(taps):
            raise ValueError(
                f"{files.where}: {key} is {said[key]}, but {len(taps)} taps are listed: {list(taps)}"
            )
