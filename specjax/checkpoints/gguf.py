"""The GGUF container (versions 2 and 3, little-endian): metadata and dequantised tensors.

Block formats are decoded by the ``gguf`` package; the header is read here because a vocabulary of
hundreds of thousands of strings takes that package seconds.
"""

import dataclasses
import math
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np

#: Tensor types that can be read.
SUPPORTED = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of the file; ``shape`` has the outermost axis first."""

    name: str
    shape: tuple[int, ...]
    kind: str  # one of SUPPORTED
    start: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class File:
    """An open GGUF file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]
    data: np.ndarray  # uint8, the mapped file

    def read(self, name: str, index: int | None = None) -> np.ndarray:
        """Tensor ``name`` (or entry ``index`` of its first axis), dequantised to float32 if quantised."""
        t = self.tensors[name]
        raw = self.data[t.start : t.start + t.nbytes].reshape(*t.shape[:-1], -1)
        return decode(raw if index is None else raw[index], t.kind)


def open_file(path: str | Path) -> File:
    """Read the header; ValueError naming the file when it is truncated, damaged or of an unknown type."""
    path = Path(path)
    with open(path, "rb") as f:
        try:
            mapped = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise ValueError(f"{path} is empty") from None
    cursor = _Cursor(mapped, path)
    if cursor.take(4) != b"GGUF":
        raise ValueError(f"{path} is not a GGUF file")
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise ValueError(f"{path}: GGUF version {version} is not supported (2 and 3 are, little-endian)")
    n_tensors, n_fields = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {cursor.string(): cursor.value(cursor.scalar("I")) for _ in range(n_fields)}
    infos = [_info(cursor) for _ in range(n_tensors)]
    align = int(metadata.get("general.alignment", 32))
    base = -(-cursor.at // align) * align
    tensors = {}
    for name, shape, kind, offset in infos:
        if name in tensors:
            raise ValueError(f"{path} holds tensor {name} twice")
        tensors[name] = _place(path, name, shape, kind, base + offset, len(mapped))
    return File(path, metadata, tensors, np.frombuffer(mapped, np.uint8))


def _info(cursor: "_Cursor") -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    dims = [cursor.scalar("Q") for _ in range(cursor.scalar("I"))]
    return name, tuple(reversed(dims)), cursor.scalar("I"), cursor.scalar("Q")


def _place(path: Path, name: str, shape: tuple[int, ...], code: int, start: int, size: int) -> Tensor:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    known = {t.value: t for t in GGMLQuantizationType}
    kind = known[code].name if code in known else f"type {code}"
    if kind not in SUPPORTED:
        raise ValueError(
            f"{path}: tensor {name} is stored as {kind}, which is not supported ({', '.join(SUPPORTED)})"
        )
    block, width = GGML_QUANT_SIZES[known[code]]
    if not shape or shape[-1] % block:
        raise ValueError(f"{path}: tensor {name} has shape {shape}, rows of {kind} come in blocks of {block}")
    nbytes = math.prod(shape) // block * width
    if start + nbytes > size:
        raise ValueError(f"{path} is truncated: {name} ends at byte {start + nbytes}, the file has {size}")
    return Tensor(name, shape, kind, start, nbytes)


def decode(raw: np.ndarray, kind: str) -> np.ndarray:
    """Rows of bytes ``[..., nbytes]`` as numbers: floats as stored, quantised blocks as float32."""
    if kind in ("F32", "F16"):
        return raw.view(np.float32 if kind == "F32" else np.float16)
    if kind == "BF16":
        import ml_dtypes

        return raw.view(ml_dtypes.bfloat16)
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    return dequantize(raw, GGMLQuantizationType[kind])


class _Cursor:
    """Reads values one after another from the mapped header."""

    def __init__(self, data: mmap.mmap, path: Path):
        self.data, self.path, self.at = data, path, 0

    def take(self, n: int) -> bytes:
        end = self.at + n
        if end > len(self.data):
            raise ValueError(f"{self.path} is truncated or damaged: its header ends at byte {len(self.data)}")
        out, self.at = self.data[self.at : end], end
        return out

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        try:
            return self.take(self.scalar("Q")).decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{self.path} is damaged: a text field is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ValueError(f"{self.path} is damaged: metadata of unknown type {kind}")
        item, n = self.scalar("I"), self.scalar("Q")
        if item in _SCALARS:
            code = "<" + _SCALARS[item]
            raw = self.take(n * struct.calcsize(code))
            return np.frombuffer(raw, np.dtype(code)).tolist()
        return [self.value(item) for _ in range(n)]
