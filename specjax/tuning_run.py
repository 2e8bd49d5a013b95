"""Tuning on the machine at hand: drafters loaded onto the target, prompts decoded, the choice kept in the params."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from specjax import calls, metrics, registry
from specjax.bench.contenders import Contender, contenders, target_of
from specjax.bench.data import dataset as _dataset
from specjax.bench.rows import Timed
from specjax.bench.setting import Batches, Setting, batches
from specjax.config import positive
from specjax.core.platform import enable_compilation_cache
from specjax.progress import line
from specjax.tuning import Found, Reading, search
from specjax.types import Params

#: Tokens per prompt of a first run, which compiles and is not timed.
WARM = 16


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Outcome of :func:`specjax.tune`. ``params``: the target with the drafter chosen (none, where plain decoding is
    faster) and ``meta.defaults`` set; ``found``: per number of rows the choice and what it rests on. Prints as a
    report."""

    params: Params
    found: tuple[Found, ...]

    @property
    def best(self) -> Found:
        """The choice that ``params`` hold."""
        return max(self.found, key=lambda one: one.speed)

    @property
    def method(self) -> str | None:
        return self.best.method

    @property
    def k(self) -> int:
        return self.best.k

    @property
    def rows(self) -> int:
        return self.best.rows

    def __str__(self) -> str:
        chosen = f"{self.method}, k {self.k}" if self.method else "plain decoding"
        head = f"{chosen}, rows {self.rows}: {self.best.ratio:.2f} x plain, {self.best.speed:.1f} tokens/s"
        return "\n".join([head, *map(str, self.found)])

    __repr__ = __str__


def tune(
    params: Params | Sequence[Params],
    prompts: Any = "builtin",
    *,
    methods: Any = None,
    rows: int | Sequence[int] = 1,
    limit: int | None = None,
    max_new_tokens: int = 96,
    rule: str | None = None,
    verbose: bool | None = None,
    **options: Any,
) -> Tuning:
    """Choose drafter, drafts per round and rows for prompts like these, with a fifth of a sweep's runs.

    A few prompts are decoded once per drafter, at its widest: how often drafts survive there gives the tokens of a
    round for every N. The best N of the best drafters are tried, and what is left is decoded in turn with plain
    decoding on more prompts.

    Args:
        params: from :func:`specjax.load`: a target with a drafter, or several with one target. Of a target alone,
            "ngram" and the drafters that come with the package are tried.
        prompts: as in :func:`specjax.bench`: a data set's name, a file of JSON lines, or prompts. Sixteen do.
        methods: other drafters for the target, as in :func:`specjax.bench`.
        rows: prompts decoded together; of several numbers the one with the most tokens per second is chosen.
        limit: the first so many prompts.
        max_new_tokens: tokens per answer.
        rule, and in ``options`` temperature, sampling, seed, ignore_eos, max_len, prefill_chunk, kernels,
            chat_template, chat_template_kwargs: as in :func:`specjax.bench`.
        verbose: progress, as in :func:`specjax.decode`.

    Returns:
        :class:`Tuning`. Its ``params`` have ``k`` and ``rows`` as defaults of calls that name neither, which
        :func:`specjax.save` keeps; it prints as a report of what was measured and why it chose.

    Raises:
        ValueError: unknown data set or method, too few prompts for ``rows``, an option that :func:`specjax.decode`
            refuses.

    Example:
        >>> tuned = specjax.tune(specjax.load("smollm2-135m"), "builtin:code")  # doctest: +SKIP
        >>> print(tuned)  # doctest: +SKIP
        >>> specjax.decode(tuned.params, "def fibonacci(n):")  # doctest: +SKIP
    """
    data, target = _dataset(prompts, limit), target_of(params)
    if methods is None:
        listed = [params] if isinstance(params, Params) else list(params)
        methods = [one for one in listed if one.meta.drafter is not None] or None
    numbers = [rows] if isinstance(rows, int) else list(rows)
    for number in numbers:
        positive("rows", number)
    settings = [Setting(batch=n, max_new_tokens=max_new_tokens, **options) for n in numbers]
    made = [batches(target, data.prompts, setting) for setting in settings]
    enable_compilation_cache()
    lab = _Lab(target, contenders(target, methods), rule)
    found: list[Found] = []
    with line(verbose) as lab.say:
        for batch in made:
            lab.made = batch
            known = {name: lab.limits(name) for name in _left(lab, found)}
            found.append(search(known, len(batch.ids), lab.read, batch.setting.batch))
    best = max(found, key=lambda one: one.speed)
    chosen = target if best.method is None else lab.loaded[best.method]
    own: dict[str, Any] = {"rows": best.rows} | ({"k": best.k} if best.method else {})
    meta = dataclasses.replace(chosen.meta, defaults=tuple(sorted(own.items())))
    return Tuning(dataclasses.replace(chosen, meta=meta), tuple(found))


def _left(lab: "_Lab", found: Sequence[Found]) -> list[str]:
    """Methods to look at: all, and for further numbers of rows the two that were best before."""
    if not found:
        return list(lab.contenders)
    last = sorted(found[-1].tried, key=lambda one: -max([one.predicted(one.best), *one.verified.values()]))
    return [one.method for one in last[:2]]


class _Lab:
    """Loads drafters when they are first asked for, and decodes."""

    def __init__(self, target: Params, given: Sequence[Contender], rule: str | None):
        self.target, self.rule = target, rule
        self.contenders = {one.name: one for one in given}
        self.loaded: dict[str, Params] = {}
        self.made: Batches
        self.say: Any = None
        self._warm: set[Any] = set()

    def params(self, method: str | None) -> Params:
        if method is None:
            return self.target
        if method not in self.loaded:
            self.say(f"{method}: loading")
            self.loaded[method] = self.contenders[method].load()
        return self.loaded[method]

    def limits(self, method: str) -> tuple[int, int]:
        """Own and widest drafts per round."""
        meta = self.params(method).meta
        most = getattr(registry.drafter(str(meta.drafter)), "max_k", None)
        own, widest = meta.drafter_cfg.k, calls.widest(meta)
        return (own if most is None else min(own, most(meta.drafter_cfg))), widest

    def read(self, method: str | None, k: int, sample: Sequence[int]) -> Reading:
        """Decode batches of prompts, after a short run that compiles."""
        params, made = self.params(method), self.made
        more: dict[str, Any] = {} if method is None else {"k": k, "rule": self.rule}
        for width, batch in made.widths.items():
            if (method, k, made.setting.batch, width) not in self._warm:
                self.say(f"{method or 'plain'}, N {k}: compiling")
                made.answer(params, batch, max_new_tokens=min(WARM, made.setting.max_new_tokens), **more)
                self._warm.add((method, k, made.setting.batch, width))
        answers: list[list[metrics.Stats]] = []
        for i in sample:
            self.say(f"{method or 'plain'}, N {k}: prompt {len(answers) + 1} of {len(sample)}")
            answers.append([one.stats for one in made.answer(params, i, **more)])
        timed = [Timed.of(batch) for batch in answers]
        stats = metrics.merge([one for batch in answers for one in batch])
        seconds, turns = sum(t.decode_seconds for t in timed), sum(max(t.rounds) for t in timed)
        return Reading(
            rounds=stats.rounds,
            kept=stats.accepted_at + (0,) * (k - len(stats.accepted_at)),
            round_seconds=seconds / max(turns, 1),
            speed=sum(t.emitted for t in timed) / max(seconds, 1e-9),
        )
