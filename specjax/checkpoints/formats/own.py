"""specjax's own drafter folders, as :mod:`specjax.checkpoints.writers.own` writes them.

Conventions: ``config.json`` has the kind of drafter (``specjax_drafter``), the version of the layout, the drafter's
frozen config field by field, and name and sizes of the target it was made for. Tensors are called as the drafter
calls them. Embedding and head are stored only where they are the drafter's own. With ``compact`` large matrices are
packed (:mod:`specjax.checkpoints.compact`).
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from specjax import registry
from specjax.checkpoints import compact, hub
from specjax.checkpoints.formats import Files, Found

KIND, VERSION, STORED = "specjax_drafter", "specjax_format", "compact"
FORMAT = 1
#: What of a target is written down and must agree: field of its config -> what it is called in messages.
_SIZES = {"vocab_size": "tokens in the vocabulary", "hidden_size": "channels", "num_layers": "layers"}


def matches(hf: Mapping[str, Any]) -> bool:
    """Our folders say what they hold."""
    return KIND in hf


def facts(name: str, family: str, target_cfg: Any) -> dict[str, Any]:
    """What is written down of a target."""
    return {"name": name, "family": family, **{key: int(getattr(target_cfg, key)) for key in _SIZES}}


def read(files: Files) -> Found:
    """Raises ValueError for a version or kind that is not known, and for a drafter of a target of other sizes."""
    hf = files.hf
    missing = [key for key in (VERSION, "config", "target") if key not in hf]
    if missing:
        raise ValueError(f"{files.where}: the config lacks {missing}")
    if hf[VERSION] != FORMAT:
        raise ValueError(
            f"{files.where} has version {hf[VERSION]} of specjax's layout; this specjax reads version {FORMAT}"
        )
    method, cfg = frozen(files.where, hf, files.target)
    _check_target(files, method, cfg)
    names = {name: name for name in files.shapes}
    made_for = str(hf["target"].get("name") or "")
    return Found(
        method,
        "specjax",
        {},
        names,
        notes=_another(made_for, files.target_name),
        made_for=made_for,
        borrows=False,
        cfg=cfg,
        get=None if STORED not in hf else compact.reader(files.where, hf[STORED], files.get),
    )


def frozen(where: str, hf: Mapping[str, Any], target_cfg: Any) -> tuple[str, Any]:
    """Kind and config. Only registered kinds: a file must not choose what is imported."""
    from specjax.config import drafter_config

    method = hf[KIND]
    if method not in registry.DRAFTERS:
        raise ValueError(f"{where} holds a drafter of kind {method!r}; known: {', '.join(registry.DRAFTERS)}")
    try:
        return method, drafter_config(method, hf["config"], target_cfg)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{where}: {error}") from None


def _check_target(files: Files, method: str, cfg: Any) -> None:
    """A drafter that reads nothing of the target but its tokens needs the vocabulary alone."""
    needs = registry.drafter(method).NEEDS(cfg)
    reads = bool(needs.taps) or needs.hidden or needs.kv
    there = files.hf["target"]
    wrong = [
        f"{there.get(key)} {what}, this one has {getattr(files.target, key)}"
        for key, what in _SIZES.items()
        if (reads or key == "vocab_size") and there.get(key) != getattr(files.target, key)
    ]
    if wrong:
        name = there.get("name") or "without a name"
        raise ValueError(f"{files.where} was made for a target ({name}) of {'; of '.join(wrong)}")
    try:
        fitting(registry.drafter(method), cfg, files.target)
    except ValueError as error:
        raise ValueError(f"{files.where}: {error}") from None


def _another(made_for: str, name: str) -> tuple[str, ...]:
    """A note where names differ; folders and accounts before the last "/" are left aside, and a model with a short name
    may be called by either of its names."""
    last = lambda text: hub.short(text) or text.rstrip("/").split("/")[-1].lower()  # noqa: E731
    if not made_for or not name or last(made_for) == last(name):
        return ()
    return (
        f"it was made for {made_for!r}, the target is called {name!r}: unless they are the same model, few drafts will "
        "be accepted",
    )


#: Fields that are facts of the target.
_FACTS = {"family", "vocab", "vocab_size", "target_size", "tap_width"}


def changed(
    method: str, cfg: Any, settings: Mapping[str, Any], target_cfg: Any, eos_ids: Iterable[int] = ()
) -> Any:
    """The config with fields replaced by a user's ``settings``.

    Raises ValueError for a setting that is no field, for a value the config refuses, and for one that needs other
    weights than the file's.
    """
    if not settings:
        return cfg
    module = registry.drafter(method)
    adapt = getattr(module, "adapted", None)
    given = dict(settings) if adapt is None else adapt(cfg, settings, eos_ids)
    plain = {
        f.name for f in dataclasses.fields(cfg) if not dataclasses.is_dataclass(getattr(cfg, f.name))
    } - _FACTS
    if unknown := sorted(set(given) - plain):
        raise ValueError(
            f"the {method} drafter has no setting(s) {unknown}; known: {', '.join(sorted(plain))}"
        )
    new = dataclasses.replace(cfg, **{key: _tuples(value) for key, value in given.items()})
    if module.abstract(new) != module.abstract(cfg):
        names = sorted(key for key in given if getattr(new, key) != getattr(cfg, key))
        raise ValueError(
            f"{names} of this {method} drafter cannot be changed: its weights are made for the file's"
        )
    return fitting(module, new, target_cfg)


def fitting(module: Any, cfg: Any, target_cfg: Any) -> Any:
    """The config itself; ValueError where it does not fit the target."""
    taps, layers = module.NEEDS(cfg).taps, int(target_cfg.num_layers)
    if taps and not 0 <= min(taps) <= max(taps) <= layers:
        raise ValueError(
            f"the drafter taps the residual stream after {list(taps)} layers, the target has {layers}"
        )
    check = getattr(module, "checked", None)
    return cfg if check is None else check(cfg, target_cfg)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
