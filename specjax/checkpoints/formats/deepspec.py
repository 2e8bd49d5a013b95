"""DeepSpec's folders: one reader per model class."""

import importlib
from collections.abc import Mapping
from typing import Any

from specjax.checkpoints.formats import Files, Found

#: Model class (``architectures``) -> module that reads it; None = known, but not supported.
CLASSES: dict[str, str | None] = {
    "Qwen3Eagle3Model": "deepspec_eagle3",
    "Gemma4Eagle3Model": None,
    "Qwen3DSparkModel": "deepspec_dspark",
    "Gemma4DSparkModel": None,
}


def matches(hf: Mapping[str, Any]) -> bool:
    """By the model class."""
    return bool(CLASSES.keys() & set(hf.get("architectures") or ()))


def read(files: Files) -> Found:
    """The drafter, read by its class's module; ValueError for a class that is not supported."""
    name = next(n for n in files.hf["architectures"] if n in CLASSES)
    module = CLASSES[name]
    if module is None:
        known = [n for n, m in CLASSES.items() if m]
        raise ValueError(f"{files.where}: {name} is not supported; known: {', '.join(known)}")
    return importlib.import_module(f"{__package__}.{module}").read(files)
