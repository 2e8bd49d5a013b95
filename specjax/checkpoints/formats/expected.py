"""What a drafter's folder would hold, told by its ``config.json`` alone: for estimates before weights are there.

Readers of formats take facts from tensors where they can. Here it is the other way round: names and shapes are those
of published files with such a config. As in every load of shapes only, a table of the target's shape counts as the
target's.
"""

import functools
import importlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from specjax import registry
from specjax.checkpoints.formats import (
    EMBED,
    FORMATS,
    HEAD,
    PARTS,
    Files,
    block,
    deepspec,
    deepspec_gemma4,
    mtp,
    own,
)
from specjax.checkpoints.formats.vocabulary import D2T
from specjax.checkpoints.tree import stored_shape
from specjax.drafters import (
    assistant_config,
    assistant_model,
    dflash2,
    eagle3_config,
    eagle3_model,
    markov,
    mtp_config,
    mtp_model,
)
from specjax.drafters.body import body, layer_specs
from specjax.targets.hf import text_part
from specjax.types import ArraySpec

NOTE = "there are no weights: its tensors are taken to be those of published files with such a config"
_ORDER = "masked_embedding.token_ordering"
_NESTED = "transformer_layer_config"
#: What speculators leaves out of a DSpark config when it is the library's default.
_DSPARK = {
    "markov_rank": 256, "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}  # fmt: skip

Shapes = dict[str, tuple[int, ...]]


def files(where: str, hf: Mapping[str, Any], target: Any, method: str | None, inside: bool) -> Files:
    """As an opened folder. ``method`` and ``inside`` as in :func:`specjax.checkpoints.formats.detect`.

    Raises ValueError for a config that leaves out what only weights would tell.
    """
    try:
        shapes = _shapes(hf, target, method, inside)
    except KeyError as error:
        raise ValueError(f"{where}: there are no weights, and the config alone lacks {error}") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return Files(where, hf, shapes, functools.partial(_content, where, shapes), target)


def _content(where: str, shapes: Shapes, name: str) -> np.ndarray:
    """Tables of integers that are looked at while a folder is read: the first ids, in order."""
    if name == D2T:
        return np.zeros(shapes[name], np.int64)
    if name == _ORDER:
        return np.arange(*shapes[name])
    raise ValueError(f"{where} holds no weights, so {name} cannot be read")


def _shapes(hf: Mapping[str, Any], target: Any, method: str | None, inside: bool) -> Shapes:
    if method in PARTS and (inside or mtp.settings_of(hf).get("model_type") in registry.TARGETS):
        return _mtp(hf, target)
    name = next((n for n in FORMATS if importlib.import_module(f"{__package__}.{n}").matches(hf)), None)
    kind = str(hf.get("speculators_model_type"))
    if name == "speculators" and kind == "mtp":
        return _mtp(hf, target)
    readers = {"own": _own, "eagle": _eagle, "assistant": _assistant, "model": _model}
    if name == "deepspec":
        classes = (deepspec.CLASSES[n] for n in hf["architectures"] if n in deepspec.CLASSES)
        return (_eagle if next(classes)[0] == "deepspec_eagle3" else _block)(hf, target)
    if name == "speculators":
        return (_eagle if kind == "eagle3" else _block)(hf, target)
    return {} if name is None else readers.get(name, _block)(hf, target)


def _of(specs: Any) -> Shapes:
    """Every tensor of a tree of specs, as files have it."""
    leaves = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, ArraySpec))
    return {name: stored_shape(spec) for spec in leaves for name in spec.names}


def _own(hf: Mapping[str, Any], target: Any) -> Shapes:
    method, cfg = own.frozen("the config", hf, target)
    return _of(registry.drafter(method).abstract(cfg))


def _model(hf: Mapping[str, Any], target: Any) -> Shapes:
    del target
    family = registry.target(hf["model_type"])
    return _of(family.abstract(family.config(hf)))


def _mtp(hf: Mapping[str, Any], target: Any) -> Shapes:
    """The layer as Qwen names it; none where the config counts none."""
    model_hf = mtp.settings_of(hf)
    if model_hf is hf and not any(text_part(hf).get(key) for key in mtp.COUNTS):
        return {}
    model = registry.target(model_hf["model_type"]).config(model_hf)
    cfg = mtp_config.config({"family": model_hf["model_type"], "model": model}, target)
    return {f"mtp.{name}": shape for name, shape in _of(mtp_model.abstract(cfg)).items()}


def _assistant(hf: Mapping[str, Any], target: Any) -> Shapes:
    settings = {"text": hf["text_config"], "backbone_hidden_size": hf["backbone_hidden_size"]}
    if hf.get("use_ordered_embeddings"):
        settings |= {
            "centroids": hf.get("num_centroids") or 2048,
            "top_centroids": hf.get("centroid_intermediate_top_k") or 32,
        }
    return _of(assistant_model.abstract(assistant_config.config(settings, target)))


def _eagle(hf: Mapping[str, Any], target: Any) -> Shapes:
    """DeepSpec and speculators store the embedding; the authors' files only one of another width."""
    layers, gemma = _layers(hf)
    said = {**hf, **(hf.get("eagle_config") or {})}
    rows = int(layers.get("vocab_size") or target.vocab_size)
    drafts = int(said.get("draft_vocab_size") or rows)
    ids = said.get("target_layer_ids") or said.get("eagle_aux_hidden_state_layer_ids") or range(3)
    settings = {
        "transformer": {**layers, "vocab_size": rows},
        "taps": tuple(range(len(ids))),
        "draft_vocab_size": drafts,
        "reduced": drafts != rows,
        "latent": layers.get("kv_lora_rank") is not None,
        "qk_norm": gemma or layers.get("model_type") == "qwen3",
        "own_embed": _stores_tables(hf) or _NESTED in hf or int(layers["hidden_size"]) != target.hidden_size,
        "flavour": "gemma4" if gemma else "plain",
        "values_from_keys": gemma and bool(hf.get("attention_k_eq_v")),
        **{k: said[k] for k in ("norm_before_fc", "fc_norm", "use_aux_hidden_state") if k in said},
    }
    return _of(eagle3_model.abstract(eagle3_config.config(settings, target)))


def _block(hf: Mapping[str, Any], target: Any) -> Shapes:
    """DFlash, DFlash2 and DSpark in every layout."""
    layers, gemma = _layers(hf)
    said = {**(_DSPARK if hf.get("speculators_model_type") == "dspark" else {}), **hf}
    said |= hf.get("dflash_config") or {}
    shape = body(layers, True, "gemma4" if gemma else "plain", gemma and bool(hf.get("attention_k_eq_v")))
    d, vocab = shape.hidden_size, int(layers.get("vocab_size") or target.vocab_size)
    drafts = vocab
    out = _of([layer_specs(shape, f"layers.{i}.") for i in range(shape.layers)])
    out |= {"norm.weight": (d,), "hidden_norm.weight": (d,)}
    if _NESTED in hf:
        ids = said.get("aux_hidden_state_layer_ids") or range(3)
        drafts = int(said.get("draft_vocab_size") or vocab)
    else:
        ids = said.get("target_layer_ids") or range(shape.layers)
    out["fc.weight"] = (d, len(ids) * target.hidden_size)
    if drafts != vocab:
        out |= {D2T: (drafts,), HEAD: (drafts, d)}
    if _stores_tables(hf) or d != target.hidden_size:
        out |= {EMBED: (vocab, d), HEAD: (drafts, d)}
    return out | _parts(said, shape.layers, d, vocab, drafts)


def _parts(said: Mapping[str, Any], layers: int, width: int, vocab: int, drafts: int) -> Shapes:
    """DFlash2's convolutions and selector, DSpark's heads."""
    out: Shapes = {}
    rank = int(said.get("markov_rank") or 0)
    if said.get("conv_kernel_size"):
        conv = dflash2.Convolution(int(said["conv_kernel_size"]), int(said["conv_group_size"]))
        out |= _of([dflash2.conv_specs(conv, width, f"layers.{i}.") for i in range(layers)])
    if said.get("selector_rank"):
        chosen = dflash2.Selection(int(said["selector_rank"]), int(said.get("selector_top_k") or 16))
        out |= _of(dflash2.selector_specs(chosen, vocab, width))
    if rank:
        kind = said.get("markov_head_type") or "vanilla"
        out |= _of(markov.markov_specs(markov.Settings(rank, kind, vocab), drafts, width))
    if said.get("enable_confidence_head"):
        beside = rank if said.get("confidence_head_with_markov") else 0
        out |= _of(markov.confidence_specs(width + beside))
    return out


def _stores_tables(hf: Mapping[str, Any]) -> bool:
    """DeepSpec keeps copies of the target's tables."""
    return bool(deepspec.CLASSES.keys() & set(hf.get("architectures") or ()))


def _layers(hf: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Keys of the layers that shapes depend on, and whether they are Gemma 4's."""
    kept = {k: v for k, v in (hf.get(_NESTED) or hf).items() if v is not None and not k.startswith("rope_")}
    kept = {
        k: v for k, v in kept.items() if k in block.BODY or k.startswith(("q_", "kv_", "qk_", "v_", "model_"))
    }
    classes = [deepspec.CLASSES[name] for name in hf.get("architectures") or () if name in deepspec.CLASSES]
    if not classes or not classes[0][1]:
        return kept, False
    return kept | deepspec_gemma4.geometry(hf) | {"hidden_act": "gelu_pytorch_tanh"}, True
