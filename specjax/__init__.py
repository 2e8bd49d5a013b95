"""specjax: exact speculative decoding in pure JAX.

Example:
    >>> import specjax
    >>> params = specjax.load("smollm2-135m", drafter="ngram")  # doctest: +SKIP
    >>> specjax.decode(params, "Why is the sky blue?").text  # doctest: +SKIP

Names are imported on first use, so ``import specjax`` is quick and brings in no other package.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specjax import checkpoints as checkpoints, train as train, zoo as zoo
    from specjax.api import (
        audit as audit,
        bench as bench,
        cast as cast,
        chat as chat,
        decode as decode,
        draft_step as draft_step,
        explain as explain,
        export as export,
        load as load,
        save as save,
        start as start,
        stream as stream,
        sweep as sweep,
        verify_step as verify_step,
    )
    from specjax.core.doctor import Doctor as Doctor, doctor as doctor
    from specjax.profiling import profile as profile
    from specjax.tuning_run import tune as tune
    from specjax.types import (
        Params as Params,
        Proposal as Proposal,
        Sampling as Sampling,
        State as State,
        Verdict as Verdict,
    )

    __version__: str

_NAMES = {
    "specjax.api": (
        "load", "save", "export", "cast", "decode", "stream", "chat", "audit", "explain",
        "start", "draft_step", "verify_step", "sweep",
    ),
    "specjax.core.doctor": ("doctor", "Doctor"),
    "specjax.profiling": ("profile",),
    "specjax.tuning_run": ("tune",),
    "specjax.types": ("Params", "Proposal", "Sampling", "State", "Verdict"),
}  # fmt: skip
_HOME = {name: module for module, names in _NAMES.items() for name in names}

_PACKAGES = ("bench", "checkpoints", "train", "zoo")

__all__ = sorted([*_HOME, *_PACKAGES, "__version__"])


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name in _PACKAGES:
        value = importlib.import_module(f"specjax.{name}")
    elif name == "__version__":
        value = _version()
    else:
        raise AttributeError(f"module 'specjax' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("specjax")
    except metadata.PackageNotFoundError:  # a checkout that was never installed
        return "0+unknown"
