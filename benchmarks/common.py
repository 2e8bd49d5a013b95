"""What every result file says about where and how it was measured."""

import argparse
import datetime
import json
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "torch", "transformers", "speculators")


def facts(args: argparse.Namespace) -> dict[str, Any]:
    """Date, commit, device, versions and the command's options."""
    import jax

    device = jax.devices()[0]
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "device": cpu_name() if device.platform == "cpu" else device.device_kind,
        "versions": versions,
        "options": {key: str(value) for key, value in vars(args).items()},
    }


def write(path: Path | None, args: argparse.Namespace, results: Any) -> None:
    """One JSON file: the facts and the results. Nothing without a path."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts(args) | {"results": results}, indent=1) + "\n")


def difference(params: Any, prompt: list[int], a: list[int], b: list[int]) -> dict[str, Any] | None:
    """Where two texts of one length part, and the float32 logit gap of the two candidates there; None = nowhere."""
    from specjax.identity import prefix_logits

    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
    if at is None:
        return None
    logits = prefix_logits(params, prompt + a[:at])
    return {"position": at, "gap": float(abs(logits[a[at]] - logits[b[at]]))}


def commit() -> str:
    """Short hash of the code that runs, with a mark when files differ from it."""
    ask = lambda *words: subprocess.run(["git", *words], capture_output=True, text=True).stdout.strip()  # noqa: E731
    return ask("rev-parse", "--short", "HEAD") + ("+changes" if ask("status", "--short", "-uno") else "")


def cpu_name() -> str:
    """Model name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), platform.processor()
    )
