"""Compact storage of weights: whole multiples of a step, packed by how often each occurs.

A matrix is rounded to multiples of one step. Multiples near zero are frequent and get short codes (Huffman's, as
deflate has them), rare ones long codes. So nothing is clipped, and the step is finer than that of a table of sixteen
values of the same size: the error is about two thirds (docs/formats.md has figures). One step for a whole
matrix gives the smallest sum of squared errors that codes of one number each can have at a given size (Gish and
Pierce, Asymptotically efficient quantizing, 1968).

Large matrices take as many bits per weight as asked for, all told; small ones multiples of 1/127 of their largest
number; vectors float16, or bfloat16 beyond its range; tables of integers stay as they are. The sum of every tensor's
bytes (CRC-32) is written down and checked.
"""

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.checkpoints.writers import Tensor

BITS, LEAST, MOST = 4.5, 2.0, 6.0
#: Matrices of fewer numbers are small.
SMALL = 1 << 16
#: Multiples beyond this are rare; each takes four bytes beside its mark.
_LARGEST = 127
_MARK = -128
#: Bits per number by which a step aims to stay under what was asked for.
_LEFT = 0.002
_LEVEL, _RAW = 9, -15


class Packed:
    """A packed tensor that is unpacked when it is made an array, as float32."""

    def __init__(self, name: str, entry: Mapping[str, Any], stored: Any, where: str):
        self.shape, self.dtype = tuple(int(n) for n in entry["shape"]), np.dtype(np.float32)
        self._name, self._entry, self._stored, self._where = name, entry, stored, where

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        data = np.asarray(self._stored)
        _check(self._where, self._name, self._entry, data)
        try:
            steps = unpacked(data.tobytes(), self._entry["coded"], int(np.prod(self.shape)))
        except (zlib.error, ValueError) as error:
            raise ValueError(f"{self._where}: {self._name} is damaged: {error}") from None
        out = (steps.astype(np.float32) * np.float32(self._entry["step"])).reshape(self.shape)
        return out if dtype is None else out.astype(dtype, copy=False)


class Checked:
    """A tensor that is stored as it is, whose bytes are checked when it is made an array."""

    def __init__(self, name: str, entry: Mapping[str, Any], stored: Any, where: str):
        self.shape, self.dtype = tuple(stored.shape), stored.dtype
        self._name, self._entry, self._stored, self._where = name, entry, stored, where

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        out = np.asarray(self._stored)
        _check(self._where, self._name, self._entry, out)
        return out if dtype is None else out.astype(dtype, copy=False)


def _check(where: str, name: str, entry: Mapping[str, Any], data: np.ndarray) -> None:
    if zlib.crc32(np.ascontiguousarray(data).tobytes()) != entry["crc32"]:
        raise ValueError(f"{where}: {name} is damaged: its bytes are not those that were written")


def reader(where: str, entries: Mapping[str, Any], get: Callable[[str], Any]) -> Callable[[str], Any]:
    """``get`` of a folder with its tensors unpacked. ValueError for a tensor that is not listed."""

    def one(name: str) -> Packed | Checked:
        if name not in entries:
            raise ValueError(f"{where}: the config does not say how {name} is stored")
        kind = Packed if "step" in entries[name] else Checked
        return kind(name, entries[name], get(name), where)

    return one


def pack(tensors: Mapping[str, Tensor], bits: float = BITS) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors as they are stored, how each is stored). The same weights always give the same values.

    ``bits``: per weight of large matrices, codes and all. ValueError unless it is from 2 to 6.
    """
    if isinstance(bits, bool) or not LEAST <= bits <= MOST:
        raise ValueError(f"compact storage takes from {LEAST:g} to {MOST:g} bits per weight, got {bits!r}")
    stored: dict[str, Tensor] = {}
    entries: dict[str, Any] = {}
    for name, tensor in tensors.items():
        data, entry = _one(tensor, float(bits))
        entries[name] = {**entry, "crc32": zlib.crc32(data.tobytes())}
        stored[name] = Tensor(data.shape, data.dtype, lambda data=data: data)  # type: ignore[misc]
    return stored, entries


def _one(tensor: Tensor, bits: float) -> tuple[np.ndarray, dict[str, Any]]:
    x = tensor.make()
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return np.ascontiguousarray(x), {}
    x = x.astype(np.float32)
    if sum(n > 1 for n in x.shape) < 2:
        return x.astype(np.float16 if np.abs(x).max(initial=0) < 65504 else jnp.bfloat16), {}
    step = small_step(x) if x.size < SMALL else large_step(x, bits)
    data, coded = packed(multiples(x, step))
    return np.frombuffer(data, np.uint8), {"shape": list(x.shape), "step": float(step), "coded": coded}


def multiples(x: np.ndarray, step: np.float32) -> np.ndarray:
    """The nearest multiples of a step, as int32."""
    return np.rint(x / step).astype(np.int32)


def small_step(x: np.ndarray) -> np.float32:
    """For small matrices: the largest number is 127 steps."""
    return np.float32(np.abs(x).max(initial=0) / _LARGEST) or np.float32(1)


def large_step(x: np.ndarray, bits: float) -> np.float32:
    """The narrowest step with which the packed matrix takes ``bits`` per number or less."""
    spread = np.float32(np.sqrt(np.mean(np.square(x, dtype=np.float64))))
    if not spread:
        return np.float32(1)
    low = least = max(spread * np.float32(2.0 ** -(MOST + 2)), np.abs(x).max() / np.float32(2**30))
    high = spread * np.float32(8)
    for _ in range(12):
        middle = np.float32(np.sqrt(low * high))
        low, high = (low, middle) if _entropy(multiples(x, middle)) <= bits else (middle, high)
    step = high
    for _ in range(4):  # twice the step is one bit less
        step = max(least, step * np.float32(2.0 ** (_size(x, step) - bits + _LEFT)))
    while _size(x, step) > bits:
        step = step * np.float32(1.002)
    return np.float32(step)


def _size(x: np.ndarray, step: np.float32) -> float:
    """Bits per number of the packed matrix."""
    return len(packed(multiples(x, step))[0]) * 8 / x.size


def _entropy(steps: np.ndarray) -> float:
    """Bits per number that its frequency alone needs."""
    counts = np.bincount(np.clip(steps, -_LARGEST - 1, _LARGEST).reshape(-1) + _LARGEST + 1)
    share = counts[counts > 0] / steps.size
    return float(-(share * np.log2(share)).sum())


def packed(steps: np.ndarray) -> tuple[bytes, int]:
    """Numbers coded by frequency, one byte each before that, and behind them those that do not fit, which leave a mark:
    (all bytes, how many of them are coded)."""
    flat = steps.reshape(-1)
    beyond = np.abs(flat) > _LARGEST
    small = np.where(beyond, _MARK, flat).astype(np.int8)
    coder = zlib.compressobj(_LEVEL, zlib.DEFLATED, _RAW, 9, zlib.Z_HUFFMAN_ONLY)
    coded = coder.compress(small.tobytes()) + coder.flush()
    return coded + flat[beyond].astype("<i4").tobytes(), len(coded)


def unpacked(data: bytes, coded: int, count: int) -> np.ndarray:
    """The ``count`` numbers of :func:`packed`, as int32. ValueError when they are not as many."""
    out = np.frombuffer(zlib.decompress(data[:coded], _RAW, count), np.int8).astype(np.int32)
    marked, beyond = out == _MARK, np.frombuffer(data[coded:], "<i4")
    if len(out) != count or marked.sum() != len(beyond):
        raise ValueError(f"it holds {len(out)} numbers in place of {count}")
    out[marked] = beyond
    return out
