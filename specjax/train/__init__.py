"""Training drafters: from prompts to the target's own responses, from these to a drafter folder.

Example:
    >>> import specjax
    >>> params = specjax.load("smollm2-135m")  # doctest: +SKIP
    >>> specjax.train.prepare(params, "prompts.jsonl", "texts")  # doctest: +SKIP
    >>> specjax.train.train(params, "texts", "eagle3", "run")  # doctest: +SKIP
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specjax.train.given import prepare_given as prepare_given
    from specjax.train.respond import prepare as prepare
    from specjax.train.run import train as train
    from specjax.train.trainer import (
        Fitted as Fitted,
        TrainingError as TrainingError,
        Watch as Watch,
        fit as fit,
    )
    from specjax.train.types import Batch as Batch, Recipe as Recipe

_HOME = {
    "prepare": "respond",
    "prepare_given": "given",
    "train": "run",
    "fit": "trainer",
    "Fitted": "trainer",
    "TrainingError": "trainer",
    "Watch": "trainer",
    "Batch": "types",
    "Recipe": "types",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'specjax.train' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"specjax.train.{_HOME[name]}"), name)
    globals()[name] = value
    return value
