"""One drafter from files: what it is, its config, its weights."""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from specjax import registry
from specjax.checkpoints import formats, gguf, gguf_model, safetensors, tokenizer, tree
from specjax.checkpoints.formats import expected, mtp, own
from specjax.checkpoints.hub import Source
from specjax.checkpoints.load import read_json
from specjax.targets.hf import refuse_quantised
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
    tokenizer_id: str = "",
    eos_ids: tuple[int, ...] = (),
    inside: bool = False,
    progress: tree.Progress | None = None,
    shapes_only: bool = False,
    target_name: str = "",
) -> LoadedDrafter:
    """Read a drafter folder, or a GGUF file of a draft model, for a target.

    ``method``: the kind that is expected. ``settings`` replace what the file says (``k``, ``drafting``,
    ``layout``, ``taps``, ...). ``tokenizer_id``: the target's, which a draft model's must agree with.
    ``eos_ids``: ids that end its turns. ``inside``: the folder is the target's own. Embedding and head equal to the
    target's are borrowed, not stored twice. ``shapes_only``: the weights are ``jax.ShapeDtypeStruct``, and an
    embedding or head of the target's shape is taken for a copy of it; without weight files the config alone is
    asked. ``target_name``: what the target is called, which a folder of ours is compared with.
    Raises ValueError before weights are allocated: another kind than expected, a tensor missing or unknown, a
    setting not understood, a drafter that does not fit the target.
    """
    imagined = shapes_only and source.kind == "folder" and not safetensors.held(source.path)
    if imagined:
        files, own_tokenizer = _imagine(source, target_cfg, method, inside), tokenizer.in_folder(source.path)
    else:
        files, own_tokenizer = _open(source, target_cfg)
    files = dataclasses.replace(files, target_name=target_name)
    where = files.where
    refuse_quantised(files.hf, where)
    found = formats.detect(files, method, inside)
    if method is not None and method not in (found.method, *found.called):
        raise ValueError(
            f"{where} holds a drafter of kind {found.method} ({found.format} format), not {method}"
        )
    names, given = dict(found.names), dict(found.settings)
    if found.method == "draft_model":
        given["compared"] = _compare(where, own_tokenizer, tokenizer_id)
    if found.method == "mtp":
        given["eos_ids"] = eos_ids
    if found.borrows:
        given |= _borrow(files, names, shared, dtype)
    cfg = _configure(found, given, settings or {}, target_cfg, where)
    weights = _fill(found, cfg, names, files, dtype, progress, shapes_only)
    notes = tuple(n for n in found.notes if not n.endswith(tuple(f"({key}=...)" for key in settings or ())))
    if imagined:
        notes = (*notes, expected.NOTE)
    return LoadedDrafter(found.method, cfg, weights, found.format, notes, found.made_for)


def _open(source: Source, target_cfg: Any) -> tuple[formats.Files, str]:
    """A drafter's files and the id of the tokenizer among them ("" = none)."""
    where = str(source.path)
    if source.kind == "gguf":
        file = gguf.open_file(source.path)
        hf = gguf_model.hf_config(file)
        get, _ = gguf_model.reader(file, hf)
        own = str(source.path.resolve()) if "tokenizer.ggml.tokens" in file.metadata else ""
        return formats.Files(where, hf, gguf_model.shapes(file, hf), get, target_cfg), own
    if source.kind == "orbax":
        raise ValueError(
            f"{where} was written by specjax.save and holds a target with its drafter: load it as the target, or give "
            "the drafter's original files"
        )
    tensors = safetensors.Tensors(source.path)
    hf = read_json(source.path / "config.json")
    generation = read_json(source.path / "generation_config.json", required=False)
    files = formats.Files(where, hf, tensors.shapes, tensors.get, target_cfg, generation=generation)
    return files, tokenizer.in_folder(source.path)


def has_layer(source: Source, target_cfg: Any) -> bool:
    """Whether a target's own folder holds a layer for multi-token prediction."""
    if source.kind != "folder" or not safetensors.held(source.path):
        return False
    return mtp.held(_open(source, target_cfg)[0])


def _imagine(source: Source, target_cfg: Any, method: str | None, inside: bool) -> formats.Files:
    """The same for a folder without weights, as its config describes it."""
    where, hf = str(source.path), read_json(source.path / "config.json")
    refuse_quantised(hf, where)
    return expected.files(where, hf, target_cfg, method, inside)


def _compare(where: str, own: str, target: str) -> bool:
    """Whether both tokenizers are known and agree; ValueError when they are known and do not."""
    if not own or not target:
        return False
    why = tokenizer.conflict(own, target)
    if why is not None:
        raise ValueError(f"{where}: its tokenizer is not the target's, so it cannot draft for it: {why}")
    return True


def _configure(
    found: formats.Found, given: dict[str, Any], settings: Mapping[str, Any], target_cfg, where: str
) -> Any:
    module = registry.drafter(found.method)
    try:
        if found.cfg is not None:
            return own.changed(found.method, found.cfg, settings, target_cfg, given.get("eos_ids", ()))
        return module.config({**given, **settings}, target_cfg)
    except KeyError as error:
        raise ValueError(f"{where}: the config lacks {error}") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _borrow(files: formats.Files, names: dict[str, str], shared: Shared, dtype: Any) -> dict[str, bool]:
    """Which of embedding and head are the drafter's own; copies of the target's are dropped from ``names``."""
    apart = {}
    for key, name, lent in (
        ("own_embed", formats.EMBED, shared.embed),
        ("own_head", formats.HEAD, shared.head),
    ):
        apart[key] = name in names and not _same(files, names[name], lent, dtype)
        if not apart[key]:
            names.pop(name, None)
    return apart


def _same(files: formats.Files, name: str, lent: Any, dtype: Any) -> bool:
    """Whether a table is a copy of what is lent, perhaps rounded to the file's type."""
    if tuple(files.shapes[name]) != tuple(lent.shape):
        return False
    if isinstance(lent, jax.ShapeDtypeStruct):
        return True
    stored, table = np.asarray(files.get(name)), np.asarray(lent, dtype)
    return np.array_equal(stored.astype(dtype), table) or np.array_equal(stored, table.astype(stored.dtype))


def _fill(
    found: formats.Found,
    cfg: Any,
    names: dict[str, str],
    files: formats.Files,
    dtype,
    progress,
    shapes_only: bool,
) -> Any:
    unread = set() if found.part else set(files.shapes) - set(found.names.values())
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
        lambda name: (found.get or files.get)(names[name]),
        names,
        dtype,
        where=files.where,
        harmless=found.skipped,
        progress=progress,
        shapes_only=shapes_only,
    )
