"""What a training run tells: a live line, ``metrics.jsonl``, and TensorBoard events where tensorboardX is installed."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specjax.metrics import Stats
from specjax.train.types import Metrics


def means(metrics: Metrics) -> dict[str, float]:
    """Quotients of summed metrics; ``expected_tau`` follows from the accuracies per draft position."""
    host = {name: (float(total), float(weight)) for name, (total, weight) in metrics.items()}
    found = {name: total / weight if weight else 0.0 for name, (total, weight) in host.items()}
    accuracies = [found[f"accuracy_{i}"] for i in range(len(found)) if f"accuracy_{i}" in found]
    if accuracies:
        found["expected_tau"] = 1.0 + float(np.sum(np.cumprod(accuracies)))
    return found


def evaluated(stats: Stats) -> dict[str, Any]:
    """What is kept of an evaluation."""
    return {
        "tau": stats.tau,
        "rounds": stats.rounds,
        "acceptance_rate": stats.acceptance_rate,
        "accepted_per_position": list(stats.accepted_per_position),
        "conditional_per_position": list(stats.conditional_per_position),
    }


class Report:
    """Writer of a run's figures. Rows of steps that a resumed run does again are dropped from the file first."""

    def __init__(self, folder: Path, step: int, say: Any):
        self._path, self._say, self._began = folder / "metrics.jsonl", say, time.perf_counter()
        _keep_before(self._path, step)
        self._events = _events(folder / "events", say)

    def row(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """One row: ``kind`` is "train", "validation" or "compile"."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, "step": step} | dict(values)) + "\n")
        if self._events is not None:
            for name, value in values.items():
                listed = value if isinstance(value, list) else [value]
                for i, one in enumerate(listed):
                    tag = f"{kind}/{name}" if not isinstance(value, list) else f"{kind}/{name}/{i + 1}"
                    self._events.add_scalar(tag, one, step)

    def live(self, step: int, steps: int, values: Mapping[str, float]) -> None:
        """The line on the terminal."""
        shown = ("loss", "accuracy_0", "expected_tau", "tokens_per_second", "validation_tau")
        figures = ", ".join(f"{n.replace('_', ' ')} {values[n]:.4g}" for n in shown if n in values)
        spent = time.perf_counter() - self._began
        self._say(f"training: step {step}/{steps}, {figures}, {spent:.0f} s")

    def close(self) -> None:
        """Flush the events."""
        if self._events is not None:
            self._events.close()


def read(folder: Path) -> list[dict[str, Any]]:
    """Rows of ``metrics.jsonl``; a last line that a kill cut off is left out."""
    path = folder / "metrics.jsonl"
    lines = path.read_text("utf-8").split("\n") if path.is_file() else []
    return [json.loads(line) for line in lines[:-1] if line]


def _keep_before(path: Path, step: int) -> None:
    rows = [row for row in read(path.parent) if row["step"] <= step]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    fresh = path.with_suffix(".tmp")
    fresh.write_text(text, "utf-8")
    fresh.replace(path)


def _events(folder: Path, say: Any) -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        say("no TensorBoard events: tensorboardX is not installed (it is in specjax[train])")
        return None
    return SummaryWriter(str(folder))
