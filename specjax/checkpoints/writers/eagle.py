"""EAGLE-3 drafters in the layout of the EAGLE authors, which SpecForge, SGLang and vLLM read: the layer is called
``midlayer``, settings lie at the config's top level, and the list of taps counts inputs of layers.

The embedding is the target's unless the drafter has its own; the head is stored.
"""

from typing import Any

from specjax.checkpoints.writers import Folder, Given, keys, models, said
from specjax.checkpoints.writers.tensors import D2T, HEAD, draft_ids, draft_map, table

METHODS = ("eagle3",)


def problems(given: Given) -> list[str]:
    """What its config has no key for."""
    cfg = given.cfg
    return said(
        *keys.body_problems(cfg.body),
        (cfg.body.qk_norm, "its queries and keys have norms"),
        (
            cfg.body.layers != 1 and cfg.mla is None,
            f"it has {cfg.body.layers} layers, one is called midlayer",
        ),
        (cfg.input_scale != 1, f"input_scale is {cfg.input_scale}"),
        (cfg.softcap is not None, f"softcap is {cfg.softcap}"),
    )


def plan(given: Given) -> Folder:
    """The folder."""
    cfg = given.cfg
    ids = draft_ids(given.tensors) if D2T in given.tensors else None
    head = table(given, HEAD, given.target.shared.head, ids)
    rows = cfg.embed_rows if cfg.own_embed or cfg.reduced else head.shape[0]
    config = {
        "architectures": ["LlamaForCausalLMEagle3" if cfg.mla is None else "Eagle3DeepseekV2ForCausalLM"],
        **_layers(given, rows),
        "dtype": keys.dtype(given),
        "draft_vocab_size": head.shape[0],
        "target_hidden_size": cfg.target_size,
        "ttt_length": cfg.k,
        **_flags(cfg),
    }
    tensors = {**given.tensors, HEAD: head, **draft_map(given.tensors, rows)}
    name = "midlayer." if cfg.body.layers == 1 else "layers.0."
    return Folder(config, {key.replace("layers.0.", name): x for key, x in tensors.items()})


def _layers(given: Given, rows: int) -> dict[str, Any]:
    cfg = given.cfg
    layers = keys.transformer(cfg.body, given, rows)
    if cfg.mla is None:
        return layers
    layers.pop("partial_rotary_factor", None)  # rope turns its own channels, all of them
    own = {**models.latent(cfg.mla), **models.latent_rope(cfg.body.rope, cfg.mla)}
    return {**layers, "model_type": "deepseek_v3", **own}


def _flags(cfg: Any) -> dict[str, Any]:
    """Taps and flags; those that are not set are left out, as files of the authors have it."""
    names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    taps = (
        {"eagle_aux_hidden_state_layer_ids": list(cfg.taps)} if cfg.taps else {"use_aux_hidden_state": False}
    )
    scale = {"logit_scale": cfg.logit_scale} if cfg.logit_scale != 1 else {}
    return {**taps, **{name: True for name in names if getattr(cfg, name)}, **scale}
