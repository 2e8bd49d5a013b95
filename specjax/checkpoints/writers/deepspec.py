"""DeepSpec's folders: settings at the top level of a config like the target's, one class per kind of drafter and layer.

Layout "shift"; taps are outputs of layers counted from 0, -1 is the embedding's output; embedding and head of the whole
vocabulary are stored. Layers are Qwen3's, or Gemma 4's with scaled embeddings and capped logits.
"""

from typing import Any

from specjax.checkpoints.writers import Folder, Given, keys, said, speculators_dflash as block
from specjax.checkpoints.writers.tensors import EMBED, HEAD, table

METHODS = ("eagle3", "dflash", "dspark")
#: Settings of training that its classes ask for; they change nothing in a drafter that is trained.
_TRAINING: dict[str, dict[str, Any]] = {"eagle3": {"step_loss_decay": 0.8}, "block": {"num_anchors": 512}}
_CLASSES = {
    ("eagle3", "plain"): "Qwen3Eagle3Model",
    ("eagle3", "gemma4"): "Gemma4Eagle3Model",
    ("block", "plain"): "Qwen3DSparkModel",
    ("block", "gemma4"): "Gemma4DSparkModel",
}


def problems(given: Given) -> list[str]:
    """What its configs have no key for."""
    cfg, body = given.cfg, given.cfg.body
    gemma, layers = body.flavour == "gemma4", int(given.target.cfg.num_layers)
    scale = body.hidden_size**0.5 if gemma else 1.0
    plain = [] if gemma else keys.body_problems(body)
    return said(
        *plain,
        (any(w is not None for w in body.windows), "it has layers with a window"),
        (not body.qk_norm, "its queries and keys have no norm"),
        (layers in cfg.taps, f"it taps the stream after all {layers} layers, which DeepSpec does not"),
        (cfg.input_scale != scale, f"input_scale is {cfg.input_scale}, not {scale:g}"),
        (cfg.softcap is not None and not gemma, f"softcap is {cfg.softcap}"),
        *(_eagle3(cfg) if given.method == "eagle3" else _block(given)),
    )


def _eagle3(cfg: Any) -> list[tuple[Any, str]]:
    flags = [
        f for f in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output") if getattr(cfg, f)
    ]
    return [
        (flags, f"it has {', '.join(flags)}"),
        (cfg.mla is not None, "its attention is latent"),
        (not cfg.taps, "it reads the target's last state in place of taps (use_aux_hidden_state=false)"),
        (cfg.reduced, "its draft vocabulary is reduced"),
        (cfg.logit_scale != 1, f"logit_scale is {cfg.logit_scale}"),
        (
            cfg.body.hidden_size != cfg.target_size,
            f"it is {cfg.body.hidden_size} wide, the target {cfg.target_size}",
        ),
    ]


def _block(given: Given) -> list[tuple[Any, str]]:
    cfg = given.cfg
    return [
        *block.plain(given),
        (cfg.layout != "shift", f"its layout is {cfg.layout!r}, DeepSpec's is 'shift'"),
        (any(cfg.causal), f"it has causal layers: {cfg.causal}"),
        (cfg.draft_vocab is not None, "its draft vocabulary is reduced"),
        (cfg.output_multiplier != 1, f"output_multiplier is {cfg.output_multiplier}"),
        (cfg.conv is not None or cfg.selector is not None, "it has DFlash2's parts"),
    ]


def plan(given: Given) -> Folder:
    """The folder."""
    cfg, target = given.cfg, given.target
    kind = "eagle3" if given.method == "eagle3" else "block"
    embed, head = table(given, EMBED, target.shared.embed), table(given, HEAD, target.shared.head)
    gemma = cfg.body.flavour == "gemma4"
    layers = (
        keys.gemma(cfg.body, given, cfg.softcap)
        if gemma
        else keys.transformer(cfg.body, given, embed.shape[0])
    )
    config = {
        "architectures": [_CLASSES[kind, cfg.body.flavour]],
        **layers,
        "layer_types": ["full_attention"] * cfg.body.layers,
        "dtype": keys.dtype(given),
        "target_layer_ids": [tap - 1 for tap in cfg.taps],
        "num_target_layers": int(target.cfg.num_layers),
        **(_eagle3_keys(given) if kind == "eagle3" else _block_keys(given)),
        **_TRAINING[kind],
    }
    return Folder(config, {**given.tensors, EMBED: embed, HEAD: head})


def _eagle3_keys(given: Given) -> dict[str, Any]:
    layers = given.cfg.body.layers
    return {
        "ttt_length": given.cfg.k,
        "draft_num_hidden_layers": layers,
        "target_model_name_or_path": given.target.name,
    }


def _block_keys(given: Given) -> dict[str, Any]:
    cfg = given.cfg
    none = {
        "markov_rank": 0,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
        "confidence_head_with_markov": False,
    }
    return {
        "block_size": cfg.rows,
        "mask_token_id": cfg.mask_id,
        **(block.heads(cfg) if given.method == "dspark" else none),
    }
