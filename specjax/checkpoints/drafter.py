"""One drafter from files: what it is, its config, its weights."""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax import registry
from specjax.checkpoints import formats, safetensors, tree
from specjax.checkpoints.hub import Source
from specjax.checkpoints.load import read_json
from specjax.types import Shared


@dataclasses.dataclass(frozen=True)
class LoadedDrafter:
    """A drafter and what its files say. ``notes`` are assumptions made where the files are silent."""

    name: str
    cfg: Any
    weights: Any
    format: str
    notes: tuple[str, ...]
    made_for: str


def load_drafter(
    source: Source,
    target_cfg: Any,
    shared: Shared,
    dtype: Any,
    *,
    method: str | None = None,
    settings: Mapping[str, Any] | None = None,
    progress: tree.Progress | None = None,
) -> LoadedDrafter:
    """Read a drafter folder for a target.

    ``method``: the kind that is expected. ``settings`` replace what the file says (``k``, ``drafting``,
    ``layout``, ``taps``, ...). Embedding and head equal to the target's are borrowed, not stored twice.
    Raises ValueError before weights are allocated: another kind than expected, a tensor missing or unknown, a
    setting not understood, a drafter that does not fit the target.
    """
    if source.kind != "folder":
        raise ValueError(
            f"{source.path}: a drafter is a folder with config.json and safetensors, not {source.kind}"
        )
    tensors = safetensors.Tensors(source.path)
    where = str(source.path)
    files = formats.Files(
        where, read_json(source.path / "config.json"), tensors.shapes, tensors.get, target_cfg
    )
    found = formats.detect(files)
    if method is not None and method != found.method:
        raise ValueError(f"{where} holds a {found.method} drafter ({found.format} format), not {method}")
    names, given = dict(found.names), dict(found.settings)
    if found.borrows:
        given |= _borrow(files, names, shared, dtype)
    cfg = _configure(found.method, given, settings or {}, target_cfg, where)
    weights = _fill(found, cfg, names, files, dtype, progress)
    return LoadedDrafter(found.method, cfg, weights, found.format, found.notes, found.made_for)


def _configure(
    method: str, given: dict[str, Any], settings: Mapping[str, Any], target_cfg, where: str
) -> Any:
    module = registry.drafter(method)
    try:
        return module.config({**given, **settings}, target_cfg)
    except KeyError as error:
        raise ValueError(f"{where}: the config lacks {error}") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _borrow(files: formats.Files, names: dict[str, str], shared: Shared, dtype: Any) -> dict[str, bool]:
    """Which of embedding and head are the drafter's own; copies of the target's are dropped from ``names``."""
    own = {}
    for key, name, lent in (
        ("own_embed", formats.EMBED, shared.embed),
        ("own_head", formats.HEAD, shared.head),
    ):
        own[key] = name in names and not _same(files, names[name], lent, dtype)
        if not own[key]:
            names.pop(name, None)
    return own


def _same(files: formats.Files, name: str, lent: Any, dtype: Any) -> bool:
    if tuple(files.shapes[name]) != tuple(lent.shape):
        return False
    return np.array_equal(files.get(name).astype(dtype), np.asarray(lent, dtype))


def _fill(
    found: formats.Found, cfg: Any, names: dict[str, str], files: formats.Files, dtype, progress
) -> Any:
    unread = set(files.shapes) - set(found.names.values())
    unread = {n for n in unread if not n.endswith((*tree.HARMLESS, *found.skipped))}
    if unread:
        warnings.warn(
            f"{files.where} holds tensor(s) that no {found.method} drafter has, so it may draft worse than it "
            f"could: {sorted(unread)[:12]}",
            UserWarning,
            stacklevel=4,
        )
    return tree.fill(
        registry.drafter(found.method).abstract(cfg),
        lambda name: files.get(names[name]),
        names,
        dtype,
        where=files.where,
        harmless=found.skipped,
        progress=progress,
    )
