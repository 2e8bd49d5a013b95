"""A drafter of ``params`` as a folder, in specjax's own layout or one that others read."""

import dataclasses
import functools
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from specjax import registry
from specjax.checkpoints import compact as packing, hub
from specjax.checkpoints.drafter import LoadedDrafter, load_drafter
from specjax.checkpoints.writers import Given, Target, files, plan
from specjax.checkpoints.writers.tensors import named
from specjax.types import Params, Shared

DTYPES = ("bfloat16", "float32", "float16", "same")
#: Settings of use, not of a drafter's network, and what they are if nobody says otherwise: lost where a layout has no
#: place for them, which is told.
_USE: dict[str, Any] = {
    "k": None, "drafting": "probabilistic", "confidence_threshold": 0.0, "draft_ids": None, "state": "normed",
}  # fmt: skip
#: Whether tables are the drafter's own: a copy of the target's that had to be written is not known as one when cut.
_TABLES = {"own_embed", "own_head", "embed_rows"}


def export(
    params: Params,
    folder: str | Path,
    layout: str = "own",
    dtype: str = "bfloat16",
    compact: bool | float = False,
    target: str | None = None,
) -> None:
    """See :func:`specjax.export`."""
    meta = params.meta
    if meta is None or meta.drafter is None:
        raise ValueError("these params have no drafter to write")
    if meta.drafter == "chain":
        raise ValueError(
            "a chain is several drafters: load them one by one, and write each to its own folder"
        )
    lent = registry.target(meta.family).shared(params.target, meta.target_cfg)
    name = public_name(meta.name, layout) if target is None else target
    made_for = Target(name, meta.family, meta.target_cfg, lent, meta.eos_ids)
    write(meta.drafter, meta.drafter_cfg, params.drafter, made_for, folder, layout, dtype, compact)


def public_name(name: str, layout: str) -> str:
    """What others call a target: short names are ours alone."""
    known = hub.SHORT_NAMES.get(name)
    return known.hub or name if known is not None and layout != "own" else name


def write(
    method: str,
    cfg: Any,
    weights: Any,
    target: Target,
    folder: str | Path,
    layout: str = "own",
    dtype: str = "bfloat16",
    compact: bool | float = False,
) -> None:
    """Write a drafter: :func:`export` for one that is in no params."""
    given = _given(method, cfg, weights, target, dtype, compact)
    made = plan(layout, given)
    files.write(Path(folder).expanduser().resolve(), made, functools.partial(_read_back, given, layout))


def _given(method: str, cfg: Any, weights: Any, target: Target, dtype: str, compact: bool | float) -> Given:
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    module = registry.drafter(method)
    specs = module.abstract(cfg)
    if specs is None:
        raise ValueError(
            f"the {method} drafter has no weights, so there is nothing to write: name it when loading"
        )
    if method not in registry.DRAFTERS:
        raise ValueError(
            f"{method} is no drafter of specjax's, so no layout is known for it; specjax.save keeps it"
        )
    bits = None if compact is False else packing.BITS if compact is True else float(compact)
    kind = None if dtype == "same" or bits is not None else jnp.dtype(dtype)
    return Given(method, cfg, named(weights, specs, kind, method), target, dtype, bits)


def _read_back(given: Given, layout: str, folder: Path) -> None:
    """ValueError unless the folder is read as the drafter it was made of. Tells what a layout has no place for."""
    lent = given.target.shared
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (lent.embed, lent.head)]
    with warnings.catch_warnings():
        # what our own reader does not expect is a fault of the writer
        warnings.filterwarnings("error", category=UserWarning, module=r"specjax\.")
        found = load_drafter(
            hub.Source("folder", folder, str(folder)),
            given.target.cfg,
            Shared(*shapes),
            jnp.float32,
            method=given.method if given.method == "mtp" else None,
            eos_ids=given.target.eos_ids,
            shapes_only=True,
        )
    lost = _differences(given, found)
    if lost:
        told = ", ".join(f"{name}={_short(value)}" for name, value in lost.items())
        warnings.warn(
            f"the {layout} layout has no place for {told}: give it when loading, as drafter_config",
            UserWarning,
            stacklevel=6,
        )


def _differences(given: Given, found: LoadedDrafter) -> dict[str, Any]:
    """Settings of use that were lost. ValueError for any other difference between what was written and what is read."""
    if found.name != given.method:
        raise ValueError(
            f"a {given.method} drafter without its heads is a {found.name} drafter: write it as one"
        )
    lost: dict[str, Any] = {}
    for field in dataclasses.fields(given.cfg):
        before, after = getattr(given.cfg, field.name), getattr(found.cfg, field.name)
        if before == after or field.name in _TABLES or _same_family(field.name, before, after):
            continue
        if field.name not in _USE:
            raise ValueError(
                f"this {given.method} drafter cannot be written so that it is read again: {field.name} is {before!r} "
                f"and would be {after!r}"
            )
        if field.name == "k" or before != _USE[field.name]:
            lost["draft_vocab" if field.name == "draft_ids" else field.name] = before
    return lost


def _short(value: Any) -> str:
    return f"({len(value)} ids)" if isinstance(value, tuple) else repr(value)


def _same_family(field: str, before: Any, after: Any) -> bool:
    """A multimodal family and its text model are one."""
    return field == "family" and registry.target(before) is registry.target(after)
