"""Facts about the machine: back end, default dtype, compiler options, compilation cache."""

import contextlib
import hashlib
import os
import platform as host
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

#: Programs that compile faster than this are not worth a file.
CACHE_MIN_SECONDS = 0.5


class DtypeChoice(NamedTuple):
    """What ``dtype="auto"`` stands for on this machine, and why."""

    dtype: jnp.dtype
    reason: str


def backend() -> str:
    """``"cpu"``, ``"cuda"`` or ``"rocm"`` (or the name JAX gives another back end)."""
    name = jax.default_backend()
    if name != "gpu":
        return name
    version = jax.devices()[0].client.platform_version.lower()
    return "rocm" if "rocm" in version or "hip" in version else "cuda"


def default_dtype(name: str | None = None) -> DtypeChoice:
    """Dtype used for ``dtype="auto"`` on back end ``name`` (default: the current one)."""
    if (name or backend()) == "cpu":
        return DtypeChoice(
            jnp.dtype(jnp.float32),
            "float32 on CPU: speculative ids equal plain ids, and single-row bfloat16 products are slow here",
        )
    return DtypeChoice(
        jnp.dtype(jnp.bfloat16),
        "bfloat16 on GPU: half the bytes to read per token; near-ties between two best tokens may flip",
    )


def compiler_options(name: str | None = None) -> dict[str, str]:
    """Options for ``jax.jit(..., compiler_options=)`` on back end ``name`` (default: the current one).

    On ROCm, command buffers are switched off: replaying one that holds a while loop has crashed on some
    devices. ``SPECJAX_COMMAND_BUFFERS=1`` keeps them.
    """
    if (name or backend()) == "rocm" and os.environ.get("SPECJAX_COMMAND_BUFFERS") != "1":
        return {"xla_gpu_enable_command_buffer": ""}
    return {}


def traced_options(name: str | None = None) -> dict[str, str]:
    """The same for a program that is compiled to be profiled: without command buffers on any GPU, since a trace does
    not say which operation a kernel in one belongs to."""
    gpu = (name or backend()) in ("cuda", "rocm")
    return compiler_options(name) | ({"xla_gpu_enable_command_buffer": ""} if gpu else {})


def enable_compilation_cache() -> Path | None:
    """Keep compiled programs between processes; returns the folder in use, or None when off.

    A folder set by the user (``JAX_COMPILATION_CACHE_DIR`` or ``jax.config``) is left alone, and so is a
    cache the user disabled. ``SPECJAX_CACHE=off`` switches it off, ``SPECJAX_CACHE=<folder>`` moves it.
    Calling it again costs nothing.
    """
    configured = jax.config.values["jax_compilation_cache_dir"]
    if configured:
        return Path(configured)
    folder = cache_folder()
    if folder is None or not jax.config.values["jax_enable_compilation_cache"] or not _writable(folder):
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", CACHE_MIN_SECONDS)
    return folder


def cache_folder() -> Path | None:
    """Folder specjax would use for compiled programs; None when ``SPECJAX_CACHE=off``.

    CPU programs are machine code for one processor, so the folder's name carries its features.
    """
    setting = os.environ.get("SPECJAX_CACHE", "")
    if setting.lower() in ("off", "0", "false", "none"):
        return None
    if setting:
        base = Path(setting).expanduser()
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "specjax"
    return base / "xla" / f"jaxlib-{jax.lib.__version__}-{_processor()}"


def _processor() -> str:
    text = host.machine() + host.processor()
    with contextlib.suppress(OSError):  # the file is Linux's
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        text += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{host.machine() or 'cpu'}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)
