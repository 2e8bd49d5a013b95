"""Weights under their published names and shapes: heads and their channels as one axis, experts one by one."""

import functools
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoints.tree import stored_shape
from specjax.checkpoints.writers import Given, Tensor
from specjax.types import ArraySpec

EMBED, HEAD, D2T, T2D = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"


def named(weights: Any, specs: Any, dtype: Any, where: str = "the drafter") -> dict[str, Tensor]:
    """Tensors of a weight struct. ``dtype``: of floating arrays; None: as they are. Integers keep their type.

    Raises ValueError when struct and specs do not belong together, for an array that has no name, and for arrays
    that are shapes only.
    """
    is_spec = lambda x: isinstance(x, ArraySpec)  # noqa: E731
    wanted, _ = jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_spec)
    arrays = jax.tree.leaves(weights)
    found: Any = jax.tree.structure(weights)
    asked: Any = jax.tree.structure(specs, is_leaf=is_spec)
    if found != asked:
        raise ValueError(f"{where}: the weights do not fit the config: they are {found}, it asks for {asked}")
    out: dict[str, Tensor] = {}
    for (path, spec), array in zip(wanted, arrays, strict=True):
        place = f"{where}{jax.tree_util.keystr(path)}"
        _check(place, spec, array)
        for i, name in enumerate(spec.names):
            if name in out:
                raise ValueError(f"{place}: there is another tensor called {name}")
            part = i if len(spec.names) > 1 else None
            out[name] = _tensor(name, array, part, stored_shape(spec), _type(array, spec, dtype))
    return out


def _check(place: str, spec: ArraySpec, array: Any) -> None:
    if not spec.names:
        raise ValueError(f"{place} has no name in a file")
    if tuple(array.shape) != spec.shape:
        raise ValueError(f"{place} has shape {tuple(array.shape)}, the config asks for {spec.shape}")
    if isinstance(array, jax.ShapeDtypeStruct):
        raise ValueError(f"{place} is a shape without weights: load without shapes_only to write a drafter")


def _type(array: Any, spec: ArraySpec, dtype: Any) -> np.dtype:
    fixed = spec.dtype is not None or not jnp.issubdtype(array.dtype, jnp.floating)
    return np.dtype(array.dtype if fixed or dtype is None else dtype)


def _tensor(name: str, array: Any, part: int | None, shape: tuple[int, ...], dtype: np.dtype) -> Tensor:
    def make() -> np.ndarray:
        whole = np.asarray(array if part is None else array[part])
        return cast(name, whole.reshape(shape), dtype)

    return Tensor(shape, dtype, make)


def cast(name: str, x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """``x`` in another type. ValueError for numbers that are not finite or beyond the type's range."""
    floats = jnp.issubdtype(x.dtype, jnp.floating)
    if floats and not np.isfinite(x.astype(np.float32, copy=False)).all():
        raise ValueError(f"{name} holds numbers that are not finite; such a drafter is not written")
    with np.errstate(over="ignore"):
        out = x.astype(dtype)
    if floats and dtype == np.float16 and not np.isfinite(out).all():
        raise ValueError(f"{name} holds values beyond the range of float16; write bfloat16 or float32")
    return out


def table(given: Given, name: str, lent: Any, rows: np.ndarray | None = None) -> Tensor:
    """The drafter's own table ``name``, or a copy of the target's, of which ``rows`` are taken (None: all)."""
    if name in given.tensors:
        return given.tensors[name]
    dtype = np.dtype(lent.dtype) if given.dtype == "same" else jnp.dtype(given.dtype)
    shape = tuple(lent.shape) if rows is None else (len(rows), lent.shape[1])
    return Tensor(shape, dtype, functools.partial(_copy, name, lent, rows, dtype))


def _copy(name: str, lent: Any, rows: np.ndarray | None, dtype: np.dtype) -> np.ndarray:
    whole = np.asarray(lent)
    return cast(name, whole if rows is None else whole[rows], dtype)


def draft_map(tensors: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
    """A reduced vocabulary as files have it: ``d2t``, what to add to a draft id, and ``t2d``, which of the target's
    ``rows`` ids are among them. Empty for a whole one."""
    if D2T not in tensors:
        return {}
    marks = Tensor((rows,), np.dtype(bool), lambda: _marks(draft_ids(tensors), rows))
    return {D2T: as_int64(tensors[D2T]), T2D: marks}


def as_int64(tensor: Tensor) -> Tensor:
    """A table of integers in the type that files have it in."""
    return Tensor(tensor.shape, np.dtype(np.int64), lambda: tensor.make().astype(np.int64))


def draft_ids(tensors: Mapping[str, Tensor]) -> np.ndarray:
    """Target id of every id of a reduced vocabulary. ValueError unless they are different."""
    offsets = np.asarray(tensors[D2T].make(), np.int64)
    ids = np.arange(len(offsets)) + offsets
    if len(np.unique(ids)) != len(ids) or ids.min() < 0:
        raise ValueError(f"{D2T} maps two draft ids to one target id, or one to none")
    return ids


def _marks(ids: np.ndarray, rows: int) -> np.ndarray:
    if ids.max() >= rows:
        raise ValueError(f"{D2T} leads to target id {ids.max()}, the target has {rows}")
    out = np.zeros(rows, bool)
    out[ids] = True
    return out


_EXPERT = re.compile(r"(.*experts\.)(\d+)\.(gate|up|down)_proj\.weight")


def fused_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Experts as two tensors, ``gate_up_proj [E 2F D]`` with the gates first and ``down_proj [E D F]``; the others as
    they are."""
    out = {name: x for name, x in tensors.items() if not _EXPERT.fullmatch(name)}
    stacks: dict[str, dict[str, list[Tensor]]] = {}
    for name in sorted(set(tensors) - set(out), key=lambda n: int(_EXPERT.fullmatch(n)[2])):  # type: ignore[index]
        prefix, _, part = _EXPERT.fullmatch(name).groups()  # type: ignore[union-attr]
        stacks.setdefault(prefix, {}).setdefault(part, []).append(tensors[name])
    for prefix, parts in stacks.items():
        out[prefix + "gate_up_proj"] = _stack(parts["gate"], parts["up"])
        out[prefix + "down_proj"] = _stack(parts["down"])
    return out


def _stack(*kinds: list[Tensor]) -> Tensor:
    """Tensors of experts stacked, those of several kinds one behind the other."""
    rows, columns = kinds[0][0].shape
    shape = (len(kinds[0]), rows * len(kinds), columns)
    return Tensor(
        shape,
        kinds[0][0].dtype,
        lambda: np.stack([np.concatenate([x.make() for x in one]) for one in zip(*kinds, strict=True)]),
    )
