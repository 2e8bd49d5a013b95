"""From texts to a drafter folder: what :func:`specjax.train.train` does around the loop."""

import dataclasses
import functools
import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np

from specjax import checkpoints, registry
from specjax.checkpoints import writers
from specjax.core.platform import default_dtype
from specjax.train import made, mask, methods, vocabulary
from specjax.train.data import TextData
from specjax.train.packed import packable
from specjax.train.sources import Extract, open_source
from specjax.train.store import Store, differences, load
from specjax.train.trainer import Fitted, Watch, fit
from specjax.train.types import Optimizer, Recipe, Source
from specjax.types import Pair, Params


def train(
    params: Params,
    texts: Store | str | Path | Sequence[str | Path],
    method: str,
    folder: str | Path,
    *,
    settings: Mapping[str, Any] | None = None,
    validation: float = 0.02,
    evaluated: int | None = 512,
    features: str | Path | None = None,
    watch: Watch | None = None,
    layout: str = "own",
    resume: bool = True,
    devices: Sequence[jax.Device] | None = None,
    verbose: bool | None = None,
    **recipe: Any,
) -> Fitted:
    """Train a drafter on a target's own texts and write it to ``folder/drafter``.

    Args:
        params: the target, in the dtype that made the texts; a drafter in it is left aside.
        texts: what :func:`specjax.train.prepare` gave, its folder, or several folders.
        method: "eagle3", "mtp", "assistant", "dflash" or "dspark".
        folder: of the run: checkpoints, ``metrics.jsonl``, TensorBoard events, and the drafter. A run that was stopped
            is continued when called again with the same arguments.
        settings: the drafter's shape (``layers``, ``taps``, ``k``, ``draft_vocab`` ...), see its training method's
            ``config``. A number for ``draft_vocab`` means so many of the texts' most frequent tokens.
        validation: share of the prompts that is held out; ``evaluated``: at most so many of their texts.
        features: folder of saved features (``source="offline"``, or to begin a "hybrid" run with).
        watch: how often to log, evaluate and save; when to stop.
        layout: of the drafter's folder, see :func:`specjax.export`.
        devices: data parallel over these; default: one.
        recipe: fields of :class:`specjax.train.types.Recipe`: ``steps``, ``rows``, ``length``, ``learning_rate``,
            ``terms``, ``source``, ``seed`` ...

    Raises ValueError, before anything is computed, for a method, setting or recipe that is not known or does not fit,
    and for texts of another target (naming what differs); what :func:`specjax.train.trainer.fit` raises.
    """
    module, chosen = check(params, method, settings, layout, **recipe)
    store = (
        texts if isinstance(texts, Store) else load(*([texts] if isinstance(texts, str | Path) else texts))
    )
    _check_made_by(params, store)
    meta = params.meta
    bare = Pair(meta.family, meta.target_cfg)
    data = TextData(store, chosen, pack=packable(bare), validation=validation, most=evaluated)
    cfg, ids = _configure(module, dict(settings or {}), params, store)
    weights = functools.partial(module.init, vocabulary=ids) if ids is not None else module.init
    lent = registry.target(meta.family).shared(params.target, meta.target_cfg)
    fitted = fit(
        params,
        data,
        chosen,
        cfg,
        folder,
        weights=weights(cfg, params.target, lent, jax.random.key(chosen.seed)),
        source=_source(module, bare, cfg, chosen, data, features),
        watch=watch,
        resume=resume,
        devices=devices,
        verbose=verbose,
    )
    if fitted.finished:
        # in the type it was evaluated in: the folder's drafter is the trainer's, bit for bit
        checkpoints.export(fitted.params, Path(folder) / "drafter", layout, chosen.dtype)
        _note(Path(folder), fitted, data, chosen)
    return fitted


def check(
    params: Params, method: str, settings: Mapping[str, Any] | None = None, layout: str = "own", **recipe: Any
) -> tuple[Any, Recipe]:
    """(training method, recipe) of a request, as far as it can be told without texts: so that nobody waits for answers
    first. ValueError for what is not known or does not fit the target."""
    module = methods.method(method)
    chosen = _recipe(module, method, recipe)
    module.config(_masked(module, dict(settings or {}), params), params.meta.target_cfg)
    writers.module_of(layout)
    return module, chosen


def _recipe(module: Any, method: str, changes: Mapping[str, Any]) -> Recipe:
    known = {field.name for field in dataclasses.fields(Recipe)} - {"method"}
    if unknown := sorted(set(changes) - known):
        raise ValueError(f"a recipe has no field(s) {unknown}; known: {', '.join(sorted(known))}")
    for name, kinds in {"optimizer": Optimizer, "source": Source}.items():
        if name in changes and changes[name] not in get_args(kinds):
            *most, last = map(repr, get_args(kinds))
            raise ValueError(f"{name} must be {', '.join(most)} or {last}, got {changes[name]!r}")
    changes = {"dtype": default_dtype().dtype.name} | dict(changes)
    return dataclasses.replace(module.recipe(**changes), method=method)


def _check_made_by(params: Params, store: Store) -> None:
    mine = made.about(params)
    for there in store.meta:
        if found := differences(there, mine, ("target",)):
            raise ValueError(
                f"the texts were made by another target than {params.meta.name}, or by this one in another dtype: "
                f"{'; '.join(found)}. A drafter learns what its own target says"
            )
        if there["tokenizer"]["vocabulary"] != mine["tokenizer"]["vocabulary"]:
            raise ValueError(f"the texts were made with another tokenizer than {params.meta.name} has")


def _configure(module: Any, settings: dict[str, Any], params: Params, store: Store) -> tuple[Any, Any]:
    """(drafter config, ids of its draft vocabulary for ``init`` or None)."""
    meta, takes_ids = params.meta, "vocabulary" in inspect.signature(module.init).parameters
    settings = _masked(module, settings, params)
    vocab = meta.target_cfg.vocab_size
    asked = settings.get("draft_vocab", min(getattr(module, "DRAFT_VOCAB", vocab), vocab))
    ids = None
    if isinstance(asked, int) and not isinstance(asked, bool) and asked != vocab:
        ids = vocabulary.choose(vocabulary.count(_answers(store), vocab), asked, meta.eos_ids)
        settings["draft_vocab"] = ids.tolist()
    elif not isinstance(asked, int):
        ids = np.unique(list(asked))
    return module.config(settings, meta.target_cfg), ids if takes_ids else None


def _masked(module: Any, settings: dict[str, Any], params: Params) -> dict[str, Any]:
    """Settings with a token that stands for "not known yet", where the method needs one and none is named."""
    if not getattr(module, "MASKED", False) or settings.get("mask_embedding"):
        return settings
    if settings.get("mask_id") is not None:
        return settings
    meta = params.meta
    tokenizer = checkpoints.tokenizer.get(meta.tokenizer_id)
    rows = registry.target(meta.family).shared(params.target, meta.target_cfg).embed.shape[0]
    return settings | {"mask_id": mask.reserved(tokenizer, rows, meta.eos_ids)}


def _answers(store: Store) -> list[np.ndarray]:
    """Token ids of all answers."""
    owner = np.repeat(np.arange(len(store)), np.diff(store.firsts))
    spans = store.spans + store.starts[owner][:, None]
    return [store.ids[first:stop] for first, stop in spans.tolist()]


def _source(module: Any, bare: Pair, cfg: Any, recipe: Recipe, data: TextData, folder: Any) -> Any:
    """What :func:`fit` opens features with; None: made inside the step."""
    if recipe.source == "online":
        return None
    extract = Extract(bare, module.needs(cfg), recipe.dtype)
    lengths = data.training_lengths
    return lambda target, sharding: open_source(
        recipe.source, extract, target, lengths, folder=folder, sharding=sharding
    )


def _note(folder: Path, fitted: Fitted, data: TextData, recipe: Recipe) -> None:
    """What the drafter was trained on and how."""
    device = jax.devices()[0]
    said = {
        "recipe": dataclasses.asdict(recipe),
        "texts": data.store.counts(),
        "batches_per_epoch": data.per_epoch,
        "steps": fitted.steps,
        "step": fitted.step,
        "validation_tau": fitted.tau,
        "greedy_validation": data.greedy,
        "device": device.device_kind,
        "jax": jax.__version__,
    }
    (folder / "training.json").write_text(json.dumps(said, indent=1) + "\n", "utf-8")
