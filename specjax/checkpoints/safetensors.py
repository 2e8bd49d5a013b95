"""Tensors of a Hugging Face folder: one ``*.safetensors`` file, or shards with an index.

Only safetensors are read. Pickle-based weights and Python files in the folder are never opened.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

INDEX = "model.safetensors.index.json"
_PICKLED = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".h5", ".msgpack")
_NUMBERS = {"F32", "F16", "BF16", "F64", "I64", "I32", "I16", "I8", "U8", "BOOL", "U16", "U32", "U64"}


class Tensors:
    """Names of all tensors of a folder and where they lie; ``get(name)`` reads one.

    Raises OSError or ValueError naming the file when a shard is absent, damaged or does not hold what
    the index says.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.files = _locate(self.folder)
        self._open: dict[str, object] = {}
        self._check_shards()

    @property
    def names(self) -> set[str]:
        return set(self.files)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor; nothing is read."""
        return {
            name: tuple(self._handle(file).get_slice(name).get_shape()) for name, file in self.files.items()
        }

    def get(self, name: str) -> np.ndarray:
        """The tensor as stored (bfloat16 included)."""
        handle = self._handle(self.files[name])
        kind = handle.get_slice(name).get_dtype()
        if kind not in _NUMBERS:
            raise ValueError(
                f"{self.files[name]}: {name} is stored as {kind}; quantised weights are not supported"
            )
        return handle.get_tensor(name)

    def _handle(self, file: str):
        if file not in self._open:
            self._open[file] = open_file(self.folder / file)
        return self._open[file]

    def _check_shards(self) -> None:
        held: dict[str, set[str]] = {}
        for name, file in self.files.items():
            if file not in held:
                held[file] = set(self._handle(file).keys())
            if name not in held[file]:
                raise ValueError(
                    f"{INDEX} says that {name} is in {file}, but {self.folder / file} does not hold it"
                )


def open_file(path: str | Path):
    """An open safetensors file; ValueError naming it when it is truncated or not one."""
    import safetensors

    try:
        return safetensors.safe_open(str(path), framework="numpy")
    except FileNotFoundError:
        raise FileNotFoundError(f"weight file {path} does not exist") from None
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or truncated, or no safetensors file: {error}") from None


def reader(folder: str | Path) -> tuple[Callable[[str], np.ndarray], set[str]]:
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
    return dict.fromkeys(open_file(folder / found[0]).keys(), found[0])


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
