"""Where and with what something is measured."""

import functools
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

import specjax

PACKAGES = ("jax", "jaxlib", "numpy")


@functools.cache
def facts() -> dict[str, Any]:
    """Device, number of devices or processors, versions, and the commit where the package lies in a checkout."""
    device = jax.devices()[0]
    cpu = device.platform == "cpu"
    versions = {"specjax": specjax.__version__, "python": platform.python_version()}
    return {
        "device": cpu_name() if cpu else device.device_kind,
        "devices": len(_affinity()) if cpu else len(jax.devices()),
        "versions": versions | {name: metadata.version(name) for name in PACKAGES},
        "commit": commit(),
    }


def commit() -> str | None:
    """Short hash of the checkout that runs, with "+changes" where tracked files differ; outside of one, what
    ``SPECJAX_COMMIT`` says, or None."""
    folder = Path(specjax.__file__).parent.parent
    if not (folder / ".git").exists():
        return os.environ.get("SPECJAX_COMMIT")

    def ask(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True
        ).stdout

    try:
        return ask("rev-parse", "--short", "HEAD").strip() + (
            "+changes" if ask("status", "--short", "-uno") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return None


def cpu_name() -> str:
    """Model name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # the file is Linux's
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _affinity() -> Any:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def peak_bytes() -> int | None:
    """Most memory that this process has held on the first device so far; None where the device does not tell."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
