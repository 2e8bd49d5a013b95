"""Drafters as folders for others to read: one module per layout, the counterparts of
:mod:`specjax.checkpoints.formats`.

A module has ``METHODS``, the kinds of drafters the layout is known to hold; ``problems(given)``, what of a drafter it
cannot express; and ``plan(given) -> Folder``, which is asked only when there are none. Nothing is opened here and no
weight is copied before it is written.
"""

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from specjax.types import Shared

#: What a layout is called -> module here.
LAYOUTS: dict[str, str] = {
    "own": "own",
    "speculators": "speculators",
    "deepspec": "deepspec",
    "zlab": "zlab",
    "eagle": "eagle",
    "transformers": "assistant",
    "native": "native",
}

#: What published files say made them; readers that ask for a version find one they know.
SPECULATORS_VERSION = "0.9.0"


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a file before it is made: its shape and type there, and a function that gives its numbers."""

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Target:
    """The target a drafter was made for. ``name``: as its users call it (on the Hub, where it is there). ``shared``:
    what it lends, in the type to be written."""

    name: str
    family: str
    cfg: Any
    shared: Shared
    eos_ids: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Given:
    """A drafter to be written.

    ``tensors``: names of its weights as published, one per expert, -> tensors in the type to be written.
    ``dtype``: that type's name. ``bits``: per weight of large matrices in compact storage; None: as ``dtype`` says.
    """

    method: str
    cfg: Any
    tensors: Mapping[str, Tensor]
    target: Target
    dtype: str
    bits: float | None = None


@dataclasses.dataclass(frozen=True)
class Folder:
    """What is to be written: ``config.json``, the tensors by name, and other JSON files by stem."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    more: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)


def plan(layout: str, given: Given) -> Folder:
    """The folder of a drafter in a layout. ValueError when the layout cannot hold it, saying why and which can."""
    module = module_of(layout)
    found = _problems(layout, given)
    if found:
        others = [name for name in LAYOUTS if name != layout and not _problems(name, given)]
        raise ValueError(
            f"the {layout} layout cannot hold this {given.method} drafter: {'; '.join(found)}. "
            + (f"Layouts that can: {', '.join(others)}" if others else "No other layout can")
        )
    return module.plan(given)


def _problems(layout: str, given: Given) -> list[str]:
    module = module_of(layout)
    if given.method not in module.METHODS:
        return [f"it is for {', '.join(module.METHODS)}"]
    return [*_compact(layout, given), *module.problems(given)]


def _compact(layout: str, given: Given) -> list[str]:
    return ["compact storage is specjax's own"] if given.bits is not None and layout != "own" else []


def module_of(layout: str) -> Any:
    """The module here of a layout. ValueError for one that is not known."""
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}; known: {', '.join(LAYOUTS)}")
    return importlib.import_module(f"{__name__}.{LAYOUTS[layout]}")


def said(*cases: tuple[Any, str]) -> list[str]:
    """The texts of the cases that are true."""
    return [text for wrong, text in cases if wrong]
