"""The training loop: exact continuation, non-finite steps, best checkpoints, folders that are not ours."""

import dataclasses
import json
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import train_toy as toy

from specjax.train import report, step as steps
from specjax.train.evaluate import acceptance
from specjax.train.saving import Checkpoints
from specjax.train.trainer import TrainingError, Watch, fit
from specjax.train.types import Batch

WATCH = Watch(log_every=1, evaluate_every=6, save_every=4)


@pytest.fixture(scope="module")
def target():
    return toy.target()


def train(target, folder, data=None, watch=WATCH, **changes):
    return fit(
        target, data or toy.Data(), toy.recipe(**changes), toy.Config(), folder, watch=watch, verbose=False
    )


def losses(folder):
    return [row["loss"] for row in report.read(folder) if row["kind"] == "train"]


@pytest.fixture(scope="module")
def whole(target, tmp_path_factory):
    """A run without interruption, and its folder."""
    folder = tmp_path_factory.mktemp("run") / "whole"
    return train(target, folder), folder


def test_learns(whole):
    """Loss falls, the drafter comes out with the target, and what is frozen stays as it was."""
    fitted, folder = whole
    assert fitted.finished
    assert losses(folder)[-1] < 0.8 * losses(folder)[0]
    assert fitted.params.meta.drafter == toy.NAME
    assert np.array_equal(fitted.params.drafter.fixed, np.ones(3))
    assert np.array_equal(fitted.params.drafter.ids, np.arange(4))
    assert fitted.tau == fitted.history[-1]["tau"] > 2


class Stops(toy.Data):
    """Data that ends a run the hard way, or asks it to stop as Ctrl-C does."""

    def __init__(self, at, how):
        super().__init__()
        self.at, self.how = at, how

    def batches(self, step):
        for i, batch in enumerate(super().batches(step), step):
            if i == self.at and self.how == "interrupt":
                os.kill(os.getpid(), signal.SIGINT)
            elif i == self.at:
                raise RuntimeError("killed")
            yield batch


@pytest.mark.parametrize(("at", "how"), [(5, "kill"), (4, "kill"), (7, "interrupt")])
def test_continues_exactly(target, whole, tmp_path, at, how):
    """TRN.2, PEER.19: losses and parameters after a kill or an interrupt are those of a run without."""
    fitted, folder = whole
    if how == "kill":
        with pytest.raises(RuntimeError, match="killed"):
            train(target, tmp_path / "run", Stops(at, how))
    else:
        assert not train(target, tmp_path / "run", Stops(at, how)).finished
    again = train(target, tmp_path / "run")
    assert again.finished
    assert losses(tmp_path / "run") == losses(folder)
    assert all(
        map(np.array_equal, jax.tree.leaves(again.params.drafter), jax.tree.leaves(fitted.params.drafter))
    )
    assert [row["tau"] for row in again.history] == [row["tau"] for row in fitted.history]


def test_a_time_limit_is_a_pause(target, whole, tmp_path):
    """A run that leaves for lack of time says so and is continued."""
    first = train(target, tmp_path / "run", watch=dataclasses.replace(WATCH, seconds=0.0))
    assert (first.finished, first.steps) == (False, 1)
    assert train(target, tmp_path / "run").finished
    assert losses(tmp_path / "run") == losses(whole[1])


def test_a_half_written_checkpoint_is_never_picked_up(target, whole, tmp_path):
    """PEER.20: what a kill leaves of a checkpoint is ignored, and removed."""
    with pytest.raises(RuntimeError):
        train(target, tmp_path / "run", Stops(9, "kill"))
    half = tmp_path / "run" / "checkpoints" / "9.orbax-checkpoint-tmp"
    half.mkdir()
    (half / "junk").write_text("half")
    assert train(target, tmp_path / "run").finished
    assert losses(tmp_path / "run") == losses(whole[1])


def test_another_recipe_is_refused(target, whole):
    """PEER.20: a changed schedule, clip or batch is named, and the folder is left alone."""
    before = sorted(p.name for p in whole[1].rglob("*"))
    with pytest.raises(ValueError, match=r"recipe.clip was 1.0 and is 0.5; recipe.steps was 12 and is 20"):
        train(target, whole[1], steps=20, clip=0.5)
    assert sorted(p.name for p in whole[1].rglob("*")) == before


def test_a_folder_of_something_else_is_refused(target, tmp_path):
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(FileExistsError, match="no training run"):
        train(target, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["letter.txt"]


def test_resume_must_be_wanted(target, whole):
    with pytest.raises(FileExistsError, match="holds a training run"):
        fit(target, toy.Data(), toy.recipe(), toy.Config(), whole[1], resume=False, verbose=False)


def test_a_loss_that_is_not_finite_stops_the_run(target, tmp_path):
    """TRN.1: the step and the tensors are named, and nothing bad is saved as last or best."""
    with pytest.raises(TrainingError, match=r"step \d+: loss or gradients are not finite \(\.bias"):
        train(target, tmp_path / "run", gamma=0.0, steps=40)
    recipe = toy.recipe(gamma=0.0, steps=40)
    like = steps.start(toy.init(None, None, None, jax.random.key(0)), ("fixed",), recipe)
    identity = json.loads((tmp_path / "run" / "run.json").read_text())
    saved = Checkpoints(tmp_path / "run", identity, resume=True)
    for step in {saved.newest(), saved.best()} - {None}:
        state = saved.load(step, like)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.masters))
        assert int(state.bad_step) == -1
    saved.close()


def test_a_bad_step_changes_nothing():
    """TRN.1: neither the bad step nor any later one changes a weight or a moment."""
    recipe = toy.recipe(gamma=0.0)
    state = steps.start(toy.init(None, None, None, jax.random.key(0)), ("fixed",), recipe)
    state = state.replace(masters=state.masters.replace(table=jnp.full((toy.VOCAB, toy.VOCAB), 0.9)))
    target = toy.target()
    step = steps.Step(
        dataclasses.replace(target.meta.pair, drafter=toy.NAME, drafter_cfg=toy.Config()), recipe
    )
    features = steps.Features(jnp.zeros((4, 16, 1)), {})
    batch = jax.tree.map(jnp.asarray, toy.Data().batch(0))
    after, _ = jax.jit(step)(state, target.target, batch, features)
    again, _ = jax.jit(step)(after, target.target, batch, features)
    assert int(again.bad_step) == 0
    assert int(again.step) == 2
    same = jax.tree.map(np.array_equal, (again.masters, again.optimiser), (state.masters, state.optimiser))
    assert all(jax.tree.leaves(same))


def test_accumulation_is_a_mean():
    """Two parts of one batch give the step of the whole when each weighs the same."""
    target = toy.target()
    pair = dataclasses.replace(target.meta.pair, drafter=toy.NAME, drafter_cfg=toy.Config())
    batch, features = (
        jax.tree.map(jnp.asarray, toy.Data().batch(0)),
        steps.Features(jnp.zeros((4, 16, 1)), {}),
    )
    found = []
    for parts in (1, 2):
        recipe = toy.recipe(accumulate=parts)
        state = steps.start(toy.init(None, None, None, jax.random.key(0)), ("fixed",), recipe)
        after, metrics = jax.jit(steps.Step(pair, recipe))(state, target.target, batch, features)
        found.append((after.masters, {n: m for n, m in metrics.items() if n != "gradient_norm"}))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), *found)


def test_early_stop_keeps_the_best(target, tmp_path):
    """PEER.19: without a better tau for long enough the run ends, with the best weights there were."""
    watch = dataclasses.replace(WATCH, evaluate_every=2, patience=2)
    fitted = train(target, tmp_path / "run", watch=watch, steps=60)
    taus = {row["step"]: row["tau"] for row in fitted.history}
    assert fitted.finished
    assert fitted.steps < 60
    assert fitted.tau == max(taus.values())
    assert fitted.step == max(s for s, tau in taus.items() if tau == fitted.tau)


def test_a_full_disk_is_told(target, tmp_path, monkeypatch):
    """A checkpoint that cannot be written ends the run with what was written before."""
    real = Checkpoints.save

    def save(self, state, tau=None):
        if int(state.step) == 8:
            raise OSError(28, "No space left on device")
        real(self, state, tau)

    monkeypatch.setattr(Checkpoints, "save", save)
    with pytest.raises(OSError, match="No space left"):
        train(target, tmp_path / "run")
    monkeypatch.undo()
    assert train(target, tmp_path / "run").finished


def test_rows_must_divide(target, tmp_path):
    with pytest.raises(ValueError, match="4 rows do not divide into 3 parts"):
        train(target, tmp_path / "run", accumulate=3)
    assert not (tmp_path / "run").exists()


def test_acceptance_of_a_trace():
    """MET: rounds of two answers by hand; one is cut by its budget, one stops."""
    doc = np.array([[0] * 8 + [1] * 6 + [-1] * 2], np.int32)
    trained = np.array([[0, 0, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0, 0]], bool)
    tokens = np.where(doc >= 0, 5, 0).astype(np.int32)
    tokens[0, 13] = 1  # the second answer ends in a stop token
    right = np.zeros((1, 16, 3), bool)
    right[0, 2] = [True, True, False]  # 2 kept, one more: anchor 5
    right[0, 5] = [False, True, True]  # none kept: anchor 6, one token left, nothing proposed
    right[0, 9] = [True, True, True]  # 3 kept and one more: anchor 13, the end
    found = acceptance(right, Batch(tokens, doc, np.zeros_like(doc), trained), stop_ids=[1])
    cut, stopped = found
    assert (cut.rounds, cut.emitted, cut.accepted, cut.proposed) == (3, 5, 2, 3 + 1 + 0)
    assert (stopped.rounds, stopped.emitted, stopped.accepted, stopped.proposed) == (1, 4, 3, 3)
    assert cut.new_tokens == 6
