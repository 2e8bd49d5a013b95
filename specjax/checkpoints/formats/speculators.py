"""Folders of the speculators library: one reader per kind of drafter."""

import importlib
from collections.abc import Mapping
from typing import Any

from specjax.checkpoints.formats import Files, Found

#: ``speculators_model_type`` -> module that reads it.
KINDS = {
    "eagle3": "speculators_eagle3",
    "dflash": "speculators_dflash",
    "dflash2": "speculators_dflash",
    "dspark": "speculators_dspark",
    "mtp": "mtp",
}


def matches(hf: Mapping[str, Any]) -> bool:
    """Every folder of the library names its kind."""
    return "speculators_model_type" in hf


def read(files: Files) -> Found:
    """The drafter, read by its kind's module; ValueError for a kind that is not supported."""
    kind = files.hf["speculators_model_type"]
    if kind not in KINDS:
        raise ValueError(
            f"{files.where}: speculators drafters of kind {kind!r} are not supported; known: {', '.join(KINDS)}"
        )
    return importlib.import_module(f"{__package__}.{KINDS[kind]}").read(files)
