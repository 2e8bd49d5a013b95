"""Models with a short name, recognised by what they hold, wherever their files are and whatever they are called."""

import dataclasses
import hashlib
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import registry
from specjax.checkpoints import hub
from specjax.types import Params

_SIZES = ("vocab_size", "hidden_size", "num_layers")


def short_name(params: Params, by_sizes: bool = False) -> str | None:
    """The short name of the target in ``params``; None when it is none of the known models.

    A name that it was loaded by is believed. Otherwise sizes and every vector of the weights (norms and biases, which
    no file format rounds) must be the known model's, in whatever type they are. ``by_sizes``: sizes are enough for
    params that hold shapes only.
    """
    meta = params.meta
    if (short := hub.short(meta.name)) is not None:
        return short
    leaves = jax.tree.leaves(params.target)
    shapes_only = any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
    if shapes_only and not by_sizes:
        return None
    for short in _of_size(meta.family, meta.target_cfg):
        if shapes_only or digest(leaves) == hub.SHORT_NAMES[short].vectors:
            return short
    return None


def named(params: Params) -> Params:
    """The same with ``meta.name`` a short name, where the model has one."""
    short = short_name(params)
    if short in (None, params.meta.name):
        return params
    return dataclasses.replace(params, meta=dataclasses.replace(params.meta, name=short))


def short_name_of_file(family: str, cfg: Any, vectors: Any) -> str | None:
    """:func:`short_name` of files: ``vectors()`` reads those of the weights, and only where sizes agree."""
    found = _of_size(family, cfg)
    return next((s for s in found if digest(vectors()) == hub.SHORT_NAMES[s].vectors), None)


def digest(leaves: Iterable[Any]) -> str:
    """SHA-256, cut to 16 hexadecimal digits, of the arrays with one axis: in bfloat16, in the order of the leaves."""
    one = [x for x in leaves if x.ndim == 1 and jnp.issubdtype(x.dtype, jnp.floating)]
    told = hashlib.sha256()
    for x in jax.device_get(one):
        told.update(np.ascontiguousarray(np.asarray(x).astype(jnp.bfloat16)).tobytes())
    return told.hexdigest()[:16]


def _of_size(family: str, cfg: Any) -> list[str]:
    sizes = tuple(getattr(cfg, key, None) for key in _SIZES)
    return [
        short
        for short, model in hub.SHORT_NAMES.items()
        if model.sizes == sizes and registry.target(model.family) is registry.target(family)
    ]
