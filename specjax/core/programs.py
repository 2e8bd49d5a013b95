"""Compiled programs: what there is to compile, compiled ahead of time, kept per process.

A program is selected by :class:`specjax.config.Program` and the shapes of the weights, by nothing else.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import registry
from specjax.config import Program
from specjax.core import plain, round as rnd
from specjax.core.pace import Step
from specjax.core.platform import compiler_options, traced_options
from specjax.kernels import dispatch
from specjax.types import Emit, State

Announce = Callable[[str], contextlib.AbstractContextManager[None]]


@functools.lru_cache(maxsize=128)
def _store(program: Program, signature: Any) -> dict[str, Any]:
    """Compiled code of one program: a process cache of functions, never of arrays."""
    del program, signature
    return {}


def compile_count() -> int:
    """How many programs this process has compiled so far."""
    return _Count.total


class _Count:
    total = 0


def _signature(weights: Any) -> Any:
    leaves, tree = jax.tree.flatten(weights)
    return tree, tuple((x.shape, x.dtype, getattr(x, "sharding", None)) for x in leaves)


class Engine:
    """Runs the programs of one :class:`Program` on one set of weights, compiling on first use.

    ``announce`` surrounds each compilation.
    """

    def __init__(self, program: Program, weights: rnd.Weights, announce: Announce | None = None):
        self.program, self.weights = program, weights
        self._announce = announce or (lambda text: contextlib.nullcontext())
        self._compiled = _store(program, _signature(weights))
        self._seconds = 0.0
        self._sized: dict[int, Engine] = {program.rows: self}

    @property
    def compile_seconds(self) -> float:
        """Time spent compiling through this engine and those of other sizes it gave."""
        return self._seconds + sum(x.compile_seconds for x in self._sized.values() if x is not self)

    def sized(self, rows: int) -> "Engine":
        """Engine of the same program for another number of rows; kept."""
        if rows not in self._sized:
            program = dataclasses.replace(self.program, rows=rows)
            self._sized[rows] = Engine(program, self.weights, self._announce)
        return self._sized[rows]

    def init(self, host: State) -> State:
        """Device state from a host state whose cache fields are empty."""
        return self._run("init", lambda h: fill_caches(self.program, h), (), host)

    def prefill(self, state: State, start, width: int) -> tuple[State, Emit]:
        """One prefill chunk of ``width`` positions per row; consumes ``state``."""
        return self.compile_prefill(state, width)(self.weights, state, start)

    def chunk(self, state: State, rounds: int, step: Step | None = None) -> tuple[State, Emit]:
        """Up to ``rounds`` rounds in one device loop, as wide as ``step`` says (default: k); consumes ``state``."""
        step = step or Step(self.program.k, rounds)
        return self.compile_chunk(state, step)(self.weights, state, np.int32(rounds), *self._cuts(step))

    def _cuts(self, step: Step) -> tuple[np.ndarray, ...]:
        """Least chances of drafts, where the program takes them: all 0 keeps every draft."""
        if not (self.program.cuts and step.width):
            return ()
        return (np.array(step.cuts or (0.0,) * step.width, np.float32),)

    def compile_prefill(self, state: State, width: int) -> Any:
        """The compiled prefill chunk; ``state`` may be shapes only."""
        fn, start = prefill_program(self.program, width)
        return self._get(f"prefill {width}", fn, (1,), self.weights, state, start)

    def compile_chunk(self, state: State, step: Step | None = None) -> Any:
        """The compiled loop of rounds; ``state`` may be shapes only."""
        width = self.program.k if step is None else step.width
        if self.program.auto and not width:
            step = step or Step(0, self.program.rounds)
            plainly = functools.partial(_plain_chunk, self.program, step.room)
            return self._get(f"decode 0 by {step.room}", plainly, (1,), self.weights, state, ROUND_COUNT)
        fn, rounds = chunk_program(self.program, width)
        cuts = self._cut_shapes(width)
        return self._get(f"decode {width}", fn, (1,), self.weights, state, rounds, *cuts)

    def compile_traced(self, state: State) -> Any:
        """The compiled loop of rounds to be profiled: on GPUs another program than :meth:`compile_chunk`'s."""
        if traced_options() == compiler_options():
            return self.compile_chunk(state)
        fn, rounds = chunk_program(self.program)
        options = traced_options()
        return self._get("decode, traced", fn, (1,), self.weights, state, rounds, options=options)

    def _cut_shapes(self, width: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (jax.ShapeDtypeStruct((width,), jnp.float32),) if self.program.cuts and width else ()

    def compile_rounds(self, state: State, loop: str, step: Step | None = None) -> Any:
        """What :meth:`chunk` (``loop`` "device") or :meth:`round` ("host") runs, compiled."""
        return (self.compile_chunk if loop == "device" else self._compile_round)(state, step)

    def round(self, state: State, step: Step | None = None) -> tuple[State, Emit]:
        """One round (the host loop's step); consumes ``state``."""
        cuts = () if step is None else self._cuts(step)
        return self._compile_round(state, step)(self.weights, state, *cuts)

    def _compile_round(self, state: State, step: Step | None = None) -> Any:
        width = self.program.k if step is None else step.width
        single = functools.partial(_single, self.program, width)
        return self._get(f"round {width}", single, (1,), self.weights, state, *self._cut_shapes(width))

    def finish(self, state: State, rows) -> State:
        """Mark rows as done; consumes ``state``."""
        return self._run("finish", rnd.finish, (0,), state, jnp.asarray(rows))

    def insert(self, state: State, rows: list[int], part: State) -> State:
        """Put the rows of a smaller state into rows of ``state``, and consume it; ``part`` may have more rows than
        are named: they go nowhere."""
        size = part.length.shape[0]
        spare = range(self.program.rows, self.program.rows + size - len(rows))
        at = jnp.asarray([*rows, *spare], jnp.int32)
        return self._run(f"insert {size}", rnd.insert, (0,), state, at, part)

    def _run(self, name: str, fn, donate: tuple[int, ...], *args):
        return self._get(name, fn, donate, *args)(*args)

    def _get(self, name: str, fn, donate: tuple[int, ...], *args, options: dict[str, str] | None = None):
        compiled = self._compiled.get(name)
        if compiled is None:
            compiled = self._compiled[name] = self._compile(name, fn, donate, args, options)
        return compiled

    def _compile(self, name: str, fn, donate, args, options: dict[str, str] | None):
        p, began = self.program, time.perf_counter()
        with self._announce(f"compiling {name} (rows {p.rows}, tokens {p.tokens}, k {p.k})"):
            jitted = jax.jit(fn, donate_argnums=donate)
            options = compiler_options() if options is None else options
            compiled = jitted.lower(*args).compile(compiler_options=options or None)
        self._seconds += time.perf_counter() - began
        _Count.total += 1
        return compiled


def fill_caches(program: Program, host: State) -> State:
    """Add empty target cache and drafter state."""
    pair, dtype = program.pair, jnp.dtype(program.dtype)
    shape = (program.rows, program.slots, program.q_max, dtype)
    target = registry.target(pair.family).init_cache(pair.target_cfg, *shape)
    drafter: Any = ()
    if pair.drafter is not None:
        drafter = registry.drafter(pair.drafter).init_state(pair.drafter_cfg, *shape)
    return dataclasses.replace(host, target=target, drafter=drafter)


def prefill_program(program: Program, width: int) -> tuple[Callable, jax.ShapeDtypeStruct]:
    """One prefill chunk as a function of weights, state (given up) and where rows begin; the shape of the last."""
    return functools.partial(_prefill, program, width), jax.ShapeDtypeStruct((program.rows,), jnp.int32)


ROUND_COUNT = jax.ShapeDtypeStruct((), jnp.int32)


def chunk_program(program: Program, width: int | None = None) -> tuple[Callable, jax.ShapeDtypeStruct]:
    """The loop of rounds of a width (default: the widest) as a function of weights, state (given up) and their
    number; the shape of the last. Where drafts can be cut (``program.cuts``), their least chances may follow."""
    return functools.partial(_chunk, program, program.k if width is None else width), ROUND_COUNT


def _prefill(program: Program, width: int, weights, state: State, start):
    with dispatch.asking(program.kernels):
        state, verdict = rnd.prefill(
            program.pair, weights, state, start, width, program.rule or "match", program.logprobs
        )
    emit = _empty_emit(program, 1)
    return state, _record(emit, 0, state, None, verdict, jnp.int32(0), program.logprobs)


def _round(program: Program, weights, state: State, emit: Emit, index, k: int | None = None, cuts=()):
    # where widths follow the clock, drafts that are tested by equality are the drafter's best: a draw helps none
    drawn = not (program.auto and program.rule == "match")
    with dispatch.asking(program.kernels):
        proposal, state = rnd.draft(program.pair, weights, state, program.k if k is None else k, drawn)
        for least in cuts:
            proposal = rnd.cut(proposal, least)
        state, verdict, width = rnd.verify(
            program.pair, weights, state, proposal, program.rule, program.logprobs, program.widths
        )
    return state, _record(emit, index, state, proposal, verdict, width, program.logprobs)


def _single(program: Program, k: int, weights, state: State, *cuts):
    return _round(program, weights, state, _empty_emit(program, 1), 0, k, cuts)


def _plain_chunk(program: Program, room: int, weights, state: State, rounds):
    """At most ``room`` rounds without drafts; the drafter takes in their positions when they are over."""
    length, pair = state.length, program.pair

    def unfinished(carry):
        i, state, _, _ = carry
        return (i < rounds) & ~jnp.all(state.done)

    def body(carry):
        i, state, emit, seen = carry
        state, verdict, seen = plain.step(pair, weights, state, i, seen, program.rule, program.logprobs)
        emit = _record(emit, i, state, None, verdict, jnp.int32(1), program.logprobs)
        return i + 1, state, emit, seen

    with dispatch.asking(program.kernels):
        seen = plain.room(pair, weights, state, room)
        start = (jnp.int32(0), state, _empty_emit(program, program.rounds), seen)
        state, emit, seen = jax.lax.while_loop(unfinished, body, start)[1:]
        return plain.catch_up(pair, weights, state, length, seen, room), emit


def _chunk(program: Program, k: int, weights, state: State, rounds, *cuts):
    def unfinished(carry):
        i, state, _ = carry
        return (i < rounds) & ~jnp.all(state.done)

    def body(carry):
        i, state, emit = carry
        state, emit = _round(program, weights, state, emit, i, k, cuts)
        return i + 1, state, emit

    start = (jnp.int32(0), state, _empty_emit(program, program.rounds))
    weights = rnd.ready(program.pair, weights)
    return jax.lax.while_loop(unfinished, body, start)[1:]


def _empty_emit(program: Program, rounds: int) -> Emit:
    b, q = program.rows, program.q_max
    # distinct zeros: a buffer shared by two loop carries could not be donated
    per_row = ("emitted", "accepted", "proposed", "source", "reason", "request_id")
    return Emit(
        tokens=jnp.zeros((rounds, b, q), jnp.int32),
        width=jnp.zeros((rounds,), jnp.int32),
        logprobs=jnp.zeros((rounds, b, q), jnp.float32) if program.logprobs else None,
        **{name: jnp.zeros((rounds, b), jnp.int32) for name in per_row},
    )


def _record(emit: Emit, i, state: State, proposal, verdict, width, logprobs: bool) -> Emit:
    zero = jnp.zeros_like(verdict.emitted)
    proposed = source = zero
    if proposal is not None:
        before = state.length - verdict.emitted
        room = jnp.maximum(state.limit - before - 1, 0)
        proposed = jnp.where(verdict.emitted > 0, jnp.minimum(proposal.count, room), 0)
        source = zero if proposal.source is None else proposal.source
    row = dataclasses.replace(
        emit,
        tokens=_widen(verdict.out_tokens, emit.tokens),
        emitted=verdict.emitted,
        accepted=jnp.where(verdict.emitted > 0, verdict.accepted, 0),
        proposed=proposed,
        source=source,
        reason=jnp.where(state.done, state.reason, 0),
        request_id=state.request_id,
        width=width,
        logprobs=_widen(verdict.logprobs, emit.logprobs) if logprobs else None,
    )
    return jax.tree.map(lambda whole, part: whole.at[i].set(part.astype(whole.dtype)), emit, row)


def _widen(x, like):
    return jnp.pad(x, ((0, 0), (0, like.shape[-1] - x.shape[-1])))
