"""Conversations answered by the loop that serves requests: many rows at once, refilled as they fall free."""

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jinja2
import numpy as np

from specjax import calls, checkpoints, generate, prompts as encoding
from specjax.config import Options, Program, row_bucket, token_bucket
from specjax.core.loop import Job, Queue, host_state, serve
from specjax.core.platform import enable_compilation_cache
from specjax.core.programs import fill_caches
from specjax.progress import Say
from specjax.results import NonFiniteError
from specjax.train.answers import Turn, texts
from specjax.train.prompts import Prompt
from specjax.train.store_files import Document, Writer
from specjax.types import tree_bytes

ROUNDS = 8  # a row that ends waits for the end of its chunk, and for one more, before it is refilled
PREFILL_CHUNK = 64  # long prompts take several passes of one program instead of a program for each width
SHARD_DOCUMENTS, SHARD_SECONDS = 4096, 60.0
MOST_ROWS, CPU_ROWS = 1024, 16
MEMORY_SHARE = 0.4  # of what is free, for caches


class Encoder:
    """Messages -> the ids that are decoded after, as in any call."""

    def __init__(self, meta: Any, template: bool | str | None, kwargs: Mapping[str, Any] | None):
        self._meta, self._how = meta, (template, kwargs)

    def __call__(self, messages: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """int32 ids. A lone user turn may also go without a template."""
        alone = len(messages) == 1 and messages[0]["role"] == "user"
        given = messages[0]["content"] if alone else [dict(m) for m in messages]
        return encoding.encode(self._meta, given, *self._how).ids[0]

    def several(self, conversations: Sequence[Sequence[Mapping[str, Any]]]) -> list[np.ndarray]:
        """The same of several, in less time than one by one."""
        template, kwargs = self._how
        written = template if isinstance(template, str) else self._meta.chat_template
        tokenizer = checkpoints.tokenizer.get(self._meta.tokenizer_id)
        if (
            template is not False
            and written is not None
            and isinstance(tokenizer, checkpoints.tokenizer.Wrapped)
        ):
            given = [[dict(m) for m in messages] for messages in conversations]
            with contextlib.suppress(
                ValueError, jinja2.TemplateError
            ):  # raised again below, naming its cause
                ids = tokenizer.chats(given, **{"template": written} | dict(kwargs or {}))
                return encoding.encode(self._meta, [np.asarray(i) for i in ids]).ids
        return [self(messages) for messages in conversations]


def turns(prompt: Prompt) -> list[int]:
    """Indices of the messages that are answered: the user turns."""
    return [i for i, m in enumerate(prompt.messages) if m["role"] == "user"]


@dataclasses.dataclass
class Talk:
    """One conversation while it is held."""

    prompt: Prompt
    sample: int
    options: Options
    key: np.ndarray
    messages: list[Mapping[str, Any]]
    answered: list[Turn] = dataclasses.field(default_factory=list)

    def documents(self) -> list[Document]:
        """What is kept of it."""
        p = self.prompt
        return [
            Document(
                np.asarray(t.ids, np.uint32), t.spans, t.ended, p.source, p.id, p.group, self.sample, part
            )
            for part, t in enumerate(texts(self.answered))
        ]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is asked.

    ``call``: one job per temperature, with its options. ``first``: ids of every prompt's first turn. ``longest``: most
    tokens before an answer. ``asked``: (prompt, sample). ``seed``: of a prompt's samples.
    """

    call: calls.Call
    encode: Encoder
    first: Mapping[int, np.ndarray]
    longest: int
    asked: Sequence[tuple[Prompt, int]]
    seed: Callable[[int], int]

    def options(self, sample: int) -> Options:
        """Options of a sample; the last ones serve any further samples."""
        jobs = self.call.jobs
        return jobs[min(sample, len(jobs) - 1)].options

    def tokens(self) -> int:
        """Room that the longest conversation may need."""
        budget, found = self.options(0).max_new_tokens, 1
        for prompt in {p.id: p for p, _ in self.asked}.values():
            need, at = len(self.first[prompt.id]), turns(prompt)
            if len(at) > 1:  # later prompts hold the earlier answers
                filled = [
                    m
                    for i, message in enumerate(prompt.messages)
                    for m in ((message, _STAND_IN) if i in at[:-1] else (message,))
                ]
                need = len(self.encode(filled)) + (len(at) - 1) * budget
            found = max(found, min(need, self.longest))
        return found + budget


_STAND_IN = {"role": "assistant", "content": "."}


def answer(plan: Plan, writer: Writer, rows: int | None, say: Say) -> dict[str, Any]:
    """Hold every conversation that ``writer`` has not got yet; figures of what was done.

    Raises ValueError when it has others than are asked for, and see :func:`specjax.train.respond.prepare`.
    """
    done = writer.done()
    wanted = {(p.id, sample) for p, sample in plan.asked}
    if done - wanted:
        raise ValueError(
            f"{writer.folder} holds {len(done - wanted)} answers to prompts or samples that are not asked for now; ask "
            "for at least what it was begun with, or choose another folder"
        )
    todo = [(p, s) for p, s in plan.asked if (p.id, s) not in done]
    if not todo:
        return {}
    todo.sort(
        key=lambda item: (-len(plan.first[item[0].id]), item[0].id, item[1])
    )  # neighbours prefill together
    run = _Run(plan, todo, writer, _program(plan, len(todo), rows), say)
    enable_compilation_cache()
    try:
        run.serve()
    finally:
        run.flush()
    return run.figures()


def _program(plan: Plan, count: int, rows: int | None) -> Program:
    program = dataclasses.replace(plan.call.program, tokens=token_bucket(plan.tokens()), rows=1)
    most = fitting_rows(program, plan.call.params.target) if rows is None else rows
    return dataclasses.replace(program, rows=row_bucket(count, most))


def fitting_rows(program: Program, target: Any) -> int:
    """Rows whose caches take no more than a share of the device's free memory: a power of two."""
    free = _free_bytes(target)
    if free is None:
        return CPU_ROWS
    host = host_state(program, [None])
    per_row = tree_bytes(jax.eval_shape(lambda: fill_caches(program, host)))
    return min(MOST_ROWS, 1 << max(0, int(MEMORY_SHARE * free / per_row).bit_length() - 1))


def _free_bytes(target: Any) -> int | None:
    """Free memory of the device that holds the target; None where it is not told."""
    device = next(iter(jax.tree.leaves(target)[0].devices()))
    stats = None if device.platform == "cpu" else device.memory_stats()
    return stats["bytes_limit"] - stats["bytes_in_use"] if stats and "bytes_limit" in stats else None


class _Run:
    def __init__(
        self, plan: Plan, todo: list[tuple[Prompt, int]], writer: Writer, program: Program, say: Say
    ):
        self.plan, self.todo, self.writer, self.say = plan, todo, writer, say
        self.call = dataclasses.replace(plan.call, program=program)
        self.meta, self.budget = self.call.params.meta, plan.options(0).max_new_tokens
        self.numbers = itertools.count()
        self.talks: dict[int, Talk] = {}
        self.kept: list[Document] = []
        self.queue = Queue(self._jobs())
        self.conversations = self.answers = self.tokens = self.cut = 0
        self.began = self.saved = self.told = time.monotonic()

    def serve(self) -> None:
        """Until every conversation is over."""
        self.main, self.one = self.call.engines()
        self.say(f"compiling for {self.main.program.rows} rows of {self.main.program.tokens} tokens")
        for job in serve(self.main, self.one, self.queue, self.call.drive):
            if job.reason is not None:
                self._ended(job)
                self._tell()

    def _jobs(self) -> Iterator[Job]:
        keys = _keys(self.todo, self.plan)
        for (prompt, sample), key in zip(self.todo, keys, strict=True):
            first = list(prompt.messages[: turns(prompt)[0] + 1])
            talk = Talk(prompt, sample, self.plan.options(sample), key, first)
            yield self._job(talk, self.plan.first[prompt.id])

    def _job(self, talk: Talk, ids: np.ndarray) -> Job:
        number = next(self.numbers)
        self.talks[number] = talk
        return Job(number, ids, talk.options, talk.key)

    def _ended(self, job: Job) -> None:
        talk = self.talks.pop(job.index)
        if job.reason == "nonfinite":
            raise NonFiniteError(
                f"the target's logits are not finite in an answer to a prompt of {talk.prompt.source} "
                f"({talk.prompt.asked[0][:80]!r}), position {len(job.prompt) + len(job.tokens)}; load with "
                "dtype='float32' or check the weights"
            )
        self.answers, self.tokens = self.answers + 1, self.tokens + len(job.tokens)
        talk.answered.append(Turn(job.prompt.tolist(), job.tokens, job.reason == "stop"))
        following = self._following(talk, job)
        if following is not None:
            self.queue.put(self._job(talk, following))
            return
        self.conversations += 1
        self.kept += talk.documents()
        if len(self.kept) >= SHARD_DOCUMENTS or time.monotonic() - self.saved > SHARD_SECONDS:
            self.flush()

    def _following(self, talk: Talk, job: Job) -> np.ndarray | None:
        """Prompt of the conversation's next turn; None at its end."""
        at = turns(talk.prompt)
        if len(talk.answered) == len(at):
            return None
        said = {"role": "assistant", "content": generate.text_of(self.meta, job)}
        more = talk.prompt.messages[at[len(talk.answered) - 1] + 1 : at[len(talk.answered)] + 1]
        talk.messages += [said, *more]
        if said["content"]:
            ids = self.plan.encode(talk.messages)
            if len(ids) <= min(self.plan.longest, self.call.program.tokens - self.budget):
                return ids
        self.cut += 1  # nothing was said, or there is no room
        return None

    def flush(self) -> None:
        """Write what is finished."""
        kept, self.kept = self.kept, []
        self.writer.write(kept)
        self.saved = time.monotonic()

    def figures(self) -> dict[str, Any]:
        """What this run did."""
        compiling = sum(engine.compile_seconds for engine in {self.main, self.one})
        seconds = time.monotonic() - self.began - compiling
        return {
            "conversations": self.conversations,
            "cut": self.cut,
            "answers": self.answers,
            "tokens": self.tokens,
            "seconds": round(seconds, 3),
            "compile_seconds": round(compiling, 3),
            "rows": self.main.program.rows,
        }

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self.told < 0.5:
            return
        self.told, f = now, self.figures()
        rate = f["tokens"] / max(f["seconds"], 1e-9)
        left = (len(self.todo) - self.conversations) * f["seconds"] / max(self.conversations, 1)
        self.say(
            f"answering: {self.conversations:,} of {len(self.todo):,}, {f['tokens']:,} tokens, {rate:,.0f} tokens/s, "
            f"about {left:.0f} s left"
        )


def _keys(todo: Sequence[tuple[Prompt, int]], plan: Plan) -> np.ndarray:
    """Raw keys uint32 [n 2], as of ``decode(seed=plan.seed(prompt), n=...)``. All at once: later the device is busy."""
    if "temperature" not in plan.call.program.flags:
        return np.zeros((len(todo), 2), np.uint32)
    seeds = np.array([plan.seed(p.id) for p, _ in todo], np.uint32)
    samples = np.array([sample for _, sample in todo], np.uint32)
    return np.asarray(_key_data(seeds, samples))


@jax.jit
@jax.vmap
def _key_data(seed: jax.Array, sample: jax.Array) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(jnp.uint32(seed), impl="threefry2x32"), sample)
    return jax.random.key_data(key)
