"""Filling a weight struct from named tensors: the one loader behind every checkpoint format."""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.types import ArraySpec

Get = Callable[[str], np.ndarray]
Progress = Callable[[int, int, str], None]

#: Tensors some checkpoints carry that a decoder never reads: name suffix -> what they are.
HARMLESS = {
    "rotary_emb.inv_freq": "rope frequencies, recomputed from the config",
    "rotary_emb.cos_cached": "rope table, recomputed from the config",
    "rotary_emb.sin_cached": "rope table, recomputed from the config",
    "self_attn.bias": "causal mask buffer of old exports",
    "self_attn.masked_bias": "causal mask buffer of old exports",
    "embeddings.position_ids": "position counter buffer",
}
_LISTED = 12


def fill(
    abstract: Any,
    get: Get,
    names: Iterable[str],
    dtype: Any,
    *,
    where: str = "the checkpoint",
    harmless: Iterable[str] = (),
    progress: Progress | None = None,
) -> Any:
    """The struct ``abstract`` (ArraySpec leaves) with a jax array at every leaf.

    ``get(name)`` returns one checkpoint tensor, ``names`` all names it knows. Floating arrays are cast to
    ``dtype``, tensor by tensor; integers keep their type. Raises ValueError naming every missing tensor
    before anything is read, and naming a tensor of the wrong size with both shapes. Tensors nobody asked
    for are reported by a warning, except those in :data:`HARMLESS` or ending in one of ``harmless``.
    """
    names = set(names)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(abstract, is_leaf=_is_spec)
    used = _check_names(leaves, names, where)
    _warn_unexpected(names - used, tuple(harmless), where)
    fused_rows = {s.fused: max(s2.rows[1] for _, s2 in leaves if s2.fused == s.fused) for _, s in leaves if s.rows}
    arrays = []
    for done, (path, spec) in enumerate(leaves):
        label = _label(path, spec)
        arrays.append(jnp.array(_read(spec, get, names, np.dtype(dtype), where, label)))
        if progress is not None:
            progress(done + 1, len(leaves), label)
    return jax.tree_util.tree_unflatten(treedef, arrays)


def random_weights(abstract: Any, seed: int, dtype: Any, scale: float = 1.0) -> Any:
    """The struct ``abstract`` with seeded initial values: normal leaves have deviation scale/sqrt(fan in)."""
    leaves, treedef = jax.tree.flatten(abstract, is_leaf=_is_spec)
    return jax.tree.unflatten(treedef, [_initial(s, [seed, i], dtype, scale) for i, s in enumerate(leaves)])


def _initial(spec: ArraySpec, seed: list[int], dtype: Any, scale: float) -> jax.Array:
    if spec.init != "normal":
        return jnp.full(spec.shape, 1.0 if spec.init == "ones" else 0.0, dtype)
    fan_in = spec.shape[-1]
    if spec.axes[-2:] == ("heads", None):  # an output projection contracts heads and channels
        fan_in *= spec.shape[-2]
    values = np.random.default_rng(seed).standard_normal(spec.shape, np.float32)
    return jnp.asarray(values * (scale / fan_in**0.5), dtype)


def _is_spec(x: Any) -> bool:
    return isinstance(x, ArraySpec)


def _label(path: Any, spec: ArraySpec) -> str:
    return spec.names[0] if spec.names else jax.tree_util.keystr(path)


def _check_names(leaves: list, names: set[str], where: str) -> set[str]:
    """Names that will be read; ValueError listing those that are absent."""
    used, missing = set(), []
    for _, spec in leaves:
        wanted = (spec.fused,) if spec.fused in names else spec.names
        absent = [n for n in wanted if n not in names]
        missing += absent
        used.update(wanted)
    if missing:
        raise ValueError(f"{where} lacks {len(missing)} tensor(s) this model needs: {_listing(missing)}")
    return used


def _warn_unexpected(extra: set[str], harmless: tuple[str, ...], where: str) -> None:
    extra = {n for n in extra if not n.endswith((*HARMLESS, *harmless))}
    if extra:
        warnings.warn(
            f"{where} holds {len(extra)} tensor(s) this model does not use, so the output may differ from "
            f"what the file was made for: {_listing(sorted(extra))}",
            UserWarning,
            stacklevel=3,
        )


def _listing(names: list[str]) -> str:
    rest = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")


def _read(spec: ArraySpec, get: Get, names: set[str], dtype: np.dtype, where: str, label: str) -> np.ndarray:
    if spec.fused in names:
        whole = np.asarray(get(spec.fused))
        if spec.rows is not None:
            if whole.ndim < 2 or whole.shape[1] != fused_rows[spec.fused]:
                need = (spec.shape[0], fused_rows[spec.fused], *spec.shape[2:])
                raise ValueError(f"{where}: {spec.fused} has shape {whole.shape}, this model needs {need}")
            whole = whole[:, slice(*spec.rows)]
        return _cast(_fit(whole, spec.shape, where, spec.fused), dtype, where, spec.fused)
    if len(spec.names) == 1:
        return _cast(_fit(np.asarray(get(label)), spec.shape, where, label), dtype, where, label)
    out = None
    for i, name in enumerate(spec.names):  # one expert at a time, so that only one copy of the stack exists
        part = _cast(_fit(np.asarray(get(name)), spec.shape[1:], where, name), dtype, where, name)
        out = np.empty(spec.shape, part.dtype) if out is None else out
        out[i] = part
    return out


def _cast(x: np.ndarray, dtype: np.dtype, where: str, name: str) -> np.ndarray:
    """Floats to ``dtype``; refuses float16 when a value does not fit."""
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype == dtype:
        return x
    with np.errstate(over="ignore"):
        out = x.astype(dtype)
    if dtype == np.float16 and np.isinf(out).any() and not np.isinf(x).any():
        raise ValueError(f"{where}: {name} holds values beyond the range of float16; load it in bfloat16 or float32")
    return out


def _fit(x: np.ndarray, shape: tuple[int, ...], where: str, name: str) -> np.ndarray:
    """``x`` reshaped to ``shape``; only splitting and merging of neighbouring axes is allowed."""
    if not _regroups(x.shape, shape):
        raise ValueError(f"{where}: {name} has shape {tuple(x.shape)}, this model needs {tuple(shape)}")
    return x.reshape(shape)


def _regroups(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether one shape becomes the other by splitting or merging neighbours (a transposed one does not)."""
    a, b = [n for n in a if n != 1], [n for n in b if n != 1]
    while a and b:
        small, large = (a, b) if a[0] <= b[0] else (b, a)
        if small[0] == large[0]:
            del a[0], b[0]
        elif len(small) > 1 and large[0] % small[0] == 0:
            small[:2] = [small[0] * small[1]]
        else:
            return False
    return not a and not b
