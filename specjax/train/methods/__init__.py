"""How each kind of drafter is trained: one module per method, by the name it has in the drafter registry.

A module has the functions of :class:`specjax.train.types.Method`.
"""

import importlib
from typing import Any

METHODS: dict[str, str] = {
    "eagle3": "specjax.train.methods.eagle3",
    "mtp": "specjax.train.methods.mtp",
    "assistant": "specjax.train.methods.assistant",
    "dflash": "specjax.train.methods.dflash",
    "dspark": "specjax.train.methods.dspark",
}


def method(name: str) -> Any:
    """Module of a training method; a dotted name is imported as it is. ValueError listing the known ones."""
    if name in METHODS or "." in name:
        return importlib.import_module(METHODS.get(name, name))
    raise ValueError(f"no training method for drafters of kind {name!r}; known: {', '.join(sorted(METHODS))}")
