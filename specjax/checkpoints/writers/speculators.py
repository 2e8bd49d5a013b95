"""Folders of the speculators library (0.9), which vLLM reads too: one writer per kind of drafter."""

import importlib
from collections.abc import Mapping
from typing import Any

from specjax.checkpoints.writers import SPECULATORS_VERSION, Folder, Given, keys

#: Method -> module that writes it.
KINDS = {
    "eagle3": "speculators_eagle3",
    "dflash": "speculators_dflash",
    "dspark": "speculators_dflash",
    "mtp": "speculators_mtp",
}
METHODS = tuple(KINDS)


def problems(given: Given) -> list[str]:
    """What the kind's module finds."""
    return _kind(given).problems(given)


def plan(given: Given) -> Folder:
    """What the kind's module makes."""
    return _kind(given).plan(given)


def _kind(given: Given) -> Any:
    return importlib.import_module(f"{__package__}.{KINDS[given.method]}")


def config(given: Given, kind: str, model: str, layers: Mapping[str, Any], **own: Any) -> dict[str, Any]:
    """``config.json``: what all kinds have, and ``own`` keys. ``model``: the class; ``layers``: the layers' config."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": given.cfg.k}
    return {
        "architectures": [model],
        "speculators_model_type": kind,
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{**proposal, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {
                "name_or_path": given.target.name or None,
                "architectures": [keys.architecture(given.target.family)],
            },
        },
        "transformer_layer_config": dict(layers),
        "tie_word_embeddings": False,
        "dtype": keys.dtype(given),
        **own,
    }
