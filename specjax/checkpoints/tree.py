"""Filling a weight struct from named tensors: the one loader behind every checkpoint format."""

import dataclasses
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.types import ArraySpec

#: A tensor's name -> an array, or anything with ``shape`` and ``dtype`` that becomes one when it is asked to.
Get = Callable[[str], Any]
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
    shapes_only: bool = False,
) -> Any:
    """The struct ``abstract`` (ArraySpec leaves) with a jax array at every leaf, or its shape (``shapes_only``).

    ``get(name)`` returns one checkpoint tensor, ``names`` all names it knows. Floating arrays are cast to
    ``dtype``, tensor by tensor; integers keep their type. Beside what is on the device, the host holds the array
    that is being read and the one before it, on its way. Raises ValueError naming every missing tensor
    before anything is read, and naming a tensor of the wrong size with both shapes. Tensors nobody asked
    for are reported by a warning, except those in :data:`HARMLESS` or ending in one of ``harmless``.
    """
    names = set(names)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(abstract, is_leaf=is_spec)
    used = _check_names(leaves, names, where)
    _warn_unexpected(names - used, tuple(harmless), where)
    if shapes_only:
        return shapes(abstract, dtype)
    reader = _Reader(get, names, np.dtype(dtype), where, _fused_rows(leaves))
    arrays: list[jax.Array] = []
    for done, (path, spec) in enumerate(leaves):
        array = jax.device_put(reader.read(spec), may_alias=False)
        jax.block_until_ready(arrays[-1:])  # or transfers pile up on the host
        arrays.append(array)
        if progress is not None:
            progress(done + 1, len(leaves), spec.names[0] if spec.names else jax.tree_util.keystr(path))
    return jax.tree_util.tree_unflatten(treedef, arrays)


def shapes(abstract: Any, dtype: Any) -> Any:
    """The struct ``abstract`` with a ``jax.ShapeDtypeStruct`` at every leaf: nothing is allocated."""
    one = lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype or dtype))  # noqa: E731
    return jax.tree.map(one, abstract, is_leaf=is_spec)


def stored_shape(spec: ArraySpec) -> tuple[int, ...]:
    """Shape of each tensor a file has for an array: heads and their channels are one axis, stacks are apart."""
    shape, axes = (spec.shape, spec.axes) if len(spec.names) == 1 else (spec.shape[1:], spec.axes[1:])
    at = next((i for i, axis in enumerate(axes) if axis in ("heads", "kv_heads")), None)
    return shape if at is None else (*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :])


def random_weights(abstract: Any, seed: int, dtype: Any, scale: float = 1.0) -> Any:
    """The struct ``abstract`` with seeded initial values: normal leaves have deviation scale/sqrt(fan in)."""
    leaves, treedef = jax.tree.flatten(abstract, is_leaf=is_spec)
    return jax.tree.unflatten(treedef, [_initial(s, [seed, i], dtype, scale) for i, s in enumerate(leaves)])


def _initial(spec: ArraySpec, seed: list[int], dtype: Any, scale: float) -> jax.Array:
    if spec.init != "normal":
        return jnp.full(spec.shape, 1.0 if spec.init == "ones" else 0.0, spec.dtype or dtype)
    fan_in = spec.shape[-1]
    if spec.axes[-2:] == ("heads", None):  # an output projection contracts heads and channels
        fan_in *= spec.shape[-2]
    values = np.random.default_rng(seed).standard_normal(spec.shape, np.float32)
    return jnp.asarray(values * (scale / fan_in**0.5), dtype)


def is_spec(x: Any) -> bool:
    """Whether a node of an abstract tree is a leaf."""
    return isinstance(x, ArraySpec)


def _check_names(leaves: list, names: set[str], where: str) -> set[str]:
    """Names that will be read; ValueError listing those that are absent."""
    used: set[str] = set()
    missing: list[str] = []
    for path, spec in leaves:
        wanted = (spec.fused,) if spec.fused in names else spec.names
        missing += [n for n in wanted if n not in names]
        if not wanted:
            missing.append(f"(nothing is named for {jax.tree_util.keystr(path)})")
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


def _fused_rows(leaves: list) -> dict[str, int]:
    """Length of axis 1 of each fused tensor: the slices of all who share it must cover it."""
    rows: dict[str, int] = {}
    for _, spec in leaves:
        if spec.fused and spec.rows:
            rows[spec.fused] = max(rows.get(spec.fused, 0), spec.rows[1])
    return rows


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Makes one array after another from checkpoint tensors."""

    get: Get
    names: set[str]
    dtype: np.dtype
    where: str
    fused_rows: dict[str, int]

    def read(self, spec: ArraySpec) -> np.ndarray:
        if spec.fused is not None and spec.fused in self.names:
            return self._cast(self._fused(spec, spec.fused), spec.fused, spec)
        if len(spec.names) == 1:
            return self._tensor(spec.names[0], spec.shape, spec)
        first = self._tensor(spec.names[0], spec.shape[1:], spec)
        out = np.empty(spec.shape, first.dtype)
        out[0] = first
        for i, name in enumerate(spec.names[1:], 1):  # one at a time: only one copy of the stack exists
            out[i] = self._tensor(name, spec.shape[1:], spec)
        return out

    def _tensor(self, name: str, shape: tuple[int, ...], spec: ArraySpec) -> np.ndarray:
        x = self.get(name)
        if not _regroups(x.shape, shape):
            raise self._misshapen(name, x.shape, shape)
        return _apart(self._cast(np.asarray(x).reshape(shape), name, spec), x)

    def _fused(self, spec: ArraySpec, name: str) -> np.ndarray:
        whole, need = self.get(name), spec.shape
        if spec.rows is not None:
            need = (spec.shape[0], self.fused_rows[name], *spec.shape[2:])
        if tuple(whole.shape) != need:
            raise self._misshapen(name, whole.shape, need)
        return _apart(np.asarray(whole if spec.rows is None else whole[:, slice(*spec.rows)]), whole)

    def _misshapen(self, name: str, found: tuple[int, ...], need: tuple[int, ...]) -> ValueError:
        return ValueError(f"{self.where}: {name} has shape {tuple(found)}, this model needs {tuple(need)}")

    def _cast(self, x: np.ndarray, name: str, spec: ArraySpec) -> np.ndarray:
        """Floats to the wanted type, or to the one the array always has; refuses float16 when a value does
        not fit."""
        wanted = self.dtype if spec.dtype is None else np.dtype(spec.dtype)
        if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype == wanted:
            return x
        with np.errstate(over="ignore"):
            out = x.astype(wanted)
        if wanted == np.float16 and np.isinf(out).any() and not np.isinf(x).any():
            raise ValueError(
                f"{self.where}: {name} holds values beyond the range of float16; load it in bfloat16 or float32"
            )
        return out


def _apart(out: np.ndarray, source: Any) -> np.ndarray:
    """``out`` in memory of its own: jax takes an aligned array of the host as it is, and a caller may write over one it
    gave."""
    return out.copy() if isinstance(source, np.ndarray) and np.may_share_memory(out, source) else out


def _regroups(found: tuple[int, ...], need: tuple[int, ...]) -> bool:
    """Whether one shape becomes the other by splitting or merging neighbours (a transposed one does not)."""
    a, b = [n for n in found if n != 1], [n for n in need if n != 1]
    while a and b:
        small, large = (a, b) if a[0] <= b[0] else (b, a)
        rest = large.pop(0)  # must be the product of the next axes of the other
        while rest > 1:
            if not small or rest % small[0]:
                return False
            rest //= small.pop(0)
    return not a and not b
