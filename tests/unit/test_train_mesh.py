"""Training over a mesh of devices: what one device learns, and a run that goes on with another number of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

TESTS = Path(__file__).resolve().parents[1]

#: Runs in a process of its own, with two devices of the CPU. Prints losses and weights of every run as JSON.
SCRIPT = """
import json, re, sys
from pathlib import Path

import jax
import numpy as np
import train_toy as toy

from specjax import registry
from specjax.train import methods, report
from specjax.train.sources import Extract, open_source
from specjax.train.trainer import Watch, _Run, fit
from specjax.types import Pair

method, settings, changes, kind, folder, moves = sys.argv[1:]
folder, both = Path(folder), jax.devices()
assert len(both) == 2
params, how = toy.target(), methods.method(method)
cfg = how.config(json.loads(settings), params.meta.target_cfg)
small = {"steps": 6, "rows": 4, "length": 16, "dtype": "float32", "learning_rate": 0.01, "chunks": 2}
recipe = how.recipe(**small | json.loads(changes))


class Data(toy.Data):
    '''Documents are numbered by row; every batch holds the same ones, so that kept features are read.'''

    def __init__(self, stop=None):
        super().__init__()
        self.stop = stop

    def batches(self, step):
        rows = [[row] for row in range(4)]
        while step != self.stop:
            yield self.batch(step if kind == "online" else 0), rows
            step += 1
        raise RuntimeError("stopped")

    def validation(self):
        return [(self.batch(10_000), [])]


def opened(target, sharding):
    bare = Pair(params.meta.family, params.meta.target_cfg)
    extract = Extract(bare, how.needs(cfg), "float32")
    return open_source(kind, extract, target, [14] * 4, sharding=sharding)


def run(name, devices, data=None):
    out = fit(params, data or Data(), recipe, cfg, folder / name, devices=devices, verbose=False,
              source=opened if kind != "online" else None,
              watch=Watch(log_every=1, evaluate_every=6, save_every=3, k=2))
    losses = [row["loss"] for row in report.read(folder / name) if row["kind"] == "train"]
    weights = [np.asarray(x, np.float64).ravel().tolist() for x in jax.tree.leaves(out.params.drafter)]
    return {"losses": losses, "weights": weights, "tau": out.tau}


found = {"one": run("one", both[:1]), "two": run("two", both)}
for name, before, after in (("two, then one", both, both[:1]), ("one, then two", both[:1], both))[: int(moves)]:
    try:
        run(name, before, Data(stop=5))
    except RuntimeError as error:
        assert str(error) == "stopped"
    found[name] = run(name, after)
try:
    run("odd", [*both, both[0]])
except ValueError as error:
    found["odd"] = str(error)
both = _Run(params, recipe, cfg, None, both)
batch = both.place(Data().batch(0))
text = both.step.lower(both.state, both.target, batch, None).compile().as_text()
found["travels"] = re.findall(r"= [^ ]*\\[([0-9,]*)\\][^ ]* (all-gather|all-to-all|collective-permute)\\(", text)
print(json.dumps(found))
"""
BLOCK = {"layers": 1, "drafts": 2, "mask_embedding": True}
CASES = {
    "eagle3": ("eagle3", {"k": 2}, {"unroll": 2}, "online"),
    "eagle3, kept features": ("eagle3", {"k": 2}, {"unroll": 2}, "hybrid"),
    "mtp": ("mtp", {"k": 2}, {"unroll": 2}, "online"),
    "assistant": ("assistant", {"k": 2}, {"unroll": 2}, "online"),
    "dflash, in parts": ("dflash", BLOCK, {"anchors": 8, "accumulate": 2}, "online"),
    "dspark": ("dspark", BLOCK, {"anchors": 8}, "online"),
}  # fmt: skip
#: Changes of the number of devices on the way, which are the trainer's affair: both where features are kept as well.
MOVES = dict.fromkeys(CASES, 1) | {"eagle3, kept features": 2, "dspark": 2, "mtp": 0, "assistant": 0}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_two_devices_learn_what_one_does(tmp_path, case):
    """TRN.2, PEER.20: losses, weights and tau over a mesh of two, and of runs that change the number of devices on the
    way, are those of one device; a number that rows do not divide among is refused."""
    method, settings, changes, kind = CASES[case]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(TESTS)}
    command = [
        sys.executable,
        "-c",
        SCRIPT,
        method,
        json.dumps(settings),
        json.dumps(changes),
        kind,
        str(tmp_path),
        str(MOVES[case]),
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    one = found["one"]
    assert len(one["losses"]) == 6
    assert one["losses"][-1] < one["losses"][0]
    assert len(found) == 4 + MOVES[case]
    for name in ("two", "two, then one", "one, then two")[: 1 + MOVES[case]]:
        np.testing.assert_allclose(found[name]["losses"], one["losses"], rtol=1e-5, err_msg=name)
        assert found[name]["tau"] == one["tau"]
        for mine, wanted in zip(found[name]["weights"], one["weights"], strict=True):
            np.testing.assert_allclose(mine, wanted, atol=2e-3, err_msg=name)
    assert "do not divide" in found["odd"]
    # but for sums, only the draws that choose rows do: one number per token
    assert [kind for shape, kind in found["travels"] if shape.count(",") > 1] == []
