"""``specjax.sweep``: methods x data sets x N (x batch x temperature), a row at a time, to be resumed at will.

Rows follow one another so that little is compiled and loaded: methods go round slowest, data sets, which share buffer
and prefill width, hence programs, fastest. Plain decoding answers a data set once, right before the first row that
needs it; every row decodes some of its batches again, in turn with its own, which says how much slower or faster the
machine is by then.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax import calls
from specjax.bench import ahead, measure as measuring
from specjax.bench.ahead import compile_ahead
from specjax.bench.answers import kept, restored
from specjax.bench.contenders import Contender, check_platform, contenders, digest, target_of
from specjax.bench.data import Dataset, dataset as _dataset, not_longer
from specjax.bench.facts import facts
from specjax.bench.measure import Plain
from specjax.bench.rows import Row
from specjax.bench.run import values
from specjax.bench.setting import PREFILL, Batches, Setting, batches, lengths, longer
from specjax.bench.store import Store
from specjax.bench.table import Table
from specjax.config import positive, prefill_bucket, token_bucket
from specjax.core.platform import enable_compilation_cache
from specjax.progress import line
from specjax.types import Params

BEST = "best"


@dataclasses.dataclass(frozen=True)
class Task:
    """One row to measure. ``k`` may be "best" or "auto"."""

    method: str
    dataset: str
    k: int | str
    batch: int
    temperature: float
    repeats: int

    @property
    def key(self) -> str:
        again = "" if self.repeats == 1 else f" x{self.repeats}"
        return f"{self.method} {self.dataset} k={self.k} batch={self.batch} t={self.temperature:g}{again}"


def sweep(
    target: Params | str | Path,
    methods: Any = None,
    datasets: Any = ("builtin",),
    *,
    out: str | Path,
    k: Any = (1, 3, 5, 7),
    batch: Any = 1,
    temperature: Any = 0.0,
    limit: int | None = None,
    max_prompt_tokens: int | None = None,
    max_new_tokens: int = 128,
    max_len: int | None = None,
    repeats: int = 1,
    best_repeats: int = 1,
    plain_every: int = 4,
    seconds: float | None = None,
    compile_threads: int | None = None,
    dtype: Any = "auto",
    platform: str | None = None,
    parts: bool = True,
    plots: bool = True,
    done: Callable[[Table, Row], None] | None = None,
    verbose: bool | None = None,
    **options: Any,
) -> Table:
    """See :func:`specjax.sweep`."""
    check_platform(platform)
    sets = [_dataset(one, limit) for one in _listed(datasets)]
    if len({one.name for one in sets}) < len(sets):
        raise ValueError("data sets must have different names: give names as NAME=FILE.jsonl")
    enable_compilation_cache()
    params = _target(target, dtype)
    sizes = {one.name: lengths(params, list(one.prompts), options) for one in sets}
    sets = [not_longer(one, max_prompt_tokens, sizes[one.name]) for one in sets]
    sweeping = Sweep(
        params, contenders(params, methods), sets, Path(out), max_new_tokens, max_len, plain_every, parts, options,
        plots, done, {one.name: longer(one.left_out, max_prompt_tokens) for one in sets},
    )  # fmt: skip
    sweeping.at_once = (
        ahead.threads() if compile_threads is None else positive("compile_threads", compile_threads)
    )
    tasks = list(_tasks(sweeping, k, batch, temperature, positive("repeats", repeats)))
    with sweeping.opened(), line(verbose) as say:
        finished = sweeping.over(tasks, seconds, say)
        if finished and positive("best_repeats", best_repeats) > repeats:
            finished = sweeping.over(list(sweeping.best_tasks(tasks, best_repeats)), seconds, say)
        return sweeping.table(finished)


def _target(target: Params | str | Path, dtype: Any) -> Params:
    from specjax.api import load

    return target_of(target if isinstance(target, Params) else load(target, dtype=dtype))


def _listed(given: Any) -> list[Any]:
    one = isinstance(given, str | Path | Dataset)
    return [given] if one else list(given)


def _tasks(sweeping: "Sweep", k: Any, batch: Any, temperature: Any, repeats: int) -> Iterator[Task]:
    """Rows in the order in which they are measured."""
    for contender in sweeping.contenders:
        for b in values("batch", batch):
            for t in values("temperature", temperature):
                for width in values("k", k):
                    for data in sweeping.sets:
                        yield Task(contender.name, data.name, _width(width), b, float(t), repeats)


def _width(k: Any) -> int | str:
    if k in (BEST, "auto"):
        return k
    if isinstance(k, str):
        raise ValueError(
            f"k takes whole numbers, 'auto' and 'best' (of what the sweep measured so far), got {k!r}"
        )
    return positive("k", k)


@dataclasses.dataclass
class Sweep:
    """A sweep under way. ``measure`` and ``plain_answers`` do the measuring."""

    params: Params
    contenders: Sequence[Contender]
    sets: Sequence[Dataset]
    out: Path
    max_new_tokens: int
    max_len: int | None
    plain_every: int
    parts: bool
    options: Mapping[str, Any]
    plots: bool
    done: Callable[[Table, Row], None] | None
    notes: Mapping[str, Sequence[str]]
    measure: Callable[..., Row] = measuring.measure
    plain_answers: Callable[..., Plain] = measuring.plain_answers
    at_once: int = 1

    def __post_init__(self) -> None:
        self.began, self.longest, self.ahead = time.perf_counter(), 0.0, 0.0
        self._plain: dict[str, Plain] = {}
        self._loaded: tuple[str, Params] | None = None
        self._compiled: dict[tuple[Any, ...], float] = {}  # seconds, by what programs depend on
        self._prepared: set[str] = set()
        sizes = [n for one in self.sets for n in lengths(self.params, list(one.prompts), self.options)]
        self.room = token_bucket(self.max_len or max(sizes) + self.max_new_tokens)
        self.chunk = max(prefill_bucket(min(sizes), PREFILL[1]), PREFILL[0])

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """The folder, locked, with what is there already."""
        told = facts()
        settings = {
            "target": self.params.meta.name,
            "dtype": calls.plan(self.params, [0]).program.dtype,
            "max_new_tokens": self.max_new_tokens,
            "max_len": self.room,
            "options": {name: str(value) for name, value in sorted(self.options.items())},
            "device": told["device"],
            "devices": told["devices"],
            "versions": told["versions"],
        }
        with Store(self.out, settings) as self.store:
            for one in self.sets:
                self.store.same("data set", one.name, f"{len(one.prompts)} prompts, {one.checksum}")
            yield

    def over(self, tasks: Sequence[Task], seconds: float | None, say: Callable[[str], None]) -> bool:
        """Measure what is not there yet. False when time ran out: a row is begun only if the longest one so far would
        still fit."""
        for number, task in enumerate(tasks, 1):
            if task.key in self.store.rows.found:
                continue
            spent, together = time.perf_counter() - self.began, self._together(task, tasks[number - 1 :])
            if seconds is not None and spent + self.longest + (self.ahead if together else 0.0) > seconds:
                return False
            say(f"row {number} of {len(tasks)}: {task.key}")
            if together:
                self._ahead(together)
                self._prepared.add(task.method)
            began = time.perf_counter()
            self._row(task)
            self.longest = max(self.longest, time.perf_counter() - began)
        return True

    def _ahead(self, tasks: Sequence[Task]) -> None:
        """Compile for everything that a method still has to do, side by side."""
        began, params = time.perf_counter(), self._drafter(tasks[0].method)
        asked: dict[Any, tuple[Batches, int]] = {}
        for task in tasks:
            k = self._shape(task)[1]
            if isinstance(k, int) and _impossible(params, k) is None:
                asked.setdefault(self._shape(task), (self._batches(task), k))
        self._compiled |= compile_ahead(params, asked, self.options.get("rule"), self.parts, self.at_once)
        self.ahead = max(self.ahead, time.perf_counter() - began)

    def _together(self, task: Task, tasks: Sequence[Task]) -> list[Task]:
        """Rows of a method to compile for before its first one; none where few processors would only do it in turn."""
        if self.at_once < 2 or task.method in self._prepared:
            return []
        return [t for t in tasks if t.method == task.method and t.key not in self.store.rows.found]

    def _shape(self, task: Task) -> tuple[str, int | str, int, float]:
        """What the programs of a row depend on; k stays "best" while nothing is known of it."""
        row = self.table(False).best(task.method, task.dataset) if task.k == BEST else None
        return (task.method, task.k if row is None else row.k, task.batch, task.temperature)

    def _row(self, task: Task) -> None:
        """Measure one row and keep it."""
        params, k = self._drafter(task.method), self._k(task)
        if why := _impossible(params, k):
            self.store.rows.add(task.key, {"skipped": why})
            return
        contender = next(one for one in self.contenders if one.name == task.method)
        setting = self._setting(task)
        row = self.measure(
            params, self._prompts(task), k, **setting, repeats=task.repeats, parts=self.parts,
            compile_seconds=self._spent(task),
            plain=self._answers(task, setting), plain_every=self.plain_every, method=task.method,
            drafter=contender.drafter, dataset=task.dataset,
            notes=self.notes.get(task.dataset, ()), **self._more(),
        )  # fmt: skip
        self.store.rows.add(task.key, row.as_dict())
        table = self.table(False)
        table.write(self.out, plots=False)
        if self.done is not None:
            self.done(table, row)

    def _spent(self, task: Task) -> float:
        """Seconds that compiling ahead took for a row: told by the first row that needs the programs."""
        return self._compiled.pop(self._shape(task), 0.0)

    def _more(self) -> dict[str, Any]:
        return {name: value for name, value in self.options.items() if name not in _SETTING}

    def _setting(self, task: Task) -> dict[str, Any]:
        shared = {name: value for name, value in self.options.items() if name in _SETTING}
        return {
            "batch": task.batch,
            "temperature": task.temperature,
            "max_new_tokens": self.max_new_tokens,
            "max_len": self.room,
            "prefill_chunk": self.chunk,
        } | shared

    def _prompts(self, task: Task) -> list[Any]:
        return list(next(one for one in self.sets if one.name == task.dataset).prompts)

    def _batches(self, task: Task) -> Batches:
        return batches(self.params, self._prompts(task), Setting(**self._setting(task)))

    def _drafter(self, name: str) -> Params:
        """Params with a drafter; the one before is let go."""
        if self._loaded is None or self._loaded[0] != name:
            self._loaded = None
            params = next(one for one in self.contenders if one.name == name).load()
            self.store.same("method", name, digest(params))
            self._loaded = (name, params)
        return self._loaded[1]

    def _k(self, task: Task) -> int | str:
        if task.k != BEST:
            return task.k
        row = self.table(False).best(task.method, task.dataset)
        if row is None:
            raise ValueError(
                f"k='best': {self.out} has no row of {task.method} on {task.dataset} at batch 1 and temperature 0; "
                "sweep k there first"
            )
        return row.k

    def _answers(self, task: Task, setting: Mapping[str, Any]) -> Plain:
        """Plain answers to the prompts of a task: kept, or made now."""
        key = f"{task.dataset} batch={task.batch} t={task.temperature:g}"
        if key not in self._plain:
            wanted = Setting(**setting)
            made = self._batches(task)
            said = self.store.plain.found.get(key)
            if said is None:
                plain = self.plain_answers(self.params, self._prompts(task), wanted)
                self.store.plain.add(key, kept(plain))
            else:
                plain = restored(said, wanted, made.ids)
            self._plain[key] = plain
        return self._plain[key]

    def best_tasks(self, tasks: Sequence[Task], repeats: int) -> Iterator[Task]:
        """The best N of every method and data set once more, with more repeats."""
        table = self.table(True)
        for task in dict.fromkeys(dataclasses.replace(t, k=BEST, repeats=repeats) for t in tasks):
            row = table.best(task.method, task.dataset, task.batch, task.temperature)
            if row is not None:
                yield dataclasses.replace(task, k=row.k)

    def table(self, finished: bool) -> Table:
        """Rows so far; with everything done, written with plots."""
        found = self.store.rows.found
        rows = tuple(Row.from_dict(row) for row in found.values() if "skipped" not in row)
        skipped = {key: row["skipped"] for key, row in found.items() if "skipped" in row}
        table = Table(rows, skipped, finished)
        if finished:
            table.write(self.out, self.plots)
        return table


def _impossible(params: Params, k: int | str) -> str | None:
    """Why a drafter cannot draft so many: it has a limit."""
    try:
        calls.width(params.meta, k)
    except ValueError as error:
        return str(error)
    return None


_SETTING = (
    "seed",
    "ignore_eos",
    "chat_template",
    "chat_template_kwargs",
    "prefill_chunk",
    "kernels",
    "sampling",
)
