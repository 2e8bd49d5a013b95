"""What a round should cost: the bytes it has to read at the speed of a copy, and the limits that are to hold."""

import dataclasses
from typing import Any

import jax
import numpy as np
from steps_run import Contender
from steps_shapes import Method

from specjax.core.cache import DenseKV, RingKV, ValueKV
from specjax.core.recurrent import Recurrent
from specjax.types import tree_bytes

_TABLES = ("embed", "embed_per_layer", "before")  # only rows of them are read
_EXPERTS = ("gate", "up", "down")


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Read per round: the target's weights but experts, its experts that are hit, caches, and for drafting."""

    dense: int
    experts: int
    cache: int
    drafting: int

    @property
    def total(self) -> int:
        return self.dense + self.experts + self.cache + self.drafting


def round_bytes(contender: Contender, distinct: float | None) -> Bytes:
    """Bytes of a round; ``distinct``: experts of a layer that its block hits on average."""
    target, drafter = contender.engine.weights
    dense, per_expert = _target(target)
    state, contexts = contender.shapes, contender.contexts
    cache = sum(_cache(x, contexts) for x in _caches(state.target))
    own = sum(_cache(x, contexts) for x in _caches(state.drafter))
    head = getattr(target, "head", None)
    head = tree_bytes(target.embed if head is None else head)
    passes = 1 if contender.how.name in ("dflash", "dspark") else contender.how.k
    ids = getattr(contender.program.pair.drafter_cfg, "draft_ids", None)
    if ids is not None:  # a head of fewer rows
        head = head * len(ids) // contender.program.pair.target_cfg.vocab_size
    drafting = passes * (_drafter(drafter, head) + own) if drafter is not None else 0
    return Bytes(dense, round(per_expert * (distinct or 0)), cache, drafting)


def _target(weights: Any) -> tuple[int, int]:
    """Bytes of everything that every token reads, and of one expert of every layer."""
    dense = experts = 0
    head = getattr(weights, "head", None)
    for path, x in jax.tree_util.tree_leaves_with_path(weights):
        name, size = _name(path[-1]), x.size * x.dtype.itemsize
        if name in _EXPERTS and x.ndim == 3 and "layers" in map(_name, path):
            experts += size // x.shape[0]
        elif name not in _TABLES or (name == "embed" and head is None):
            dense += size
    return dense, experts


def _drafter(weights: Any, lent_head: int) -> int:
    """Bytes of a pass: the drafter's own weights but tables of which rows are looked up, and a head."""
    paths = jax.tree_util.tree_leaves_with_path(weights)
    own = sum(x.size * x.dtype.itemsize for path, x in paths if _name(path[-1]) not in _TABLES)
    has_head = any(_name(path[-1]) in ("head", "draft_head") for path, _ in paths)
    return own + (0 if has_head else lent_head)


def _name(key: Any) -> str:
    return str(getattr(key, "name", getattr(key, "key", "")))


def _caches(tree: Any) -> list[Any]:
    kinds = (DenseKV, RingKV, ValueKV, Recurrent)
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kinds))
    return [x for x in leaves if isinstance(x, kinds)]


def _cache(cache: Any, contexts: np.ndarray) -> int:
    """Bytes that a round reads: each row's context or window, or a state that is read and written."""
    if isinstance(cache, Recurrent):
        return 2 * tree_bytes(cache.state) + tree_bytes(cache.tape)
    slots = cache.v.shape[2]
    live = float(np.minimum(contexts, slots).mean())
    held = cache.v if isinstance(cache, ValueKV) else (cache.k, cache.v)
    return round(tree_bytes(held) * live / slots)


@dataclasses.dataclass(frozen=True)
class Limit:
    """What is to hold for one row: ``value`` at most ``most``. ``hard``: a miss is a failure."""

    about: str
    value: float
    most: float
    hard: bool

    @property
    def held(self) -> bool:
        return self.value <= self.most

    def __str__(self) -> str:
        verdict = "held" if self.held else "MISSED" if self.hard else "missed (to be explained)"
        return f"{verdict:24} {self.about}: {self.value:.3f}, at most {self.most:.3f}"


#: Milliseconds of rounds on one H200, batch 1, context 1k, by method and drafts.
_MS = {("plain", 0): 4.2, ("dflash", 7): 5.25, ("dflash", 15): 5.46, ("dspark", 7): 5.46}
#: R at most a + b times the number of drafts.
_LINES = {"eagle3": (1.05, 0.05), "mtp": (1.06, 0.12), "mtp32k": (1.05, 0.06)}
_WIDTHS = {8: 1.06, 16: 1.10}
_HARD = ("plain", "c", "dflash", "eagle3")


def limits(row: dict[str, Any]) -> list[Limit]:
    """What is to hold for a row of results."""
    how, about, found = Method(row["method"], row["k"]), row["key"], []
    hard = how.name in _HARD
    if (row["shape"], row["batch"], row["context"]) == ("qwen3-8b", 1, 1024):
        if most := _MS.get((how.name, how.k)):
            found.append(Limit(f"{about} ms", row["ms"], most, hard))
        if how.name in _LINES:
            a, b = _LINES[how.name]
            found.append(Limit(f"{about} R", row["R"], a + b * how.k, hard))
        if how.name == "c" and how.k + 1 in _WIDTHS:
            found.append(Limit(f"{about} R", row["R"], _WIDTHS[how.k + 1], hard))
        if row.get("host_ms") is not None:
            found.append(
                Limit(f"{about} host gap in plain steps", row["host_ms"] / row["plain_ms"], 0.03, False)
            )
    elif row["shape"] == "smollm2-135m" and row.get("host_ms") is not None:
        found.append(Limit(f"{about} host gap in us", 1e3 * row["host_ms"], 60, False))
    elif row["batch"] > 1 or row["context"] > 1024:
        found.append(Limit(f"{about} ms / model", row["ms"] / row["model_ms"], 1.10, False))
    return found
