"""A training process that is killed without warning, again and again, at any moment."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

TESTS = Path(__file__).resolve().parents[1]
STEPS, KILLS = 40, 3

#: Trains with a checkpoint at every step, slowly enough to be caught while it does, and no further than to the step
#: ``last``, where it waits (0: to the end); prints losses and weights.
SCRIPT = """
import json, sys, time
from pathlib import Path

import jax
import numpy as np
import train_toy as toy

from specjax.train import report
from specjax.train.trainer import Watch, fit

folder, last, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])


class Data(toy.Data):
    def batches(self, step):
        for i, batch in enumerate(super().batches(step), step):
            time.sleep(0.05 if last else 0)
            while last and i >= last:
                time.sleep(1)
            yield batch


fitted = fit(toy.target(), Data(), toy.recipe(steps=steps), toy.Config(), folder, verbose=False,
             watch=Watch(log_every=1, evaluate_every=7, save_every=1))
assert fitted.finished
rows = report.read(folder)
print(json.dumps({
    "losses": [[row["step"], row["loss"]] for row in rows if row["kind"] == "train"],
    "taus": [[row["step"], row["tau"]] for row in rows if row["kind"] == "validation"],
    "weights": [np.asarray(x, np.float64).ravel().tolist() for x in jax.tree.leaves(fitted.params.drafter)],
    "step": fitted.step,
}))
"""


def begun(folder: Path, last: int = 0) -> subprocess.Popen:
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-c", SCRIPT, str(folder), str(last), str(STEPS)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen) -> dict:
    out, err = process.communicate()
    assert process.returncode == 0, err[-4000:]
    return json.loads(out.splitlines()[-1])


def rows(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


@pytest.mark.long
def test_killed_at_any_moment(tmp_path):
    """TRN.2, PEER.20: figures and weights are bit for bit those of a run that was let be, and the best step too."""
    whole = ended(begun(tmp_path / "whole"))
    chance, killed = random.Random(0), 0
    while killed < KILLS:
        before = rows(tmp_path / "run")
        process = begun(tmp_path / "run", (killed + 1) * STEPS // (KILLS + 1))
        while rows(tmp_path / "run") <= before and process.poll() is None:
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.4))
        process.kill()
        said = process.communicate()[1]
        assert process.returncode == -signal.SIGKILL, f"it failed before it could be killed: {said[-4000:]}"
        killed += 1
    again = ended(begun(tmp_path / "run"))
    assert [step for step, _ in whole["losses"]] == list(range(1, STEPS + 1))
    for name in ("losses", "taus", "step"):
        assert again[name] == whole[name]
    assert all(map(np.array_equal, again["weights"], whole["weights"]))
