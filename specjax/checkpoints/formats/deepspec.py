"""DeepSpec's folders: one reader per model class."""

import importlib
from collections.abc import Mapping
from typing import Any

from specjax.checkpoints.formats import Files, Found, deepspec_gemma4

#: Model class (``architectures``) -> module that reads it, and whether its layers are Gemma 4's.
CLASSES: dict[str, tuple[str, bool]] = {
    "Qwen3Eagle3Model": ("deepspec_eagle3", False),
    "Gemma4Eagle3Model": ("deepspec_eagle3", True),
    "Qwen3DSparkModel": ("deepspec_dspark", False),
    "Gemma4DSparkModel": ("deepspec_dspark", True),
}


def matches(hf: Mapping[str, Any]) -> bool:
    """By the model class."""
    return bool(CLASSES.keys() & set(hf.get("architectures") or ()))


def read(files: Files) -> Found:
    """The drafter, read by its class's module."""
    name, gemma = CLASSES[next(n for n in files.hf["architectures"] if n in CLASSES)]
    module = importlib.import_module(f"{__package__}.{name}")
    return deepspec_gemma4.read(files, module.read) if gemma else module.read(files)
