"""The training loop: batches in, a drafter out; watched, saved and continued."""

import contextlib
import dataclasses
import functools
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from specjax import registry
from specjax.metrics import Stats, merge
from specjax.progress import line
from specjax.train import methods, report, shards
from specjax.train.evaluate import acceptance
from specjax.train.features import check
from specjax.train.saving import Checkpoints
from specjax.train.sources import FeatureSource
from specjax.train.step import Step, TrainState, cast, compiled, start, weights_of
from specjax.train.types import Batch, Metrics, Recipe
from specjax.types import Pair, Params


class TrainingError(ValueError):
    """A run that cannot go on. What was saved before is whole and stays."""


class Data(Protocol):
    """What a run reads. ``Rows`` name the documents of each packed row."""

    #: Plain JSON that tells this data, split and packing from any other.
    identity: dict[str, Any]

    def batches(self, step: int) -> Iterator[tuple[Batch, Any]]:
        """Batches from a step on, without end; the same for the same step, whatever came before."""

    def validation(self) -> Sequence[tuple[Batch, Any]]:
        """Batches that are not trained on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watch:
    """How a run is watched; nothing of it changes what is learned.

    Steps between log rows, evaluations and checkpoints. ``patience``: stop after so many evaluations without a better
    tau. ``seconds``: save and leave after so much time, to be continued. ``k``: drafts per round of evaluations; None:
    the drafter's own.
    """

    log_every: int = 20
    evaluate_every: int = 500
    save_every: int = 500
    patience: int | None = None
    seconds: float | None = None
    k: int | None = None


@dataclasses.dataclass(frozen=True)
class Fitted:
    """The outcome. ``params``: target and trained drafter, of the best evaluation if there was any, else of the last
    step. ``finished`` is False when time ran out or the run was interrupted: fit again with the same folder."""

    params: Params
    step: int
    tau: float | None
    steps: int
    finished: bool
    history: list[dict[str, Any]] = dataclasses.field(repr=False)


def fit(
    params: Params,
    data: Data,
    recipe: Recipe,
    cfg: Any,
    folder: str | Path,
    *,
    weights: Any = None,
    source: Callable[[Any, Any], FeatureSource] | None = None,
    watch: Watch | None = None,
    identity: dict[str, Any] | None = None,
    resume: bool = True,
    devices: Sequence[jax.Device] | None = None,
    verbose: bool | None = None,
) -> Fitted:
    """Train a drafter of config ``cfg`` for the target in ``params``.

    ``weights``: initial values, or None for the method's own. ``source``: opens the source of features for the target's
    weights and the placement of batches; None: they are made inside the step. ``identity``: more facts that a continued
    run must share.
    ``devices``: rows are spread over them (data parallel); None: one device.

    Raises ValueError for a recipe that does not fit, a folder of another run, a damaged checkpoint; TrainingError,
    naming step and tensors, when loss or gradients are not finite; OSError when saving fails. Whatever had been saved
    stays as it was.
    """
    watch = watch or Watch()
    run = _Run(params, recipe, cfg, weights, devices)
    who = {
        "recipe": dataclasses.asdict(recipe),
        "drafter": repr(cfg),
        "target": shards.identity(params.target, run.pair),
    }
    opened = None if source is None else source(run.target, run.spread if run.many else None)
    with line(verbose) as say:
        saved = Checkpoints(Path(folder), who | {"data": data.identity} | (identity or {}), resume)
        with contextlib.closing(saved):
            return _Loop(run, data, opened, watch, saved, say).run()


class _Run:
    """Pair, initial state, and the compiled functions."""

    def __init__(self, params: Params, recipe: Recipe, cfg: Any, weights: Any, devices: Any):
        meta, self.params, self.recipe = params.meta, params, recipe
        self.method = methods.method(recipe.method)
        self.pair = Pair(meta.family, meta.target_cfg, recipe.method, cfg)
        self._check(devices)
        placed = list(devices or jax.devices()[:1])
        auto = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((len(placed),), ("data",), auto, devices=placed)
        self.spread, self.many = jax.NamedSharding(mesh, jax.P("data")), len(placed) > 1
        everywhere = jax.NamedSharding(mesh, jax.P())
        self.target = jax.device_put(cast(params.target, recipe.dtype), everywhere)
        if weights is None:
            lent = registry.target(meta.family).shared(params.target, meta.target_cfg)
            weights = self.method.init(cfg, params.target, lent, jax.random.key(recipe.seed))
        self.state = jax.device_put(start(weights, self.method.frozen(cfg), recipe), everywhere)
        self.step, self.matches = compiled(Step(self.pair, recipe, mesh if self.many else None))

    def _check(self, devices: Any) -> None:
        r, parts = self.recipe, self.recipe.accumulate * len(devices or [0])
        if r.rows % parts:
            raise ValueError(
                f"{r.rows} rows do not divide into {r.accumulate} parts on {len(devices or [0])} device(s)"
            )

    def place(self, batch: Batch) -> Batch:
        """On the devices, rows spread."""
        return jax.device_put(batch, self.spread)

    def trained(self, state: TrainState) -> Params:
        """Target and drafter, ready to decode in the target's own dtype."""
        lent = registry.target(self.pair.family).shared(self.params.target, self.pair.target_cfg)
        meta = dataclasses.replace(
            self.params.meta, drafter=self.pair.drafter, drafter_cfg=self.pair.drafter_cfg, drafter_notes=()
        )
        return Params(self.params.target, jax.device_get(weights_of(state, lent.embed.dtype)), meta)


class _Loop:
    """One call of :func:`fit`."""

    def __init__(self, run: _Run, data: Data, source: Any, watch: Watch, saved: Checkpoints, say: Any):
        self.r, self.data, self.watch, self.saved, self.say = run, data, watch, saved, say
        self.source = source
        if source is not None:
            say(source.plan)
        self.began = time.perf_counter()
        self.pending: list[Metrics] = []
        self.tokens, self.clock, self.compiled = 0, self.began, False
        self.last: dict[str, Any] = {}

    def run(self) -> Fitted:
        """Train to the end, to the time limit or to an interrupt."""
        state, step = self._begin()
        steps, finished = self.r.recipe.steps, True
        self.told = report.Report(self.saved.folder, step, self.say)
        self.history = [row for row in report.read(self.saved.folder) if row["kind"] == "validation"]
        with contextlib.closing(self.told), _interrupts() as interrupted:
            for batch, rows in self.data.batches(step):
                if step >= steps or self._exhausted():
                    break
                state = self._one(state, batch, rows)
                step += 1
                self._watch(state, step)
                if interrupted or self._late():
                    finished = False
                    break
        finished &= step >= steps or self._exhausted()
        return self._end(state, step, finished)

    def _begin(self) -> tuple[TrainState, int]:
        newest = self.saved.newest()
        if newest is None:
            return self.r.state, 0
        self.say(f"continuing from step {newest}")
        return self.saved.load(newest, self.r.state), newest

    def _one(self, state: TrainState, batch: Batch, rows: Any) -> TrainState:
        if not self.compiled:
            check(self.r.pair, batch)
        self.tokens += int((np.asarray(batch.doc) >= 0).sum())
        placed = self.r.place(batch)
        # read on the host: a batch on the device would be waited for
        features = None if self.source is None else self.source.get(rows, batch)
        first = not self.compiled
        if first:
            self.say("compiling the step")
        began = time.perf_counter()
        state, metrics = self.r.step(state, self.r.target, placed, features)
        if first:  # not counted in any speed
            jax.block_until_ready(state.step)
            self.compiled, self.tokens, self.clock = True, 0, time.perf_counter()
            self.told.row("compile", int(state.step), {"seconds": self.clock - began})
        self.pending.append(metrics)
        return state

    def _watch(self, state: TrainState, step: int) -> None:
        w, end = self.watch, step == self.r.recipe.steps
        if step % w.log_every == 0 or end:
            self._log(state, step)
        evaluated = step % w.evaluate_every == 0 or end
        tau = self._evaluate(state, step) if evaluated else None
        if evaluated or step % w.save_every == 0:
            self._healthy(state)
            self.saved.save(state, tau)

    def _log(self, state: TrainState, step: int) -> None:
        total = functools.reduce(lambda a, b: jax.tree.map(lambda x, y: x + y, a, b), self.pending)
        values = report.means(jax.device_get(total))
        self._healthy(state)
        now = time.perf_counter()
        values["tokens_per_second"] = self.tokens / (now - self.clock)
        self.pending, self.tokens, self.clock = [], 0, now
        self.told.row("train", step, values)
        self.last |= values
        self.told.live(step, self.r.recipe.steps, self.last)

    def _healthy(self, state: TrainState) -> None:
        bad = int(state.bad_step)
        if bad < 0:
            return
        flat = jax.tree_util.tree_flatten_with_path(state.masters)[0]
        named = [
            jax.tree_util.keystr(path)
            for (path, _), is_bad in zip(flat, state.bad_leaves, strict=True)
            if is_bad
        ]
        raise TrainingError(
            f"step {bad + 1}: loss or gradients are not finite ({', '.join(named[:8]) or 'the loss alone'}). No "
            f"weight was changed by it; the newest checkpoint is of step {self.saved.newest()}. A lower "
            "learning_rate or clip, or dtype='float32', may help"
        )

    def _evaluate(self, state: TrainState, step: int) -> float | None:
        found: list[Stats] = []
        k = self.watch.k or self.r.pair.drafter_cfg.k
        for batch, _ in self.data.validation():
            got = self.r.matches(state, self.r.target, self.r.place(batch), k)
            found += acceptance(np.asarray(got), batch, self.r.params.meta.eos_ids)
        if not found:
            return None
        values = report.evaluated(merge(found))
        self.told.row("validation", step, values)
        self.history.append({"kind": "validation", "step": step} | values)
        self.last["validation_tau"] = values["tau"]
        self.clock = time.perf_counter()  # speed is that of training alone
        return values["tau"]

    def _exhausted(self) -> bool:
        """No better tau for as long as one is patient."""
        taus = [row["tau"] for row in self.history]
        return (
            self.watch.patience is not None
            and len(taus) - 1 - int(np.argmax([*taus, -1])) >= self.watch.patience
        )

    def _late(self) -> bool:
        return self.watch.seconds is not None and time.perf_counter() - self.began > self.watch.seconds

    def _end(self, state: TrainState, step: int, finished: bool) -> Fitted:
        if self.saved.newest() != step:
            self._healthy(state)
            self.saved.save(state)
        self.saved.wait()
        best = self.saved.best() if finished else None
        if best is not None and best != step:
            state = self.saved.load(best, state)
        tau = next((row["tau"] for row in reversed(self.history) if row["step"] == (best or step)), None)
        return Fitted(self.r.trained(state), best or step, tau, step, finished, self.history)


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
    """A list that is no longer empty once Ctrl-C was pressed; a second time interrupts as ever.

    A step that is under way has given its state away: it is finished before anything is saved.
    """
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return

    def note(number, frame) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)
