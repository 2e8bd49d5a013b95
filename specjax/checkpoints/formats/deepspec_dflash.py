"""The body of DeepSpec's block drafters (``Qwen3DSparkModel``); without heads they are DFlash.

Conventions: layout "shift"; settings at the config's top level, which is otherwise a copy of the target's;
``target_layer_ids`` are outputs of layers counted from 0, and -1 is the embedding's output. Every layer
sees the whole block. Embedding and head are stored, usually as copies of the target's.
"""

from typing import Any

from specjax.checkpoints.formats import EMBED, HEAD, Files, block, stripped

#: "num_anchors" belongs to training; the last four say which heads there are.
KEYS = {
    "block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "num_anchors",
    "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
}  # fmt: skip
SECTION = "dflash_config"


def body(files: Files) -> tuple[dict[str, Any], dict[str, str], tuple[str, ...]]:
    """Settings, names and notes of everything but heads."""
    block.check(files, {k: v for k, v in files.hf.items() if k != SECTION}, KEYS)
    block.check(files, files.hf.get(SECTION) or {}, KEYS)
    said = block.merged(files, SECTION, KEYS)
    names, notes = stripped(files.shapes, "model."), []
    if files.hf.get("tie_word_embeddings") and EMBED in names and HEAD not in names:
        names[HEAD] = names[EMBED]
    shape = block.transformer(files, names, files.hf)
    layers, ids = shape["num_hidden_layers"], said.get("target_layer_ids")
    if ids is None:
        ids = block.default_taps(int(said.get("num_target_layers", files.target.num_layers)), layers)
        notes.append(f"the file does not state target_layer_ids; DeepSpec's rule gives {list(ids)}")
    settings = {
        "transformer": shape,
        "layout": "shift",
        "block_size": said["block_size"],
        "mask_id": said.get("mask_token_id"),
        "taps": tuple(int(i) + 1 for i in ids),
        "target_layers": said.get("num_target_layers"),
        "vocab_size": files.hf.get("vocab_size"),
        "causal": (False,) * layers,
        **block.tensors(files, names),
    }
    return settings, names, (*notes, 'layout "shift", as every file of this class has it')
