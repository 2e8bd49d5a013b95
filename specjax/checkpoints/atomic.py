"""Folders that are there whole or not at all."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def made(folder: Path) -> Iterator[Path]:
    """A path beside ``folder`` to fill; it becomes ``folder`` when the block ends without an error, and is removed
    otherwise. What was there before is put aside first and removed last."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temp = folder.with_name(f".{folder.name}.saving-{os.getpid()}")
    shutil.rmtree(temp, ignore_errors=True)
    try:
        yield temp
        replace(temp, folder)
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def replace(temp: Path, folder: Path) -> None:
    """Rename ``temp`` to ``folder``; an older one comes back if that fails."""
    old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        folder.rename(old)
    try:
        temp.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)
