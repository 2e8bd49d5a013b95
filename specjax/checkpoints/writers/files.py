"""Writing a planned folder: whole or not at all, and never over anything that was not written here."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specjax.checkpoints import atomic
from specjax.checkpoints.writers import Folder, Tensor

WEIGHTS = "model.safetensors"
#: What weight files say beside their tensors; transformers asks for the first.
_TOLD = {"format": "pt", "writer": "specjax"}
_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


def write(folder: Path, made: Folder, check: Callable[[Path], None]) -> None:
    """Write ``made`` to ``folder``. ``check`` is given the folder before it takes its name, and may raise.

    An earlier one that was written here is replaced. Raises FileExistsError when the folder holds anything else.
    """
    refuse_foreign(folder)
    with atomic.made(folder) as temp:
        temp.mkdir()
        for stem, content in {"config": made.config, **made.more}.items():
            (temp / f"{stem}.json").write_text(json.dumps(content, indent=2) + "\n", "utf-8")
        save(temp / WEIGHTS, made.tensors)
        check(temp)


def save(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file. Tensors are made and written one after the other: two are in memory at most.

    Raises ValueError when a tensor is not what was announced.
    """
    # wide numbers first, so that all are aligned
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    at, header = 0, dict[str, Any](__metadata__=_TOLD)
    for name in names:
        size = int(np.prod(tensors[name].shape, dtype=np.int64)) * tensors[name].dtype.itemsize
        kind, shape = _NAMES[tensors[name].dtype.name], list(tensors[name].shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    told = json.dumps(header, separators=(",", ":")).encode()
    told += b" " * (-len(told) % 8)
    with open(path, "wb") as file:
        file.write(len(told).to_bytes(8, "little") + told)
        for name in names:
            x = np.ascontiguousarray(tensors[name].make())
            if (x.shape, x.dtype) != (tensors[name].shape, tensors[name].dtype):
                raise ValueError(
                    f"{name} is {x.dtype}{x.shape}, not {tensors[name].dtype}{tensors[name].shape}"
                )
            file.write(x.tobytes())


def refuse_foreign(folder: Path) -> None:
    """FileExistsError unless there is nothing at ``folder``, or only what an export left there."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise FileExistsError(f"{folder} is a file; choose another folder")
    files = {path.name for path in folder.iterdir()}
    ours = {"config.json", "generation_config.json", WEIGHTS}
    strange = sorted(files - ours)
    if strange:
        raise FileExistsError(
            f"{folder} holds {strange[:4]}, which an export did not write; choose another folder"
        )
    if files and not (WEIGHTS in files and _is_ours(folder / WEIGHTS)):
        raise FileExistsError(f"{folder} holds weights that specjax did not write; choose another folder")


def _is_ours(path: Path) -> bool:
    import safetensors

    try:
        with safetensors.safe_open(str(path), framework="numpy") as file:
            return (file.metadata() or {}).get("writer") == _TOLD["writer"]
    except (safetensors.SafetensorError, OSError):
        return False
