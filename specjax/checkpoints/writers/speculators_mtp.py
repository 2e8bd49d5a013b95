"""A layer for multi-token prediction as the speculators library writes it: ``mtp_layers.0`` of Qwen3's or Qwen3.5's
kind, whatever family the target is of. Embedding and head are the target's."""

from specjax.checkpoints.writers import Folder, Given, models, said, speculators
from specjax.checkpoints.writers.tensors import fused_experts
from specjax.targets import deepseek_config

_NAMES = {
    "fc": "input_proj",
    "pre_fc_norm_embedding": "token_layernorm",
    "pre_fc_norm_hidden": "hidden_layernorm",
    "norm": "final_layernorm",
}


def problems(given: Given) -> list[str]:
    """What its class does not have."""
    cfg = given.cfg
    return said(
        (isinstance(cfg.model, deepseek_config.Config), "its layer is DeepSeek's"),
        (cfg.own_embed, "it has an embedding of its own"),
        (cfg.own_head, "it has an output head of its own"),
    )


def plan(given: Given) -> Folder:
    """The folder."""
    layers = models.settings(given.cfg.family, given.cfg.model)
    config = speculators.config(given, "mtp", "MTPDraftModel", layers, num_nextn_predict_layers=1)
    tensors = fused_experts(given.tensors)
    return Folder(config, {f"mtp_layers.0.{renamed(name)}": x for name, x in tensors.items()})


def renamed(name: str) -> str:
    """A part's name within the layer."""
    stem, _, kind = name.rpartition(".")
    return f"{_NAMES[stem]}.{kind}" if stem in _NAMES else name.removeprefix("layers.0.")
