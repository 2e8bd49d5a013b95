"""Rows in a folder, so that a sweep that is killed at any point goes on where it was.

A row is one line of a file that only grows: written at once, flushed to disk before anything else begins. What a killed
process left of a line has no line feed at its end and is cut off by the next one.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SETTINGS, ROWS, PLAIN = "settings.json", "rows.jsonl", "plain.jsonl"


class Lines:
    """JSON objects, one a line, by their ``key``. One process at a time.

    Raises ValueError when another process has the file, or when a line in its middle is not what was written.
    """

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise ValueError(
                f"{path} is in use by another process: wait for it, or choose another folder"
            ) from None
        try:
            self.found: dict[str, dict[str, Any]] = self._read()
        except BaseException:
            self.close()
            raise

    def _read(self) -> dict[str, dict[str, Any]]:
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.ftruncate(self._fd, whole)
        found = {}
        for number, line in enumerate(data[:whole].decode("utf-8").split("\n")[:-1], 1):
            try:
                row = json.loads(line)
                found[row["key"]] = row
            except (json.JSONDecodeError, KeyError, TypeError):
                raise ValueError(
                    f"{self.path}:{number} is damaged: remove that line to measure it again"
                ) from None
        return found

    def add(self, key: str, row: Mapping[str, Any]) -> None:
        """Append a row; it is on disk when this returns. ValueError for a key that is there."""
        if key in self.found:
            raise ValueError(f"{self.path} has a row {key!r} already")
        whole = {"key": key} | dict(row)
        left = memoryview((json.dumps(whole) + "\n").encode())
        while left:
            left = left[os.write(self._fd, left) :]
        os.fsync(self._fd)
        self.found[key] = whole

    def close(self) -> None:
        """Let others have the file."""
        with contextlib.suppress(OSError):
            os.close(self._fd)


class Store:
    """A sweep's folder: ``settings.json`` (what all rows share), ``rows.jsonl``, ``plain.jsonl`` (plain answers).

    ``settings``: what must not differ between calls. Raises ValueError, naming what differs.
    """

    def __init__(self, folder: str | Path, settings: Mapping[str, Any]):
        self.folder = Path(folder)
        self.rows = Lines(self.folder / ROWS)
        try:
            self.plain = Lines(self.folder / PLAIN)
            self._settings = self._agreed(json.loads(json.dumps(settings)))
        except BaseException:
            self.close()
            raise

    def _agreed(self, settings: dict[str, Any]) -> dict[str, Any]:
        path = self.folder / SETTINGS
        if not path.is_file():
            self._write(fresh := {"common": settings, "names": {}})
            return fresh
        kept = json.loads(path.read_text("utf-8"))
        before = kept["common"]
        wrong = [
            f"{name} was {before.get(name)!r} and is {settings.get(name)!r}"
            for name in sorted(set(before) | set(settings))
            if before.get(name) != settings.get(name)
        ]
        if wrong:
            raise ValueError(
                f"{self.folder} holds rows of other settings ({'; '.join(wrong)}): choose another folder"
            )
        return kept

    def same(self, kind: str, name: str, what: str) -> None:
        """Note that a name (of a data set, a method) stands for ``what``; ValueError if it stood for something else."""
        key = f"{kind} {name}"
        kept = self._settings["names"].setdefault(key, what)
        if kept != what:
            raise ValueError(
                f"{self.folder}: {key} was {kept} and is {what} now: choose another folder or name"
            )
        self._write(self._settings)

    def _write(self, settings: dict[str, Any]) -> None:
        fresh = self.folder / (SETTINGS + ".tmp")
        fresh.write_text(json.dumps(settings, indent=1) + "\n", "utf-8")
        fresh.replace(self.folder / SETTINGS)

    def close(self) -> None:
        """Let others have the folder."""
        self.rows.close()
        if hasattr(self, "plain"):
            self.plain.close()

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()
