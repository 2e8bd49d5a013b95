"""Gemma 4 assistants as transformers saves them (``Gemma4AssistantForCausalLM`` and its ``Gemma4Unified`` twin).

Conventions: ``text_config`` describes the layers, of which the file holds queries and outputs only; keys and values
are the target's. ``model.embed_tokens`` is the output head, and is never read as an embedding. With
``use_ordered_embeddings`` the head scores clusters of tokens first: ``masked_embedding``. How many tokens to draft
may be in ``generation_config.json``.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax.checkpoints.formats import HEAD, Files, Found
from specjax.drafters.assistant_config import DEFAULT_K
from specjax.targets.hf import check_config

TYPES = {"gemma4_assistant", "gemma4_unified_assistant"}
_TABLE, _CENTROIDS = "model.embed_tokens.weight", "masked_embedding.centroids.weight"
_ORDER = "masked_embedding.token_ordering"
_KNOWN = {
    "text_config", "backbone_hidden_size", "use_ordered_embeddings", "num_centroids", "centroid_intermediate_top_k",
}  # fmt: skip
#: What a file may leave out: the class's defaults.
_DEFAULTS = {"use_ordered_embeddings": False, "num_centroids": 2048, "centroid_intermediate_top_k": 32}
_STRAY = "keys and values are the target's"
_SKIPPED = {f"self_attn.{part}.weight": _STRAY for part in ("k_proj", "v_proj", "k_norm", "v_norm")}


def matches(hf: Mapping[str, Any]) -> bool:
    """One of the two model types, or of their classes."""
    classes = {f"Gemma4{unified}AssistantForCausalLM" for unified in ("", "Unified")}
    return hf.get("model_type") in TYPES or bool(classes & set(hf.get("architectures") or ()))


def read(files: Files) -> Found:
    """An assistant. Raises ValueError for settings that are not implemented or contradict the tensors."""
    check_config(files.hf, _KNOWN, {})
    said = _DEFAULTS | {key: value for key, value in files.hf.items() if value is not None}
    missing = [key for key in ("text_config", "backbone_hidden_size") if key not in said]
    if missing:
        raise ValueError(f"{files.where}: the config lacks {missing}")
    text = dict(said["text_config"])
    notes, drafts = [], files.generation.get("num_assistant_tokens")
    if drafts is None:
        notes.append(f"the file does not state how many tokens to draft; {DEFAULT_K} is assumed (k=...)")
    if text.get("final_logit_softcapping"):
        notes.append(
            f"final_logit_softcapping is {text['final_logit_softcapping']}, which transformers' assistant does not "
            "apply either (softcap=...)"
        )
    settings = {
        "text": text,
        "backbone_hidden_size": int(said["backbone_hidden_size"]),
        **({} if drafts is None else {"k": int(drafts)}),
        **_clusters(files, said, int(text.get("vocab_size", 262144))),
    }
    names, skipped = _names(files, bool(said.get("tie_word_embeddings", True)))
    return Found(
        "assistant",
        "transformers",
        settings,
        names,
        skipped,
        tuple(notes),
        borrows=False,
        called=("mtp",),
    )


def _names(files: Files, tied: bool) -> tuple[dict[str, str], dict[str, str]]:
    """Names of the drafter's tensors in the file, and endings of those that are not read."""
    names = {name: name for name in files.shapes if not name.endswith(tuple(_SKIPPED))}
    table, head = names.pop(_TABLE, None), names.pop(HEAD, None)
    chosen = table or head if tied else head
    if chosen is None:
        return names, _SKIPPED
    other = {_TABLE: "the head is stored apart", HEAD: "the config ties it to the table"}
    return names | {HEAD: chosen}, _SKIPPED | {key: why for key, why in other.items() if key != chosen}


def _clusters(files: Files, said: Mapping[str, Any], vocab: int) -> dict[str, int]:
    """Settings of the head in two stages; ValueError where config and tensors disagree."""
    ordered, stored = bool(said["use_ordered_embeddings"]), {_CENTROIDS, _ORDER} & set(files.shapes)
    if not ordered:
        if stored:
            raise ValueError(
                f"{files.where}: use_ordered_embeddings is false, but {sorted(stored)} are there"
            )
        return {}
    count, top = int(said["num_centroids"]), int(said["centroid_intermediate_top_k"])
    if _CENTROIDS in stored and files.shapes[_CENTROIDS][0] != count:
        raise ValueError(
            f"{files.where}: num_centroids is {count}, {_CENTROIDS} has {files.shapes[_CENTROIDS][0]} rows"
        )
    if _ORDER in stored:
        order = np.asarray(files.get(_ORDER)).reshape(-1)
        if not np.array_equal(np.sort(order), np.arange(vocab)):
            raise ValueError(f"{files.where}: {_ORDER} must list each of the {vocab} token ids once")
    return {"centroids": count, "top_centroids": top}
