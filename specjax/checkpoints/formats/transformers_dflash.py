"""DFlash drafters of the transformers library (``muse_glimmer_assistant``).

Conventions: settings at the config's top level; ``target_layer_ids`` are outputs of layers counted from
0; layout "fill"; nothing is causal. A row of a sliding layer sees what is at most ``sliding_window``
positions away, one more than elsewhere. The fusion's names have the prefix ``encoder.``.
"""

from collections.abc import Mapping
from typing import Any

from specjax.checkpoints.formats import Files, Found, block, stripped

KEYS = {"block_size", "mask_token_id", "target_layer_ids"}
_RENAMED = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}


def matches(hf: Mapping[str, Any]) -> bool:
    """By the model type."""
    return hf.get("model_type") == "muse_glimmer_assistant"


def read(files: Files) -> Found:
    """A DFlash drafter."""
    hf = files.hf
    block.check(files, hf, KEYS)
    names = block.renamed(stripped(files.shapes, "model."), _RENAMED)
    shape = block.transformer(files, names, hf)
    slides = block.sliding(shape, shape["num_hidden_layers"])
    if any(slides):
        shape["sliding_window"] = int(shape["sliding_window"]) + 1
    settings = {
        "transformer": shape,
        "layout": "fill",
        "block_size": hf["block_size"],
        "mask_id": hf.get("mask_token_id"),
        "taps": tuple(int(i) + 1 for i in hf["target_layer_ids"]),
        "causal": (False,) * len(slides),
        **block.tensors(files, names),
    }
    return Found("dflash", "transformers", settings, names, block.SKIPPED)
