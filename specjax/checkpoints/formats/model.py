"""A whole model of a supported target family, to be used as a draft model (folders and GGUF files)."""

from collections.abc import Mapping
from typing import Any

from specjax import registry
from specjax.checkpoints.formats import HEAD, Files, Found
from specjax.checkpoints.load import reasons, text_names, untie

#: What the configs of learned drafters carry besides the ``model_type`` of the model they were derived from.
_MARKS = (
    "eagle", "dflash", "dspark", "speculators", "draft_vocab", "target_hidden", "target_layer", "num_target_layers",
    "mask_token_id", "medusa", "n_predict",
)  # fmt: skip


def matches(hf: Mapping[str, Any]) -> bool:
    """A known family, a causal language model (alone or as part of a multimodal one), and no sign of a learned
    drafter."""
    kinds = ("ForCausalLM", "ForConditionalGeneration")
    plain = all(str(name).endswith(kinds) for name in hf.get("architectures") or ())
    said = " ".join([*hf, *map(str, hf.get("architectures") or ())]).lower()
    return hf.get("model_type") in registry.TARGETS and plain and not any(mark in said for mark in _MARKS)


def read(files: Files) -> Found:
    """Config and tensor names of the family. Raises ValueError for a setting it does not implement."""
    family = str(files.hf["model_type"])
    module = registry.target(family)
    stored = text_names(files.shapes, getattr(module, "PREFIXES", {}), files.where)
    hf = untie(files.hf, lambda name: files.get(stored[name]), set(stored), files.where)
    try:
        cfg = module.config(hf)
    except KeyError as error:
        raise ValueError(f"{files.where}: the config lacks {error}") from None
    unread = reasons(module, cfg, stored)
    return Found(
        method="draft_model",
        format="model",
        settings={"family": family, "model": cfg},
        names={name: there for name, there in stored.items() if name not in unread},
        skipped={stored[name]: why for name, why in unread.items()}
        | ({HEAD: "the config ties it to the embedding"} if cfg.tied else {}),
        borrows=False,
    )
