"""Checkpoints of a training run: written in the background, whole or not at all, and never mixed up.

A run's folder holds ``checkpoints/<step>/`` (orbax: the training state) and ``run.json`` (what the run is: recipe,
drafter, target, data). A folder is continued only by the same run; whatever differs is named.
"""

import json
import os
from pathlib import Path
from typing import Any

import jax

from specjax.train.step import TrainState

_STATE = "state"
_NEWEST = 2


class Checkpoints:
    """Newest and best checkpoints of one run folder."""

    def __init__(self, folder: Path, identity: dict[str, Any], resume: bool):
        """``identity``: plain JSON that says what the run is. Raises FileExistsError when the folder holds a run and
        ``resume`` is False, ValueError naming every difference when it holds another run."""
        from orbax.checkpoint import v1 as ocp

        self.folder = folder
        _claim(folder, json.loads(json.dumps(identity)), resume)
        policies = ocp.training.preservation_policies
        self._ocp = ocp.training.Checkpointer(
            (folder / "checkpoints").absolute(),
            preservation_policy=policies.AnyPreservationPolicy(
                [
                    policies.LatestN(_NEWEST),
                    policies.BestN(
                        get_metric_fn=lambda m: m["tau"], n=1, keep_checkpoints_without_metrics=False
                    ),
                ]
            ),
            cleanup_tmp_directories=True,
        )

    def save(self, state: TrainState, tau: float | None = None) -> None:
        """Start writing a finite state; ``tau`` of an evaluation makes it a candidate for the best.

        Raises OSError (a full disk ...) with the folder's older checkpoints untouched.
        """
        step, metrics = int(state.step), None if tau is None else {"tau": tau}
        if int(state.bad_step) >= 0:
            raise ValueError(
                f"the state of step {step} is not to be saved: it went bad at {int(state.bad_step)}"
            )
        self.wait()
        self._ocp.save_checkpointables_async(step, {_STATE: _named(state)}, metrics=metrics, overwrite=True)

    def wait(self) -> None:
        """Until nothing is being written; raises what went wrong while it was."""
        self._ocp.wait()

    def newest(self) -> int | None:
        """Step of the newest whole checkpoint."""
        latest = self._ocp.latest
        return None if latest is None else int(latest.step)

    def best(self) -> int | None:
        """Step of the checkpoint with the highest tau, of equal ones the latest; None before the first evaluation."""
        scored = [c for c in self._ocp.checkpoints if c.metrics]
        return int(max(scored, key=lambda c: (c.metrics["tau"], c.step)).step) if scored else None

    def load(self, step: int, like: TrainState) -> TrainState:
        """The state of a step, placed like ``like``. ValueError when it is damaged or of other shapes."""
        shapes = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            for name, x in _named(like).items()
        }
        try:
            read = self._ocp.load_checkpointables(step, {_STATE: shapes})[_STATE]
        except Exception as error:  # orbax raises many kinds
            raise ValueError(f"checkpoint {step} in {self.folder} could not be read: {error}") from error
        return jax.tree.unflatten(jax.tree.structure(like), [read[name] for name in _named(like)])

    def close(self) -> None:
        """Wait, and let go of the folder."""
        self._ocp.close()


def _named(state: TrainState) -> dict[str, jax.Array]:
    """Leaves by their path."""
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path): leaf for path, leaf in flat}


def _claim(folder: Path, identity: dict[str, Any], resume: bool) -> None:
    """Make the folder this run's, or find that it is already."""
    path = folder / "run.json"
    if not path.is_file():
        if folder.exists() and any(folder.iterdir()):
            raise FileExistsError(f"{folder} holds something that is no training run; choose another folder")
        folder.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}.tmp")
        fresh.write_text(json.dumps(identity, indent=1, sort_keys=True), "utf-8")
        fresh.replace(path)
        return
    if not resume:
        raise FileExistsError(f"{folder} holds a training run; resume it, or choose another folder")
    try:
        before = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if different := _differences(before, identity):
        raise ValueError(
            f"{folder} holds another run: {'; '.join(different)}. A run is continued as it was begun; choose another "
            "folder for this one"
        )


def _differences(before: Any, now: Any, where: str = "") -> list[str]:
    """Every leaf in which two JSON values differ, as text."""
    if isinstance(before, dict) and isinstance(now, dict):
        names = sorted(before.keys() | now.keys())
        return [d for n in names for d in _differences(before.get(n), now.get(n), f"{where}.{n}".strip("."))]
    return [] if before == now else [f"{where} was {before!r} and is {now!r}"]
