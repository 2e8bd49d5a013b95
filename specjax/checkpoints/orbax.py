"""Our own checkpoint: one orbax folder with the arrays, the JSON meta, and a copy of the tokenizer.

Layout: ``params/`` (orbax pytree ``{"target", "drafter"}``), ``specjax/data.json`` (meta: names,
configs, and shape and type of every array), ``specjax/sizes.json`` (bytes of every file of ``params/``),
``tokenizer/`` (files of ``save_pretrained``; absent without a tokenizer).
"""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from specjax import registry
from specjax.checkpoints import atomic, tokenizer
from specjax.checkpoints.hub import ORBAX_META
from specjax.config import Meta
from specjax.types import ArraySpec, Params

FORMAT = 1
_TOKENIZER = "tokenizer"
_META = Path(ORBAX_META).parent.name
_SIZES = Path(_META) / "sizes.json"


def save(params: Params, folder: str | Path) -> None:
    """Write ``params`` to ``folder``, whole or not at all.

    An earlier checkpoint of ours there is replaced. Raises FileExistsError when the folder holds anything
    else, ValueError when weights and config do not belong together.
    """
    folder = Path(folder).expanduser().resolve()
    _refuse_foreign(folder)
    trees = {"target": params.target, "drafter": params.drafter}
    arrays = {path: [x.dtype.name, list(x.shape)] for path, x in _leaves(trees).items()}
    _check(arrays, params.meta, "these params")
    with atomic.made(folder) as temp:
        copied = params.meta.tokenizer_id not in ("", tokenizer.BYTES)
        meta = params.meta.to_json() | ({"tokenizer_id": _TOKENIZER} if copied else {})
        _write(temp, trees, {"format": FORMAT, "arrays": arrays, "meta": meta})
        if copied:
            tokenizer.get(params.meta.tokenizer_id).save(temp / _TOKENIZER)


def load(folder: str | Path, shapes_only: bool = False) -> Params:
    """Read a folder written by :func:`save`; with ``shapes_only`` no array, only their shapes.

    Raises FileNotFoundError when it is none, ValueError when it is damaged or when its arrays do not have
    the shapes its own config asks for.
    """
    folder = Path(folder).expanduser().resolve()
    arrays, meta = _read_meta(folder)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    _check(arrays, meta, str(folder))
    wanted = jax.tree_util.tree_map_with_path(
        lambda path, spec: jax.ShapeDtypeStruct(
            spec.shape, jnp.dtype(arrays[jax.tree_util.keystr(path)][0]), sharding=device
        ),
        _specs(meta),
        is_leaf=_is_spec,
    )
    if shapes_only:
        return Params(wanted["target"], wanted["drafter"], meta)
    _check_sizes(folder)
    ocp, context = _orbax()
    try:
        with context:
            trees = ocp.load_checkpointables(folder, {"params": wanted})["params"]
    except Exception as error:  # orbax raises many kinds
        raise ValueError(f"{folder} is damaged: its arrays could not be read ({error})") from error
    return Params(trees["target"], trees["drafter"], meta)


def _write(folder: Path, trees: dict[str, Any], meta: dict[str, Any]) -> None:
    ocp, context = _orbax()
    json.dumps(meta)  # a value JSON cannot hold is an error before any array is written
    with context:
        ocp.save_checkpointables(folder, {"params": trees, _META: meta})
    (folder / _SIZES).write_text(json.dumps(_sizes(folder)), "utf-8")


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of every file that holds arrays."""
    files = sorted(path for path in (folder / "params").rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def _check_sizes(folder: Path) -> None:
    """Refuse a folder that was cut short, before any read: orbax leaves its other reads running when one fails."""
    try:
        said = json.loads((folder / _SIZES).read_text("utf-8"))
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(f"{folder} is damaged: {_SIZES} cannot be read ({error})") from None
    found = _sizes(folder)
    for name, size in said.items():
        if found.get(name) != size:
            state = f"holds {found[name]} bytes" if name in found else "is missing"
            raise ValueError(
                f"{folder} is damaged: {name} {state}, {size} were written; save or copy it again"
            )


def _orbax():
    """The orbax API and a context in which the meta is plain JSON."""
    from orbax.checkpoint import v1 as ocp

    handlers = ocp.handlers.local_registry()
    handlers.add(ocp.handlers.JsonHandler, checkpointable_name=_META)
    context = ocp.Context()
    context.checkpointables.registry = handlers
    context.array.saving.use_compression = False  # weights hardly compress, and reading back is faster
    return ocp, context


def _read_meta(folder: Path) -> tuple[dict[str, Any], Meta]:
    path = folder / ORBAX_META
    if not path.is_file():
        raise FileNotFoundError(f"{folder} was not written by specjax.save: it has no {ORBAX_META}")
    try:
        data = json.loads(path.read_text("utf-8"))
        version, arrays, stored = data["format"], data["arrays"], data["meta"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from None
    if version != FORMAT:
        raise ValueError(f"{path} has format {version}; this version of specjax reads format {FORMAT}")
    if stored.get("family") not in registry.TARGETS:
        raise ValueError(
            f"{path} names the target family {stored.get('family')!r}; known: {list(registry.TARGETS)}"
        )
    if stored.get("tokenizer_id") == _TOKENIZER:
        stored["tokenizer_id"] = str(folder / _TOKENIZER)
    return arrays, Meta.from_json(stored)


def _specs(meta: Meta) -> dict[str, Any]:
    """ArraySpec trees of target and drafter."""
    target = registry.target(meta.family).abstract(meta.target_cfg)
    drafter = registry.drafter(meta.drafter).abstract(meta.drafter_cfg) if meta.drafter else None
    return {"target": target, "drafter": drafter}


def _check(arrays: dict[str, Any], meta: Meta, where: str) -> None:
    """Every array the config asks for, with its shape, and no other."""
    wanted = {path: list(spec.shape) for path, spec in _leaves(_specs(meta)).items()}
    missing, extra = sorted(set(wanted) - set(arrays)), sorted(set(arrays) - set(wanted))
    if missing or extra:
        raise ValueError(f"{where} do not fit the config: missing {missing[:8]}, unexpected {extra[:8]}")
    for path, shape in wanted.items():
        if list(arrays[path][1]) != shape:
            raise ValueError(f"{where}: {path} has shape {arrays[path][1]}, the config asks for {shape}")


def _leaves(tree: Any) -> dict[str, Any]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_spec)
    return {jax.tree_util.keystr(path): leaf for path, leaf in flat}


def _is_spec(x: Any) -> bool:
    return isinstance(x, ArraySpec)


def _refuse_foreign(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() and not (folder / ORBAX_META).is_file():
        raise FileExistsError(f"{folder} exists and was not written by specjax.save; choose another folder")
