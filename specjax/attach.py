"""From what a user asks for to a drafter in ``params``: names, folders, modules, chains, speculative configs.

``plan`` checks the request before the target is loaded; ``attach`` loads the drafter for it.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from specjax import checkpoints, registry, speculative, zoo
from specjax.checkpoints import hub, known
from specjax.core.platform import backend
from specjax.speculative import Speculative
from specjax.types import Params

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Ask:
    """One drafter asked for. ``name`` None: its files say. ``settings``: fields that replace defaults or the
    file's; ``spec``: the speculative config, if there is one. ``inside``: the files are the target's own.
    ``shipped``: the package may have it, which is known when the target is. ``inside`` of both goes first."""

    name: str | None
    source: hub.Source | None
    settings: Mapping[str, Any]
    spec: Speculative | None
    inside: bool = False
    shipped: bool = False


@dataclasses.dataclass(frozen=True)
class Plan:
    """Drafters in order of priority (several are a chain) and the acceptance rule."""

    asks: tuple[Ask, ...]
    rule: str

    @property
    def open(self) -> bool:
        """Whether the target decides if there are such drafters at all."""
        return any(ask.shipped and not ask.inside for ask in self.asks)


@dataclasses.dataclass(frozen=True)
class _Ready:
    """A drafter with everything that ``params`` keep of it. ``notes`` are assumptions, told to the user."""

    name: str
    cfg: Any
    weights: Any = None
    notes: tuple[str, ...] = ()
    made_for: str = ""


def plan(
    drafter: Any,
    speculative_config: Any,
    drafter_config: Any,
    target: str | Path | None = None,
    weights: bool = True,
) -> Plan | None:
    """What is to be attached; None when nothing was asked for. ``target``: where its files are, if it has any.
    Without ``weights`` none are downloaded.

    Raises ValueError for a name, a combination or a setting that makes no sense, FileNotFoundError or OSError
    for files that cannot be had.
    """
    spec = None if speculative_config is None else speculative.read(speculative_config)
    chain = isinstance(drafter, tuple | list)
    items = list(drafter) if chain else [] if drafter is None else [drafter]
    if chain and not items:
        raise ValueError("a chain needs at least one drafter")
    if spec is None and not items:
        if drafter_config is not None:
            raise ValueError("drafter_config was given, but no drafter")
        return None
    pairs = _names(items, chain, spec)
    settings = _per_drafter(drafter_config, len(pairs), chain)
    specs = _shares(spec, pairs)
    find = functools.partial(hub.resolve, weights=weights)
    asks = tuple(_ask(*one, target, find) for one in zip(pairs, settings, specs, strict=True))
    return Plan(asks, "auto" if spec is None else spec.rule)


def _names(items: list[Any], chain: bool, spec: Speculative | None) -> list[tuple[str | None, Any]]:
    """(method, files) of each drafter, from both ways of naming one."""
    pairs = [_one(item) for item in items]
    if spec is None or (spec.method is None and spec.model is None):
        if not pairs:
            raise ValueError(
                "speculative_config names no method and no model; add 'method', for example 'ngram'"
            )
        return pairs
    if chain:
        raise ValueError(
            "a chain is given by drafter=(...); leave method and model out of speculative_config"
        )
    method = None if spec.method is None else _known(spec.method)
    name, where = pairs[0] if pairs else (None, None)
    _agree("method", items, name, method)
    _agree("model", items, None if where is None else str(where), spec.model)
    return [(name or method, where if where is not None else spec.model)]


def _shares(spec: Speculative | None, pairs: list[tuple[str | None, Any]]) -> list[Speculative | None]:
    """What a speculative config says to each drafter: in a chain, only what concerns it."""
    if spec is None or len(pairs) == 1:
        return [spec] * len(pairs)
    if spec.lookup and not any(name == "ngram" for name, _ in pairs):
        raise ValueError(
            f"speculative_config: {sorted(spec.lookup)} belong to the n-gram drafter; there is none"
        )
    shares = []
    for name, where in pairs:
        share = spec if name == "ngram" else dataclasses.replace(spec, lookup={})
        shares.append(
            share if where is not None else dataclasses.replace(share, drafting=None, revision=None)
        )
    return list(shares)


def _agree(what: str, items: list[Any], one: str | None, other: str | None) -> None:
    if one is not None and other is not None and one != other:
        raise ValueError(f"drafter={items[0]!r} and speculative_config's {what} {other!r} disagree")


def _one(item: Any) -> tuple[str | None, Any]:
    """(method name, None) or (None, files) of one drafter as the user spelled it."""
    if isinstance(item, ModuleType):
        return _known(item.__name__), None
    if isinstance(item, Path) or (isinstance(item, str) and _is_files(item)):
        return None, item
    return _known(item), None


def _is_files(text: str) -> bool:
    if text in registry.DRAFTERS or text in speculative.ALIASES:
        return False
    return "/" in text or text in hub.SHORT_NAMES or text.lower().endswith(".gguf") or Path(text).exists()


def _known(name: Any) -> str:
    """The registry's name of a method, or a dotted name that can be imported."""
    if not isinstance(name, str):
        raise ValueError(
            f"drafter must be a method name or a module, a folder, a Hub id or a sequence of these, got "
            f"{type(name).__name__}"
        )
    name = speculative.ALIASES.get(name, name)
    name = {path: short for short, path in registry.DRAFTERS.items()}.get(name, name)
    if name in speculative.REFUSED_METHODS:
        raise ValueError(f"drafter {name!r} is not supported: {speculative.REFUSED_METHODS[name]}")
    try:
        registry.drafter(name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"drafter {name!r} cannot be imported: {error}") from error
    return name


def _per_drafter(settings: Any, drafters: int, chain: bool) -> list[Mapping[str, Any]]:
    """``drafter_config`` as one mapping per drafter."""
    if not chain:
        listed = [settings]
    elif settings is None:
        listed = [None] * drafters
    elif isinstance(settings, Sequence) and len(settings) == drafters:
        listed = list(settings)
    else:
        raise ValueError(
            f"drafter_config of a chain is a list with one entry (or None) per drafter, here {drafters}"
        )
    for one in listed:
        if one is not None and not isinstance(one, Mapping):
            raise ValueError(f"drafter_config must map setting names to values, got {type(one).__name__}")
    return [dict(one or {}) for one in listed]


def _ask(
    pair: tuple[str | None, Any],
    settings: Mapping[str, Any],
    spec: Speculative | None,
    target: Any,
    find: Callable[..., hub.Source],
) -> Ask:
    name, where = pair
    if spec is not None:
        for key, said in (("k", spec.k), ("drafting", spec.drafting)):
            if said is not None and settings.get(key, said) != said:
                raise ValueError(
                    f"drafter_config's {key}={settings[key]!r} and speculative_config's {said!r} disagree"
                )
    if name == "chain":
        raise ValueError("a chain is asked for by its parts: drafter=('ngram', 'folder of the next one')")
    if where is None:
        if spec is not None and spec.revision is not None:
            raise ValueError(f"speculative_config: revision={spec.revision!r} is of no use without a model")
        return _by_name(str(name), settings, spec, target, find)
    if name is not None and hasattr(registry.drafter(name), "default"):
        raise ValueError(f"drafter {name!r} has no files, but {str(where)!r} was given for it")
    revision = None if spec is None else spec.revision
    return Ask(name, find(where, revision), settings, spec)


def _by_name(
    name: str,
    settings: Mapping[str, Any],
    spec: Speculative | None,
    target: Any,
    find: Callable[..., hub.Source],
) -> Ask:
    """A drafter that its method alone names: one without files, one of the package's, or the target's own."""
    module = registry.drafter(name)
    if name not in registry.DRAFTERS or hasattr(module, "default"):
        return Ask(name, None, settings, spec)
    if (folder := zoo.find(hub.short(target), name)) is not None:
        return Ask(name, _folder(folder), settings, spec)
    shipped = target is not None and bool(zoo.targets(name))
    if target is not None and getattr(module, "INSIDE", False):
        return Ask(name, find(target), settings, spec, inside=True, shipped=shipped)
    if not shipped:
        raise _no_drafter(name, "tiny" if target is None else target)
    return Ask(name, None, settings, spec, shipped=True)


def _folder(folder: Path) -> hub.Source:
    return hub.Source("folder", folder, f"specjax.zoo/{folder.parent.name}/{folder.name}")


def _no_drafter(name: str, target: Any) -> ValueError:
    """Learned methods of ours come from files."""
    return ValueError(
        f"{name!r} is a method, not a drafter: give the folder or Hub id of one, as drafter='path/to/it' or as "
        f"speculative_config={{'method': {name!r}, 'model': 'path/to/it'}}; {zoo.missing(name, target)}"
    )


def found(params: Params, wanted: Plan) -> Plan:
    """The plan with the package's drafters in place, now that the target is known (shapes will do).

    ValueError when there is none of a method for this target.
    """
    return dataclasses.replace(wanted, asks=tuple(_found(params, ask) for ask in wanted.asks))


def _found(params: Params, ask: Ask) -> Ask:
    if not ask.shipped or (
        ask.source is not None and checkpoints.has_layer(ask.source, params.meta.target_cfg)
    ):
        return ask
    folder = zoo.find(known.short_name(params, by_sizes=True), str(ask.name))
    if folder is not None:
        return dataclasses.replace(ask, source=_folder(folder), inside=False, shipped=False)
    if ask.inside:
        return ask  # reading its files tells why there is none
    raise _no_drafter(str(ask.name), params.meta.name)


def attach(params: Params, wanted: Plan, say: Say) -> Params:
    """``params`` with the drafters of a plan. Assumptions are told as a warning and kept in
    ``meta.drafter_notes``.

    Raises ValueError when a drafter does not fit the target or its files contradict the request.
    """
    ready = [_load(params, ask, say) for ask in found(params, wanted).asks]
    for one in ready:
        if one.notes:
            warnings.warn(
                f"drafter {one.name}: {'; '.join(one.notes)}. drafter_config={{...}} overrides this",
                UserWarning,
                stacklevel=3,
            )
    whole = ready[0] if len(ready) == 1 else _chain(ready, params.meta.target_cfg)
    meta = dataclasses.replace(
        params.meta,
        drafter=whole.name,
        drafter_cfg=whole.cfg,
        drafter_notes=tuple(note for one in ready for note in _kept(one)),
        rule=wanted.rule,
    )
    return Params(params.target, whole.weights, meta)


def _kept(ready: _Ready) -> tuple[str, ...]:
    made = (f"made for {ready.made_for}",) if ready.made_for else ()
    return tuple(f"{ready.name}: {note}" for note in (*ready.notes, *made))


def _chain(ready: list[_Ready], target_cfg: Any) -> _Ready:
    parts = {"drafters": [one.name for one in ready], "configs": [one.cfg for one in ready]}
    cfg = registry.drafter("chain").config(parts, target_cfg)
    return _Ready("chain", cfg, tuple(one.weights for one in ready))


def _load(params: Params, ask: Ask, say: Say) -> _Ready:
    if ask.source is None:
        return _Ready(str(ask.name), _without_weights(str(ask.name), ask, params.meta.target_cfg))
    _refuse_lookup(ask)
    meta, source = params.meta, ask.source
    lent = registry.target(meta.family).shared(params.target, meta.target_cfg)
    say(f"loading drafter {source.name}")
    loaded = checkpoints.load_drafter(
        source,
        meta.target_cfg,
        lent,
        lent.embed.dtype,
        method=ask.name,
        settings=_common(ask) | dict(ask.settings),
        tokenizer_id=meta.tokenizer_id,
        eos_ids=meta.eos_ids,
        inside=ask.inside,
        shapes_only=isinstance(lent.embed, jax.ShapeDtypeStruct),
        target_name=known.short_name(params, by_sizes=True) or meta.name,
        progress=lambda done, total, name: say(f"loading drafter {source.name}: {done}/{total} {name}"),
    )
    return _Ready(loaded.name, loaded.cfg, loaded.weights, loaded.notes, loaded.made_for)


def _common(ask: Ask) -> dict[str, Any]:
    """What a speculative config says to any learned drafter; vLLM drafts greedily unless told otherwise."""
    if ask.spec is None:
        return {}
    k = {} if ask.spec.k is None else {"k": ask.spec.k}
    return k | {"drafting": ask.spec.drafting or "greedy"}


def _refuse_lookup(ask: Ask) -> None:
    if ask.spec is not None and ask.spec.lookup:
        raise ValueError(
            f"speculative_config: {sorted(ask.spec.lookup)} belong to the n-gram drafter, not to "
            f"{ask.name or str(ask.source and ask.source.path)!r}"
        )


def _without_weights(name: str, ask: Ask, target_cfg: Any) -> Any:
    """Config of a drafter that has no files."""
    module = registry.drafter(name)
    if name not in registry.DRAFTERS:
        return _foreign(name, module, ask, target_cfg)
    if ask.spec is None:
        cfg = module.default(backend())
    else:
        if ask.spec.drafting == "probabilistic":
            raise ValueError(
                f"speculative_config: draft_sample_method='probabilistic' makes no sense for {name!r}, which "
                "draws from no distribution"
            )
        k = {} if ask.spec.k is None else {"num_speculative_tokens": ask.spec.k}
        cfg = module.config({**k, **ask.spec.lookup}, target_cfg)
    fields = sorted(f.name for f in dataclasses.fields(cfg))
    unknown = sorted(set(ask.settings) - set(fields))
    if unknown:
        raise ValueError(f"drafter_config: {name!r} has no setting(s) {unknown}; known: {', '.join(fields)}")
    return dataclasses.replace(cfg, **{key: _tuples(value) for key, value in ask.settings.items()})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def _foreign(name: str, module: Any, ask: Ask, target_cfg: Any) -> Any:
    """Config of somebody else's drafter; its settings are its own business."""
    _refuse_lookup(ask)
    settings = dict(ask.settings)
    if ask.spec is not None and ask.spec.k is not None:
        settings["k"] = ask.spec.k
    if ask.spec is not None and ask.spec.drafting is not None:
        settings["drafting"] = ask.spec.drafting
    if settings:
        cfg = module.config(settings, target_cfg)
    elif hasattr(module, "default"):
        cfg = module.default(backend())
    else:
        raise ValueError(f"drafter {name!r} has no default settings: pass them as drafter_config={{...}}")
    if module.abstract(cfg) is not None:
        raise ValueError(
            f"drafter {name!r} has weights, and load knows no file format for it: load the target alone, then "
            "params.replace(drafter=weights, meta=dataclasses.replace(params.meta, drafter=..., drafter_cfg=...))"
        )
    return cfg
