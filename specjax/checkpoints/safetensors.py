"""Tensors of a Hugging Face folder: one ``*.safetensors`` file, or shards with an index.

Only safetensors are read. Pickle-based weights and Python files in the folder are never opened.
"""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np

INDEX = "model.safetensors.index.json"
_PICKLED = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".h5", ".msgpack")
_NUMBERS = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Stored:
    """One tensor where it lies in a file: read each time it is made an array, in whole or ``[:, start:stop]``.

    Plain reads instead of a memory map: mapped pages count as the process's own memory until they are dropped, and
    reading is twice as fast.
    """

    file: Path
    start: int  # first byte
    kind: str
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        return jnp.dtype(_NUMBERS[self.kind])

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        whole = self._read(1, 0, math.prod(self.shape)).reshape(self.shape)
        return whole if dtype is None else whole.astype(dtype, copy=False)

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        """``[:, start:stop]``: nothing else is read."""
        every, part = index
        if every != slice(None) or len(self.shape) < 2:
            raise IndexError(f"only [:, start:stop] of two or more axes can be read, not {index}")
        first, end, step = part.indices(self.shape[1])
        inner = math.prod(self.shape[2:])
        rows = self._read(self.shape[0], first * inner, max(end - first, 0) * inner, self.shape[1] * inner)
        return rows.reshape(self.shape[0], -1, *self.shape[2:])[:, ::step]

    def _read(self, times: int, first: int, count: int, stride: int = 0) -> np.ndarray:
        """``[times count]`` numbers: ``count`` in a row from ``first`` on, every ``stride`` numbers."""
        size = self.dtype.itemsize
        raw = np.empty((times, count * size), np.uint8)
        with open(self.file, "rb", buffering=0) as opened:
            for i, row in enumerate(raw):
                opened.seek(self.start + (first + i * stride) * size)
                self._fill(opened, memoryview(row))
        return raw.view(self.dtype)

    def _fill(self, opened, room: memoryview) -> None:
        while room:  # one call reads two gigabytes at most
            got = opened.readinto(room)
            if not got:
                raise ValueError(f"{self.file} is damaged or truncated: it ends within a tensor")
            room = room[got:]


class Tensors:
    """Names of all tensors of a folder and where they lie; ``get(name)`` reads one.

    Raises OSError or ValueError naming the file when a shard is absent, damaged or does not hold what
    the index says.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.files = _locate(self.folder)
        self._stored = self._headers()

    @property
    def names(self) -> set[str]:
        return set(self.files)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor; nothing is read."""
        return {name: stored.shape for name, stored in self._stored.items()}

    def get(self, name: str) -> Stored:
        """The tensor as stored (bfloat16 included), read when it is made an array."""
        stored = self._stored[name]
        if stored.kind not in _NUMBERS:
            raise ValueError(
                f"{self.files[name]}: {name} is stored as {stored.kind}; quantised weights are not supported"
            )
        return stored

    def _headers(self) -> dict[str, Stored]:
        held: dict[str, dict[str, Stored]] = {}
        for name, file in self.files.items():
            if file not in held:
                held[file] = header(self.folder / file)
            if name not in held[file]:
                raise ValueError(
                    f"{INDEX} says that {name} is in {file}, but {self.folder / file} does not hold it"
                )
        return {name: held[file][name] for name, file in self.files.items()}


def header(path: str | Path) -> dict[str, Stored]:
    """Where each tensor of a file lies; ValueError naming the file when it is truncated or not one."""
    import safetensors

    path = Path(path)
    try:
        with safetensors.safe_open(str(path), framework="numpy"):
            pass  # lengths, places and names are checked there
    except FileNotFoundError:
        raise FileNotFoundError(f"weight file {path} does not exist") from None
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or truncated, or no safetensors file: {error}") from None
    with open(path, "rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        told = json.loads(opened.read(size))
    return {
        name: Stored(path, 8 + size + at["data_offsets"][0], at["dtype"], tuple(at["shape"]))
        for name, at in told.items()
        if name != "__metadata__"
    }


def held(folder: Path) -> bool:
    """Whether there is any weight file in a folder."""
    return any(folder.glob("*.safetensors"))


def reader(folder: str | Path) -> tuple[Callable[[str], Stored], set[str]]:
    """``(get, names)`` of a folder."""
    tensors = Tensors(folder)
    return tensors.get, tensors.names


def _locate(folder: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    if (folder / INDEX).is_file():
        return _from_index(folder)
    found = sorted(p.name for p in folder.glob("*.safetensors") if not p.name.startswith("consolidated"))
    if len(found) > 1:
        raise ValueError(
            f"{folder} holds {len(found)} safetensors files ({', '.join(found[:4])} ...) but no {INDEX}"
        )
    if not found:
        raise FileNotFoundError(_nothing(folder))
    return dict.fromkeys(header(folder / found[0]), found[0])


def _from_index(folder: Path) -> dict[str, str]:
    try:
        files = json.loads((folder / INDEX).read_text("utf-8"))["weight_map"]
        files = {str(k): str(v) for k, v in files.items()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{folder / INDEX} is not a valid index: {error!r}") from None
    outside = sorted({f for f in files.values() if Path(f).name != f})
    if outside:
        raise ValueError(f"{folder / INDEX} names files outside its folder: {outside[:4]}")
    absent = sorted({f for f in files.values() if not (folder / f).is_file()})
    if absent:
        raise FileNotFoundError(f"{INDEX} names shard(s) that are not in {folder}: {', '.join(absent)}")
    return files


def _nothing(folder: Path) -> str:
    pickled = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLED)
    if pickled:
        return (
            f"{folder} holds only pickle-based weights ({', '.join(pickled[:4])}); opening those can run code, so "
            "they are refused: convert them to safetensors"
        )
    return f"{folder} holds no safetensors file"
