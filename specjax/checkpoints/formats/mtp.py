"""Native multi-token prediction: a layer in the target's own folder, or in another one that holds it.

Conventions. Qwen: ``mtp.fc``, ``mtp.pre_fc_norm_*``, ``mtp.norm`` and a decoder layer ``mtp.layers.0``. DeepSeek and
Kimi: one more decoder layer behind the model's L, ``model.layers.L``, with ``enorm``, ``hnorm``, ``eh_proj`` and
``shared_head`` beside its own parts; also as ``mtp.layers.0`` or ``mtp.0``. speculators: ``mtp_layers.0``, with the
config of its layer (Qwen3's or Qwen3.5's) nested, whatever family the target is of. Embedding and head, where they are
stored, usually are copies of the target's.
"""

import re
from collections.abc import Mapping
from typing import Any

from specjax import registry
from specjax.checkpoints.formats import EMBED, Files, Found
from specjax.checkpoints.formats.speculators_dflash import verifier
from specjax.checkpoints.load import family_module
from specjax.targets.hf import text_part

#: What the parts beside the decoder layer are called, and their names here.
_NAMES = {
    "fc": "fc", "eh_proj": "fc", "input_proj": "fc",
    "pre_fc_norm_embedding": "pre_fc_norm_embedding", "enorm": "pre_fc_norm_embedding",
    "token_layernorm": "pre_fc_norm_embedding",
    "pre_fc_norm_hidden": "pre_fc_norm_hidden", "hnorm": "pre_fc_norm_hidden", "hidden_layernorm": "pre_fc_norm_hidden",
    "norm": "norm", "shared_head.norm": "norm", "final_layernorm": "norm",
    "embed_tokens": "embed_tokens", "lm_head": "lm_head", "shared_head.head": "lm_head",
}  # fmt: skip
_MODULE = re.compile(
    r"(?:mtp\.layers|mtp_layers|mtp)\.(?P<module>\d+)\.(?:layers\.0\.)?(?P<rest>.+)|mtp\.(?P<beside>.+)"
)
#: Keys that count such layers.
COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers")


def held(files: Files) -> bool:
    """Whether the folder has such a layer of a family that is known."""
    return settings_of(files.hf).get("model_type") in registry.TARGETS and bool(_modules(files))


def read(files: Files) -> Found:
    """The layer. Raises ValueError when there is none, and for settings that are not implemented."""
    hf, text = settings_of(files.hf), text_part(settings_of(files.hf))
    family, modules = family_module(hf, files.where), _modules(files)
    if not modules:
        raise ValueError(
            f"{files.where} has no layer for multi-token prediction: no tensor is called mtp.* or "
            f"model.layers.{text.get('num_hidden_layers')}.*. If it has a checkpoint of its own, give that as 'model'; "
            "`specjax zoo` lists what the package has"
        )
    if 0 not in modules:
        raise ValueError(
            f"{files.where}: the layers for multi-token prediction are numbered {sorted(modules)}"
        )
    _check(files, text, modules[0])
    try:
        model = family.config(hf)
    except KeyError as error:
        raise ValueError(f"{files.where}: the config lacks {error}") from None
    stated = next((int(text[key]) for key in COUNTS if text.get(key)), len(modules))
    notes = []
    if len(modules) > 1:
        notes.append(
            f"the file has {len(modules)} layers for multi-token prediction; the first drafts every token"
        )
    return Found(
        method="mtp",
        format="native",
        settings={"family": hf["model_type"], "model": model, "k": _proposed(files.hf) or stated},
        names=modules[0],
        notes=tuple(notes),
        made_for=verifier(files.hf),
        part=True,
    )


def settings_of(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the model the layer belongs to; speculators nest it."""
    return hf.get("transformer_layer_config") or hf


def _modules(files: Files) -> dict[int, dict[str, str]]:
    """Layer number from 0 -> names the drafter uses -> names in the file."""
    hf = settings_of(files.hf)
    module = registry.target(hf["model_type"])
    behind = int(text_part(hf).get("num_hidden_layers") or 0)
    prefixes = getattr(module, "PREFIXES", {})
    out: dict[int, dict[str, str]] = {}
    for name in files.shapes:
        at = _place(name, prefixes, behind)
        if at is not None:
            number, short = at
            names = out.setdefault(number, {})
            if short in names:
                raise ValueError(f"{files.where}: {name} and {names[short]} would be the same weight")
            names[short] = name
    return out


def _place(name: str, prefixes: Mapping[str, str], behind: int) -> tuple[int, str] | None:
    """(layer number, name here) of a tensor; None for one of the model's own."""
    prefix = next((p for p in prefixes if name.startswith(p)), "")
    here = (prefixes[prefix] + name[len(prefix) :] if prefix else name).removeprefix("model.")
    if found := re.fullmatch(r"layers\.(\d+)\.(.+)", here):
        number = int(found[1]) - behind
        return None if number < 0 else (number, _short(found[2]))
    found = _MODULE.fullmatch(here.removeprefix("language_model.").removeprefix("model."))
    if found is None:
        return None
    return int(found["module"] or 0), _short(found["rest"] or found["beside"])


def _short(rest: str) -> str:
    """Name here of a part: one beside the decoder layer, or one of it."""
    stem, _, kind = rest.rpartition(".")
    return f"{_NAMES[stem]}.{kind}" if stem in _NAMES else f"layers.0.{rest}"


def _check(files: Files, text: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """ValueError for what the config says of the layer and is not implemented or contradicts the tensors."""
    if text.get("mtp_hidden_states_first"):
        raise ValueError(
            f"{files.where}: mtp_hidden_states_first is not supported; the embedding has to come first"
        )
    if text.get("mtp_use_dedicated_embeddings") and EMBED not in names:
        raise ValueError(f"{files.where}: mtp_use_dedicated_embeddings is true, but the layer has no {EMBED}")


def _proposed(hf: Mapping[str, Any]) -> int | None:
    """Drafts per round that a file of speculators proposes."""
    methods = (hf.get("speculators_config") or {}).get("proposal_methods") or [{}]
    k = methods[0].get("speculative_tokens")
    return None if k is None else int(k)
