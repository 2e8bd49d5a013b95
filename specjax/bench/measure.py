"""One setting of one drafter, measured beside plain decoding of the same prompts in the same run.

Order of a measurement: compile and warm up both sides; then, ``repeats`` times over all batches, both sides of a batch
one after the other, the first one in turn; then rounds alone (:mod:`specjax.bench.alone`).
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from specjax import calls, identity, metrics
from specjax.bench import alone, rows
from specjax.bench.about import identity_of, memory_of, notes_of, rule_of
from specjax.bench.facts import facts
from specjax.bench.rows import Row, Spread, Timed, quartiles
from specjax.bench.setting import Batches, Setting, batches
from specjax.calls import Call
from specjax.config import positive
from specjax.metrics import Stats
from specjax.progress import line
from specjax.results import Completion
from specjax.types import Params

#: Tokens per prompt of the warm-up.
WARM = 32
#: Batches whose rounds are timed alone: where every round does the same work, and where the text decides how much.
ALONE, ALONE_MIXED = 4, 8
#: Batches that are decoded plainly again, at least (all of them, where there are fewer).
SAMPLED = 4


@dataclasses.dataclass(frozen=True)
class Plain:
    """Plain decoding of prompts: what it answered, and the times it took when it did."""

    checksum: str
    setting: Setting
    answers: list[list[Completion]]  # [batch][prompt]
    timed: list[Timed]
    compile_seconds: float = 0.0

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return rows.speed(self.timed)


def measure(
    params: Params,
    prompts: Any,
    k: int | str | None = None,
    batch: int = 1,
    max_new_tokens: int = 128,
    *,
    temperature: float = 0.0,
    rule: str | None = None,
    repeats: int = 1,
    seed: int = 0,
    ignore_eos: bool = False,
    chat_template: bool | str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    max_len: int | None = None,
    prefill_chunk: int | None = None,
    kernels: str | None = None,
    sampling: Mapping[str, Any] | None = None,
    parts: bool = True,
    plain: Plain | None = None,
    plain_every: int = 1,
    compile_seconds: float = 0.0,
    method: str | None = None,
    drafter: str | None = None,
    dataset: str = "prompts",
    notes: Sequence[str] = (),
    verbose: bool | None = None,
) -> Row:
    """Measure one setting.

    Args:
        params: a target with a drafter, from :func:`specjax.load`.
        prompts: as :func:`specjax.decode` takes them.
        k: drafts per round; default the drafter's own. For "auto" rounds alone are not timed: they differ.
        batch: prompts decoded together; those behind the last whole batch are left out.
        max_new_tokens, temperature, rule, seed, ignore_eos, chat_template, chat_template_kwargs, max_len,
            prefill_chunk, kernels: as in :func:`specjax.decode`; by default all prompts share one buffer length and one
            prefill width. ``sampling``: further sampling options.
        repeats: times that every batch is decoded by both sides.
        parts: time verification and drafting alone, which compiles a program for each.
        plain: answers of an earlier call of :func:`plain_answers` on the same prompts and setting.
            ``plain_every``: of those, only every so many batches (but at least four) are decoded again, to tell how
            much the machine has changed since.
        compile_seconds: what was spent before this call on compiling for it.
        method, drafter, dataset, notes: what the row says of them, and beside its own notes.

    Raises ValueError for params without a drafter, too few prompts, answers of another setting, or what ``decode``
    refuses.
    """
    began, meta = time.perf_counter(), params.meta
    if meta is None or meta.drafter is None:
        raise ValueError("nothing to measure: params have no drafter (load with drafter=...)")
    setting = Setting(
        batch=batch, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, ignore_eos=ignore_eos,
        chat_template=chat_template, chat_template_kwargs=chat_template_kwargs, max_len=max_len,
        prefill_chunk=prefill_chunk, kernels=kernels, sampling=dict(sampling or {}),
    )  # fmt: skip
    positive("repeats", repeats), positive("plain_every", plain_every)
    made = batches(params, prompts, setting)
    call = calls.plan(params, made.ids[0], **made.options(0, k=k, rule=rule))
    width, name = ("auto" if call.program.auto else call.program.k), method or meta.drafter
    with line(verbose) as say:
        say(f"{name}, k {width}: compiling")
        run = _Run(params, made, {"k": width, "rule": rule}, plain, plain_every, say)
        for _ in range(repeats):
            run.over()
        say(f"{name}, k {width}: rounds alone")
        costs = None if width == "auto" else run.costs(parts)
        row = Row(
            method=name,
            drafter=drafter or meta.drafter,
            dataset=dataset,
            k=width,
            rule=rule_of(call),
            repeats=repeats,
            costs=costs,
            seconds=0.0,
            facts=facts(),
            **_asked(made, call),
            **run.figures(),
            **identity_of(params, run.plain.answers, run.answers, made.setting, rule_of(call)),
            **memory_of(params, call),
        )
    return dataclasses.replace(
        row,
        compile_seconds=row.compile_seconds + compile_seconds,
        seconds=time.perf_counter() - began,
        notes=(*notes, *notes_of(row, made)),
    )


def plain_answers(params: Params, prompts: Any, setting: Setting, verbose: bool | None = None) -> Plain:
    """Plain decoding of prompts, warmed up. ``params`` may have a drafter."""
    target = identity.without_drafter(params)
    made = batches(target, prompts, setting)
    with line(verbose) as say:
        say("plain: compiling")
        compiled = _warm(target, made, {})
        answers = []
        for i in range(len(made.ids)):
            say(f"plain: batch {i + 1} of {len(made.ids)}")
            answers.append(made.answer(target, i))
    timed = [Timed.of([one.stats for one in batch]) for batch in answers]
    return Plain(made.checksum, setting, answers, timed, compiled)


class _Run:
    """Both sides over all batches, again and again."""

    def __init__(
        self, params: Params, made: Batches, more: dict[str, Any], plain: Plain | None, every: int, say: Any
    ):
        self.params, self.target, self.made, self.more = params, identity.without_drafter(params), made, more
        if plain is not None and (plain.checksum, plain.setting) != (made.checksum, made.setting):
            raise ValueError("the plain answers are of other prompts or another setting: make them anew")
        self.say = say
        self.every = 1 if plain is None else max(min(every, len(made.ids) // SAMPLED), 1)
        self.compiled = (_warm(self.target, made, {}), _warm(params, made, more))
        self._plain = plain
        self.answers: list[list[Completion]] = []
        self.timed: list[list[Timed]] = []
        self.plain_timed: list[dict[int, Timed]] = []
        self.plain_made: list[list[Completion]] = []

    @property
    def plain(self) -> Plain:
        """Answers made before, or those of the first repeat."""
        if self._plain is not None:
            return self._plain
        first = [self.plain_timed[0][i] for i in range(len(self.made.ids))]
        return Plain(self.made.checksum, self.made.setting, self.plain_made, first)

    def over(self) -> None:
        """Every batch once."""
        first, turn = not self.timed, len(self.timed)
        self.timed.append([])
        self.plain_timed.append({})
        for i in range(len(self.made.ids)):
            self.say(f"repeat {turn + 1}, batch {i + 1} of {len(self.made.ids)}")
            again = i % self.every == 0
            order = ("plain", "drafted") if (i + turn) % 2 == 0 else ("drafted", "plain")
            for side in order:
                if side == "plain" and again:
                    answers = self.made.answer(self.target, i)
                    self.plain_timed[-1][i] = Timed.of([one.stats for one in answers])
                    if first:
                        self.plain_made.append(answers)
                elif side == "drafted":
                    answers = self.made.answer(self.params, i, **self.more)
                    self.timed[-1].append(Timed.of([one.stats for one in answers]))
                    if first:
                        self.answers.append(answers)

    def costs(self, parts: bool) -> rows.Costs:
        """Rounds alone, on batches spread over all of them."""
        call = calls.plan(self.params, self.made.ids[0], **self.made.options(0, **self.more))
        most = ALONE_MIXED if call.program.widths else ALONE
        count = len(self.made.ids)
        chosen = [self.made.ids[i * count // min(most, count)] for i in range(min(most, count))]
        options = self.made.options(0)
        return alone.costs(
            (self.target, options), (self.params, self.made.options(0, **self.more)), chosen, parts=parts
        )

    def figures(self) -> dict[str, Any]:
        """Fields of a row that follow from times and counters."""
        then = self.plain.timed
        plain = [rows.scaled(then, now) for now in self.plain_timed]
        pairs = list(zip(self.timed, plain, strict=True))
        drafted = [t for turn in self.timed for t in turn]
        plain_all = [t for turn in plain for t in turn]
        each = [
            rows.speed([turn[i] for turn, _ in pairs]) / rows.speed([other[i] for _, other in pairs])
            for i in range(len(then))
        ]
        answers = [one for batch in self.answers for one in batch]
        return {
            "stats": self._stats([one.stats for one in answers]),
            "finished": sum(one.finish_reason == "stop" for one in answers) / len(answers),
            "speed": Spread.of([rows.speed(turn) for turn in self.timed]),
            "plain_speed": Spread.of([rows.speed(turn) for turn in plain]),
            "ratio": Spread.of([rows.speed(a) / rows.speed(b) for a, b in pairs]),
            "decode_ratio": Spread.of([rows.decode_speed(a) / rows.decode_speed(b) for a, b in pairs]),
            "by_prompt": quartiles(each),
            "first_token_ms": 1e3 * quartiles([t.prefill_seconds for t in drafted])[1],
            "plain_first_token_ms": 1e3 * quartiles([t.prefill_seconds for t in plain_all])[1],
            "call_ms": rows.call_ms(drafted),
            "plain_call_ms": rows.call_ms(plain_all),
            "busy": rows.busy(self.timed[0]),
            "plain_busy": rows.busy(then),
            "drift": Spread.of(
                [t.seconds / then[i].seconds for turn in self.plain_timed for i, t in turn.items()]
            ),
            "plain_compile_seconds": self.compiled[0],
            "compile_seconds": self.compiled[1],
        }

    def _stats(self, parts: list[Stats]) -> Stats:
        """Counters of all prompts, with the seconds of their batches: prompts of a batch share the clock."""
        times = self.timed[0]
        return dataclasses.replace(
            metrics.merge(parts),
            prefill_seconds=sum(t.prefill_seconds for t in times),
            decode_seconds=sum(t.decode_seconds for t in times),
            compile_seconds=self.compiled[1],
        )


def _warm(params: Params, made: Batches, more: Mapping[str, Any]) -> float:
    """Compile everything that the batches need and run it once; seconds spent compiling."""
    budget = min(WARM, made.setting.max_new_tokens)
    found = [made.answer(params, i, max_new_tokens=budget, **more) for i in made.widths.values()]
    return sum(answers[0].stats.compile_seconds for answers in found)


def _asked(made: Batches, call: Call) -> dict[str, Any]:
    s = made.setting
    names = ("batch", "temperature", "max_new_tokens", "ignore_eos")
    return {name: getattr(s, name) for name in names} | {
        "checksum": made.checksum,
        "prompts": made.prompts,
        "chat_template": made.template,
        "dtype": call.program.dtype,
        "max_len": made.max_len,
    }
