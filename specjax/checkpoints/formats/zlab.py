"""z-lab's DFlash and DFlash2 folders (package ``dflash``), and SpecForge's, which look the same. SpecForge's
DSpark drafters have heads besides (early ones under ``logit_head.``) and layout "shift".

Conventions: ``target_layer_ids`` are outputs of layers counted from 0. The drafter's settings are in
``dflash_config`` or, in older files, at the config's top level. Layout "fill". Layers slide as
``layer_types`` says; the window counts the row itself, moves with it and limits the block too. Sliding
layers are causal and full ones are not, unless ``is_causal`` (or ``dflash_config.causal``) decides for
all. Embedding and head are the target's; input embeddings are raw rows times ``input_embedding_scale``.
"""

from collections.abc import Mapping
from typing import Any

from specjax.checkpoints.formats import Files, Found, block, heads, stripped

SECTION = "dflash_config"
ARCHITECTURES = {"DFlashDraftModel", "DFlash2DraftModel", "DSparkDraftModel"}
#: Drafter settings, in either place.
KEYS = {
    "block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "input_embedding_scale",
    "output_multiplier", "final_logit_softcapping", "is_causal", "causal", "use_swa", "swa_window_size",
    *block.DFLASH2, *heads.KEYS,
}  # fmt: skip
#: The codebooks' names in folders written by torch's ``save_pretrained``.
_RENAMED = {
    f"candidate_selector.{which}_codebook.weight": f"candidate_selector.{which}_codebook"
    for which in ("predecessor", "successor")
} | {"mask_embedding.weight": "mask_embedding"}


def matches(hf: Mapping[str, Any]) -> bool:
    """A ``dflash_config``, or one of the package's classes."""
    return SECTION in hf or bool(ARCHITECTURES & set(hf.get("architectures") or ()))


def read(files: Files) -> Found:
    """A DFlash drafter; DFlash2 or DSpark where their tensors are there."""
    block.check(files, {k: v for k, v in files.hf.items() if k != SECTION}, KEYS)
    block.check(files, files.hf.get(SECTION) or {}, KEYS)
    said = block.merged(files, SECTION, KEYS)
    names = block.renamed(stripped(files.shapes, "model.", "logit_head."), _RENAMED)
    more = heads.find(files, names, said)
    layout = "shift" if more else "fill"
    notes = [f"the file does not state its block layout; {layout!r} is assumed"]
    shape = _slides(block.transformer(files, names, files.hf), said)
    slides = block.sliding(shape, shape["num_hidden_layers"])
    settings = {
        "transformer": shape,
        "layout": layout,
        "block_size": _block_size(said, notes),
        "mask_id": said.get("mask_token_id"),
        "taps": _taps(files, said, len(slides), notes),
        "target_layers": said.get("num_target_layers"),
        "vocab_size": files.hf.get("vocab_size"),
        "causal": _causal(said, slides),
        "input_scale": said.get("input_embedding_scale"),
        "output_multiplier": said.get("output_multiplier"),
        "softcap": said.get("final_logit_softcapping"),
        **block.tensors(files, names),
        **block.dflash2(files, names, said),
        **more,
    }
    return Found("dspark" if more else "dflash", "z-lab", settings, names, block.SKIPPED, tuple(notes))


def _slides(shape: dict[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """``use_swa`` makes every layer slide; ``swa_window_size`` is the window then."""
    if not said.get("use_swa"):
        return shape
    window = said.get("swa_window_size") or shape.get("sliding_window")
    return {
        **shape,
        "layer_types": ["sliding_attention"] * shape["num_hidden_layers"],
        "sliding_window": window,
    }


def _causal(said: Mapping[str, Any], slides: tuple[bool, ...]) -> tuple[bool, ...]:
    every = said.get("is_causal", said.get("causal"))
    return slides if every is None else (bool(every),) * len(slides)


def _block_size(said: Mapping[str, Any], notes: list[str]) -> int:
    if "block_size" not in said:
        notes.append("the file does not state block_size; 16, the package's default, is assumed")
    return int(said.get("block_size", 16))


def _taps(files: Files, said: Mapping[str, Any], layers: int, notes: list[str]) -> tuple[int, ...]:
    """Residual indices: the output of layer i is the stream after i + 1 layers."""
    ids = said.get("target_layer_ids")
    if ids is None:
        ids = block.default_taps(int(said.get("num_target_layers", files.target.num_layers)), layers)
        notes.append(f"the file does not state target_layer_ids; the package's rule gives {list(ids)}")
    return tuple(int(i) + 1 for i in ids)
