"""Conversations: the state stays on the device between turns, and only what is new is prefilled.

A turn resumes at the longest common prefix of the new token ids and what the state holds, so an edited
or regenerated turn falls back just as far as it must, and the ids equal those of a fresh run over the
whole conversation.
"""

import dataclasses
from collections.abc import Generator, Iterator
from typing import Any

import jax
import numpy as np

from specjax import calls, generate, registry
from specjax.config import Program
from specjax.core.loop import Job, Queue, clock, credit, host_state, prefill_rows, read, run_rounds
from specjax.core.platform import enable_compilation_cache
from specjax.core.programs import Engine
from specjax.memory import guarded
from specjax.results import Piece, Result
from specjax.types import Params, State

Message = dict[str, str]


class Conversation:
    """Chat with a model, turn by turn. Built by :func:`specjax.chat`.

    ``messages`` is the conversation so far; edit it freely between turns. ``reused`` tells how many
    positions of the last turn did not have to be computed again.
    """

    def __init__(self, params: Params, system: str | None = None, **options: Any):
        calls.check_names(options)
        self.params, self.options = params, options
        self.messages: list[Message] = []
        if system is not None:
            self.messages.append(_message("system", system))
        self.reused = 0
        self._state: State | None = None
        self._program: Program | None = None
        self._held = np.zeros(0, np.int32)  # token ids the state has computed

    def send(self, text: str, **options: Any) -> Result:
        """Add a user turn; returns the model's answer and adds it to ``messages``.

        A turn that fails, or whose answer is empty for lack of room, leaves ``messages`` as they were.
        """
        turn = _message("user", text)
        return self._answer([*self.messages, turn], [turn], options)

    def regenerate(self, **options: Any) -> Result:
        """Answer the last user turn again (with another ``seed``, say)."""
        messages = list(self.messages)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages or messages[-1]["role"] != "user":
            raise ValueError("there is no user turn to answer again")
        out = self._answer(messages, [], options)
        if out.tokens:
            del self.messages[len(messages) : -1]
        return out

    def stream(self, text: str, **options: Any) -> Iterator[Piece]:
        """Like :meth:`send`, piece by piece. A stream that is dropped keeps what was said so far."""
        turn = _message("user", text)
        call, job, engine = self._plan([*self.messages, turn], {"rounds": 1} | self.options | options)
        said = ""
        try:
            for piece in generate.pieces(guarded(self._run(call, job, engine), call), call, {engine}):
                said += piece.text
                yield piece
        finally:
            self._said([turn], job, said)

    def _answer(self, messages: list[Message], new: list[Message], options: dict[str, Any]) -> Result:
        call, job, engine = self._plan(messages, self.options | options)
        try:
            for update in guarded(self._run(call, job, engine), call):
                generate.raise_nonfinite(update)
        except KeyboardInterrupt:
            if not job.tokens:
                raise
            generate.interrupt([job])
        done = generate.completion(self.params.meta, job, call.logprobs, engine.compile_seconds)
        self._said(new, job, done.text or "")
        return Result([[done]], single=True)

    def _said(self, new: list[Message], job: Job, text: str) -> None:
        if job.tokens:
            self.messages += [*new, _message("assistant", text)]

    def _plan(self, messages, options: dict[str, Any]) -> tuple[calls.Call, Job, Engine]:
        call = calls.plan(self.params, messages, **options)
        if len(call.jobs) != 1:
            raise ValueError("a conversation draws one answer per turn: n must be 1")
        if self._program is not None and self._program.tokens > call.program.tokens:
            call.program = dataclasses.replace(call.program, tokens=self._program.tokens)
        enable_compilation_cache()
        return call, call.jobs[0], call.engines()[0]

    def _run(self, call: calls.Call, job: Job, engine: Engine) -> Generator[Job, None, None]:
        if job.options.max_new_tokens == 0:
            job.reason = "length"
            yield job
            return
        state, start = self._resume(call.program, job, engine)
        self._state, self.reused = None, start  # the state is consumed below; an interrupt loses only time
        job.began = clock(engine, engine)
        host = host_state(call.program, [job])
        state, records = prefill_rows(engine, host, call.drive.prefill_chunk, start, state)
        yield from credit(read(records), [job], clock(engine, engine))
        rows: list[Job | None] = [job]
        state = yield from run_rounds(engine, engine, state, rows, Queue(), call.drive)
        self._state, self._program = state, call.program
        self._held = np.concatenate([job.prompt, np.asarray(job.tokens, np.int32)])

    def _resume(self, program: Program, job: Job, engine: Engine) -> tuple[State | None, int]:
        """State to continue and the first position to feed, or (None, 0) for a fresh prefill."""
        if self._state is None or self._program is None:
            return None, 0
        common = _common_prefix(self._held, job.prompt)
        # The anchor's features are needed again: a drafter pairs them with its successor. One more position is
        # fed for drafters that run ahead on their own drafts and never saw the last one.
        start = max(common - 2, 0)
        if start < _min_resume(self._program, len(self._held)) or program.k != self._program.k:
            return None, 0
        kept = self._state
        if program != self._program:
            kept = _grow(engine.init(host_state(program, [job])), kept)
        return dataclasses.replace(
            host_state(program, [job]), target=kept.target, drafter=kept.drafter
        ), start


def _message(role: str, content: Any) -> Message:
    if not isinstance(content, str):
        raise ValueError(f"a {role} message must be a string, got {type(content).__name__}")
    return {"role": role, "content": content}


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if differ.size else n


def _min_resume(program: Program, held: int) -> int:
    """Earliest position that can be fed again. The device may have run past what the host kept."""
    pair = program.pair
    high = min(program.tokens, held + 2 * program.rounds * program.q_max)
    earliest = registry.target(pair.family).min_resume(pair.target_cfg, high)
    if pair.drafter is not None:
        earliest = max(earliest, registry.drafter(pair.drafter).min_resume(pair.drafter_cfg, high))
    return earliest


def _grow(empty: State, old: State) -> State:
    """Caches of ``old`` in the larger buffers of ``empty``."""

    def copy(new, held):
        n = tuple(slice(0, min(a, b)) for a, b in zip(new.shape, held.shape, strict=True))
        return new.at[n].set(held[n])

    target, drafter = jax.tree.map(copy, (empty.target, empty.drafter), (old.target, old.drafter))
    return dataclasses.replace(empty, target=target, drafter=drafter)
