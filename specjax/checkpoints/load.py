"""One target model from files: config, weights, stop ids, generation defaults, tokenizer id."""

import collections
import dataclasses
import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax import registry
from specjax.checkpoints import gguf, gguf_model, safetensors, tokenizer, tree
from specjax.checkpoints.hub import Source
from specjax.types import Shared

_HEAD, _EMBED = "lm_head.weight", "model.embed_tokens.weight"


@dataclasses.dataclass(frozen=True)
class LoadedTarget:
    """A target and all text-side facts its files state.

    ``family`` is the checkpoint's ``model_type``; ``generation`` the file's generation defaults as they
    are; ``eos_ids`` every id that ends a turn; ``tokenizer_id`` what ``tokenizer.get`` takes ("" = none).
    ``skipped``: how many tensors the family leaves unread on purpose, by reason.
    """

    family: str
    cfg: Any
    weights: Any
    hf_config: dict[str, Any]
    generation: dict[str, Any]
    eos_ids: tuple[int, ...]
    tokenizer_id: str
    chat_template: str | None
    skipped: dict[str, int] = dataclasses.field(default_factory=dict)


def load_target(
    source: Source, dtype: Any, progress: tree.Progress | None = None, shapes_only: bool = False
) -> LoadedTarget:
    """Read a folder or GGUF; floating weights become ``dtype``, one tensor at a time.

    ``progress(done, total, name)`` is called after each array. ``shapes_only``: the weights are
    ``jax.ShapeDtypeStruct``; nothing is read or allocated, and a folder may hold ``config.json`` alone. Raises
    ValueError or OSError naming the file, tensor or setting at fault before anything is compiled.
    """
    if source.kind == "orbax":
        raise ValueError(f"{source.path} was written by specjax.save: read it with checkpoints.orbax.load")
    read = _from_gguf if source.kind == "gguf" else _from_folder
    return read(source.path, dtype, progress, shapes_only)


def load_tables(source: Source, dtype: Any) -> tuple[LoadedTarget, Shared]:
    """A target of shapes, and the embedding and head that it lends: nothing else of its weights is read."""
    loaded = load_target(source, dtype, shapes_only=True)
    module = registry.target(loaded.family)
    return loaded, _part(source, loaded, module.shared(module.abstract(loaded.cfg), loaded.cfg), dtype)


def load_vectors(source: Source, loaded: LoadedTarget) -> list[Any]:
    """The weights with one axis of a target that was read as shapes, in float32 and in their order."""
    specs = jax.tree.leaves(registry.target(loaded.family).abstract(loaded.cfg), is_leaf=tree.is_spec)
    return _part(source, loaded, [spec for spec in specs if len(spec.shape) == 1], np.dtype(np.float32))


def _part(source: Source, loaded: LoadedTarget, specs: Any, dtype: Any) -> Any:
    """Some of a target's weights."""
    get, names = _opened(source, loaded.hf_config)
    prefixes = getattr(registry.target(loaded.family), "PREFIXES", {})
    get, names = renamed(get, names, prefixes, str(source.path))
    wanted = {name for spec in jax.tree.leaves(specs, is_leaf=tree.is_spec) for name in spec.names}
    return tree.fill(specs, get, names & wanted, dtype)


def _opened(source: Source, hf: Mapping[str, Any]) -> tuple[Callable[[str], Any], set[str]]:
    if source.kind == "gguf":
        return gguf_model.reader(gguf.open_file(source.path), hf)
    return safetensors.reader(source.path)


def read_json(path: Path, required: bool = True) -> dict[str, Any]:
    """A JSON object; ValueError naming the file when it is not one."""
    if not path.is_file():
        if required:
            raise FileNotFoundError(f"{path} does not exist")
        return {}
    try:
        data = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return data


def _from_folder(path: Path, dtype: Any, progress: tree.Progress | None, shapes_only: bool) -> LoadedTarget:
    hf = read_json(path / "config.json")
    generation = read_json(path / "generation_config.json", required=False)
    family_module(hf, path)  # before any weight file is opened
    if shapes_only and not safetensors.held(path):
        family, cfg, weights, skipped = _imagined(hf, dtype, str(path))
    else:
        get, names = safetensors.reader(path)
        family, cfg, weights, skipped = _build(hf, get, names, dtype, str(path), progress, shapes_only)
    return LoadedTarget(
        family=family,
        cfg=cfg,
        weights=weights,
        hf_config=hf,
        generation=generation,
        eos_ids=eos_union(hf, hf.get("text_config") or {}, generation),
        tokenizer_id=tokenizer.in_folder(path),
        chat_template=_chat_template(path),
        skipped=skipped,
    )


def _from_gguf(path: Path, dtype: Any, progress: tree.Progress | None, shapes_only: bool) -> LoadedTarget:
    file = gguf.open_file(path)
    hf = gguf_model.hf_config(file)
    get, names = gguf_model.reader(file, hf)
    family, cfg, weights, skipped = _build(hf, get, names, dtype, str(path), progress, shapes_only)
    return LoadedTarget(
        family=family,
        cfg=cfg,
        weights=weights,
        hf_config=hf,
        generation=gguf_model.generation(file),
        eos_ids=gguf_model.eos_ids(file),
        tokenizer_id=str(path.resolve()) if "tokenizer.ggml.tokens" in file.metadata else "",
        chat_template=file.metadata.get("tokenizer.chat_template"),
        skipped=skipped,
    )


def family_module(hf: Mapping[str, Any], where: Any) -> Any:
    """The family module of a config. Only registered names: a file must not choose what is imported."""
    family = hf.get("model_type")
    if family is None and {"specjax_drafter", "speculators_model_type"} & set(hf):
        raise ValueError(
            f"{where} holds a drafter, not a model: load its target, with drafter={str(where)!r}"
        )
    if family not in registry.TARGETS:
        raise ValueError(
            f"{where}: model_type {family!r} is not a supported target family; known: {', '.join(registry.TARGETS)}"
        )
    return registry.target(family)


def _build(
    hf: Mapping[str, Any],
    get: Callable,
    names: set[str],
    dtype: Any,
    where: str,
    progress: Any,
    shapes_only: bool,
):
    module = family_module(hf, where)
    get, names = renamed(get, names, getattr(module, "PREFIXES", {}), where)
    cfg = _config(module, untie(hf, get, names, where), where)
    unread = reasons(module, cfg, names)
    names = names - set(unread)
    harmless = (_HEAD,) if cfg.tied else ()
    weights = tree.fill(
        module.abstract(cfg),
        get,
        names,
        dtype,
        where=where,
        harmless=harmless,
        progress=progress,
        shapes_only=shapes_only,
    )
    return hf["model_type"], cfg, weights, dict(collections.Counter(unread.values()))


def _imagined(hf: Mapping[str, Any], dtype: Any, where: str):
    """What :func:`_build` gives where there is nothing but a config: shapes as it states them."""
    module = family_module(hf, where)
    cfg = _config(module, hf, where)
    return hf["model_type"], cfg, tree.shapes(module.abstract(cfg), dtype), {}


def _config(module: Any, hf: Mapping[str, Any], where: str) -> Any:
    try:
        return module.config(hf)
    except KeyError as error:
        raise ValueError(f"{where}: the config lacks {error}") from None


def reasons(module: Any, cfg: Any, names: Iterable[str]) -> dict[str, str]:
    """Tensors that the family leaves unread on purpose -> why."""
    listed = module.skipped(cfg) if hasattr(module, "skipped") else {}
    found = ((name, next((p for p in listed if name.startswith(p)), None)) for name in names)
    return {name: listed[prefix] for name, prefix in found if prefix is not None}


def renamed(
    get: Callable, names: set[str], prefixes: Mapping[str, str], where: str
) -> tuple[Callable, set[str]]:
    """``(get, names)`` of the text model of a multimodal checkpoint, as if it were there alone."""
    stored = text_names(names, prefixes, where)
    return lambda name: get(stored[name]), set(stored)


def text_names(names: Iterable[str], prefixes: Mapping[str, str], where: str) -> dict[str, str]:
    """Names with the first of ``prefixes`` that they begin with replaced -> names in the file."""
    stored: dict[str, str] = {}
    for name in sorted(names):
        prefix = next((p for p in prefixes if name.startswith(p)), "")
        here = prefixes[prefix] + name[len(prefix) :] if prefix else name
        if here in stored:
            raise ValueError(f"{where}: {name} and {stored[here]} would be the same weight")
        stored[here] = name
    return stored


def untie(hf: Mapping[str, Any], get: Callable, names: set[str], where: str) -> Mapping[str, Any]:
    """A config that ties the head while the file holds a different one is contradicted by the weights."""
    said = {**(hf.get("text_config") or {}), **hf}.get("tie_word_embeddings")
    tied = getattr(family_module(hf, where), "TIED", False) if said is None else said
    if not tied or not {_HEAD, _EMBED} <= names:
        return hf
    if np.array_equal(get(_HEAD), get(_EMBED)):
        return hf
    warnings.warn(
        f"{where}: the config ties output head and embedding, but {_HEAD} differs from {_EMBED}; the stored head "
        "is used",
        UserWarning,
        stacklevel=4,
    )
    return {**hf, "tie_word_embeddings": False}


def eos_union(*configs: Mapping[str, Any]) -> tuple[int, ...]:
    """All ``eos_token_id`` of several config dicts; each may be absent, a number or a list."""
    found: set[int] = set()
    for config in configs:
        value = config.get("eos_token_id")
        found.update(int(i) for i in (value if isinstance(value, list | tuple) else [value]) if i is not None)
    return tuple(sorted(found))


def _chat_template(path: Path) -> str | None:
    """From ``chat_template.jinja``, ``chat_template.json`` (multimodal models) or ``tokenizer_config.json`` (a text,
    or a list of named ones)."""
    if (path / "chat_template.jinja").is_file():
        return (path / "chat_template.jinja").read_text("utf-8")
    files = (path / name for name in ("chat_template.json", "tokenizer_config.json"))
    template = next(filter(None, (read_json(f, required=False).get("chat_template") for f in files)), None)
    if isinstance(template, list):
        template = {t.get("name"): t.get("template") for t in template}.get("default")
    return template
