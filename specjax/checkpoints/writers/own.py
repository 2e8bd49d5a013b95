"""specjax's own layout, which holds every drafter with weights: the counterpart of
:mod:`specjax.checkpoints.formats.own`.

``config.json`` has the kind of drafter, the version of the layout, the frozen config and what the drafter was made for.
Tensors have their published names. Tables that are the target's are left out.
"""

import dataclasses
from typing import Any

from specjax import registry
from specjax.checkpoints import compact
from specjax.checkpoints.formats import own
from specjax.checkpoints.writers import Folder, Given

METHODS = tuple(name for name in registry.DRAFTERS if name not in ("ngram", "chain"))


def problems(given: Given) -> list[str]:
    """None: every config can be written down."""
    del given
    return []


def plan(given: Given) -> Folder:
    """The folder; in compact storage the tensors are packed here."""
    tensors, stored = given.tensors, {}
    if given.bits is not None:
        tensors, entries = compact.pack(given.tensors, given.bits)
        stored = {own.STORED: entries}
    config = {
        own.KIND: given.method,
        own.VERSION: own.FORMAT,
        "config": dataclasses.asdict(given.cfg),
        "target": own.facts(given.target.name, given.target.family, given.target.cfg),
        **stored,
    }
    return Folder(_listed(config), tensors)


def _listed(value: Any) -> Any:
    """JSON's own types: tuples become lists."""
    if isinstance(value, dict):
        return {key: _listed(x) for key, x in value.items()}
    return [_listed(x) for x in value] if isinstance(value, list | tuple) else value
