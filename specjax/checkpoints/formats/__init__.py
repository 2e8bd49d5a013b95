"""What a drafter checkpoint is and how it says so: one module per published format.

A format module has ``matches(hf)`` and ``read(files) -> Found``. The kind comes from ``config.json`` and the
tensors, never from a folder's name. Every convention that differs between formats (tap ids, block layout,
draft vocabulary, names) is resolved here, once.
"""

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

#: Modules tried in this order; the first whose ``matches`` says yes reads the folder.
FORMATS = ("own", "speculators", "deepspec", "zlab", "transformers_dflash", "eagle", "assistant", "model")

#: Methods whose weights are part of a model's folder: read so only when they are asked for by name.
PARTS = ("mtp",)

EMBED, HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class Files:
    """An opened drafter folder: its config, the shapes of its tensors, and a way to read one.

    ``target`` is the config of the target the drafter is loaded for, ``target_name`` what that is called.
    ``generation``: what ``generation_config.json`` says, if it is there.
    """

    where: str
    hf: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    get: Callable[[str], Any]
    target: Any
    target_name: str = ""
    generation: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Found:
    """What a folder holds.

    ``method``: name in the drafter registry. ``settings``: what its ``config`` takes. ``names``: tensor name
    the drafter uses -> name in the file. ``skipped``: name endings of tensors that are not needed, with the
    reason. ``notes``: assumptions worth telling, because the file does not say; one that ends in
    "(setting=...)" is left out when the user gives that setting. ``made_for``: the target it
    names ("" = none). ``borrows``: embedding and head may be the target's; ``own_embed`` and ``own_head`` are
    then added to the settings. ``part``: the folder holds more than the drafter. ``called``: other
    methods that a request may name and mean this one. ``cfg``: the drafter's config, where the file has it whole;
    ``settings`` are empty then. ``get``: reads a tensor, where it is not stored as it is used.
    """

    method: str
    format: str
    settings: dict[str, Any]
    names: dict[str, str]
    skipped: Mapping[str, str] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    made_for: str = ""
    borrows: bool = True
    part: bool = False
    called: tuple[str, ...] = ()
    cfg: Any = None
    get: Callable[[str], Any] | None = None


def detect(files: Files, method: str | None = None, inside: bool = False) -> Found:
    """The first format that recognises the config; ValueError naming what was found otherwise.

    ``method``: the one that was asked for; ``inside``: in the target's own folder, where nothing else is looked for.
    """
    if method in PARTS:
        module = importlib.import_module(f"{__name__}.{method}")
        if inside or module.held(files):
            return module.read(files)
    for name in FORMATS:
        module = importlib.import_module(f"{__name__}.{name}")
        if module.matches(files.hf):
            return module.read(files)
    for name in PARTS:  # in a folder of its own
        module = importlib.import_module(f"{__name__}.{name}")
        if module.held(files):
            return module.read(files)
    said = {
        key: files.hf[key]
        for key in ("model_type", "architectures", "speculators_model_type")
        if key in files.hf
    }
    raise ValueError(
        f"{files.where}: no known drafter format; its config says {said}. Known: specjax's own, EAGLE-3, DFlash and "
        "DSpark in the layouts of speculators, DeepSpec, z-lab and SpecForge, Gemma 4 assistants, layers for "
        "multi-token prediction, and any supported target family as a draft model"
    )


def stripped(shapes: Mapping[str, Any], *prefixes: str) -> dict[str, str]:
    """Names without the first of ``prefixes`` they begin with -> names in the file."""
    out: dict[str, str] = {}
    for name in shapes:
        prefix = next((p for p in prefixes if name.startswith(p)), "")
        short = name[len(prefix) :]
        if short in out:
            raise ValueError(f"two tensors are called {short!r}: {out[short]!r} and {name!r}")
        out[short] = name
    return out
