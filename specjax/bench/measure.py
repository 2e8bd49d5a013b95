"""One setting of one drafter, measured beside plain decoding of the same prompts in the same run.

Order of a measurement: compile and warm up both sides; then, ``repeats`` times over all batches, both sides of a batch
one after the other, the first one in turn; then rounds alone (:mod:`specjax.bench.alone`).
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from specjax import calls, identity, metrics
from specjax.bench import alone, rows
from specjax.bench.facts import facts, peak_bytes
from specjax.bench.rows import Row, Spread, Timed, quartiles
from specjax.bench.setting import Batches, Setting, batches
from specjax.calls import Call
from specjax.config import positive
from specjax.core import round as rnd
from specjax.core.loop import host_state
from specjax.core.programs import fill_caches
from specjax.metrics import Stats
from specjax.progress import line
from specjax.results import Completion
from specjax.types import Params, tree_bytes

#: Tokens per prompt of the warm-up.
WARM = 32
#: Batches whose rounds are timed alone: where every round does the same work, and where the text decides how much.
ALONE, ALONE_MIXED = 4, 8
#: Differing prompts whose logit gap is looked at.
LOOKED_AT = 8


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
    method: str | None = None,
    drafter: str | None = None,
    dataset: str = "prompts",
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
            ``plain_every``: of those, only every so many batches are decoded again, to tell how much the machine has
            changed since.
        method, drafter, dataset: what the row says of them.

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
    width, name = ("auto" if k == "auto" else call.program.k), method or meta.drafter
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
            rule=_rule(call),
            repeats=repeats,
            costs=costs,
            seconds=0.0,
            facts=facts(),
            **_asked(made, call),
            **run.figures(),
            **_identity(params, run.plain.answers, run.answers, made.setting, _rule(call)),
            **_memory(params, call),
        )
    notes = tuple(_notes(row, made))
    return dataclasses.replace(row, seconds=time.perf_counter() - began, notes=notes)


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
        self.say, self.every = say, every if plain is not None else 1
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
        seconds = [sum(t.seconds for t in turn.values()) for turn in self.plain_timed]
        before = [sum(then[i].seconds for i in turn) for turn in self.plain_timed]
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
            "drift": sum(seconds) / sum(before),
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
    found = [made.answer(params, i, max_new_tokens=budget, **more) for i in made.warming()]
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


def _rule(call: Call) -> str:
    """The acceptance rule of a call's rounds."""
    if call.program.rule is not None:
        return call.program.rule
    program, weights = call.program, (call.params.target, call.params.drafter)
    host = host_state(program, [*call.jobs, *[None] * (program.rows - len(call.jobs))])
    ask = lambda w, h: rnd.draft(program.pair, w, fill_caches(program, h), program.k)[0]  # noqa: E731
    return rnd.natural_rule(jax.eval_shape(ask, weights, host))


def _identity(
    params: Params,
    plain: Sequence[Sequence[Completion]],
    drafted: Sequence[Sequence[Completion]],
    setting: Setting,
    rule: str,
) -> dict[str, Any]:
    """Are the answers plain decoding's? Under the rejection rules samples differ, and only greedy ones are compared."""
    pairs = [pair for a, b in zip(plain, drafted, strict=True) for pair in zip(a, b, strict=True)]
    same = sum(a.tokens == b.tokens for a, b in pairs)
    if setting.temperature > 0 and rule != "match":
        return {"checked": "law", "identical": same, "near_ties": 0, "largest_gap": 0.0, "unexplained": 0}
    differing = [(i, a, b) for i, (a, b) in enumerate(pairs) if a.tokens != b.tokens]
    gaps = [identity.compare(params, i, a, b).gap for i, a, b in differing[:LOOKED_AT]]
    known = [gap for gap in gaps if gap is not None]
    return {
        "checked": "match" if setting.temperature > 0 else "greedy",
        "identical": same,
        "near_ties": sum(gap <= identity.NEAR_TIE for gap in known),
        "largest_gap": max(known, default=0.0),
        "unexplained": len(differing) - len(known),
    }


def _memory(params: Params, call: Call) -> dict[str, Any]:
    program = call.program
    host = host_state(program, [*call.jobs, *[None] * (program.rows - len(call.jobs))])
    return {
        "target_bytes": tree_bytes(params.target),
        "drafter_bytes": tree_bytes(params.drafter),
        "state_bytes": tree_bytes(jax.eval_shape(lambda: fill_caches(program, host))),
        "peak_bytes": peak_bytes(),
    }


def _notes(row: Row, made: Batches) -> list[str]:
    """What somebody who quotes the row has to know."""
    notes = []
    if row.ignore_eos:
        notes.append("end-of-text was ignored: part of the text is none that the model would have written")
    if made.given_ids:
        notes.append("prompts were token ids: if they are random, acceptance says nothing")
    if made.left_out:
        notes.append(f"{made.left_out} prompt(s) behind the last whole batch were left out")
    if not row.stats.proposed:
        notes.append("the drafter proposed nothing")
    if row.checked == "law":
        notes.append(
            f"rule {row.rule!r} keeps the distribution, not the ids: identity is checked at temperature 0"
        )
    if row.unexplained:
        notes.append(f"{row.unexplained} differing prompt(s) without a logit gap that was looked at")
    if row.costs is not None and row.gap is not None and abs(row.gap) > 0.1:
        notes.append(
            f"tau / R and the measured speed-up differ by {row.gap:+.0%}; a round took {row.call_ms:.2f} ms in decoding"
            f" and {row.costs.round_ms:.2f} alone, a plain one {row.plain_call_ms:.2f} and {row.costs.plain_ms:.2f}"
        )
    return notes
