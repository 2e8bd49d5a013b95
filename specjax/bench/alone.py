"""What a round costs, timed apart from everything the host does, and its parts: verification and drafting.

Rounds are those of the program that decodes, over real prompts; nothing more is compiled for them. A verification of
given drafts is a program per number of drafts, whatever the drafter; the drafter's pass, as profiles have it, one per
drafter and k. Both run in turns (:mod:`specjax.turns`) over caches that nothing was written to: their time does not
depend on what they hold.
"""

import dataclasses
import functools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.bench.rows import Costs
from specjax.calls import plan
from specjax.config import Program
from specjax.core import round as rnd
from specjax.core.loop import Job, host_state, padded, prefill_rows
from specjax.core.programs import Engine, fill_caches
from specjax.identity import without_drafter
from specjax.profiling_parts import draft
from specjax.turns import Timer, in_turn, turning
from specjax.types import Emit, Params, Proposal, State

Call = tuple[Params, Mapping[str, Any]]  # params and options of decode

#: Verifications of any number of drafts up to this one use states of one size.
ROOM = 15


def costs(
    plain: Call,
    drafted: Call,
    batches: Sequence[Sequence[Any]],
    *,
    parts: bool = True,
    repeats: int = 5,
    calls: int = 2,
) -> Costs:
    """Cost of a round of ``drafted`` beside one of ``plain``, in turn on each of the ``batches`` of prompts.

    ``calls``: device calls (16 rounds each, at most) per batch and side. ``parts``: time verification and drafting as
    well, ``repeats`` times in turn.
    """
    samples: tuple[list, list] = ([], [])
    for i, batch in enumerate(batches):
        for side in (0, 1) if i % 2 == 0 else (1, 0):
            samples[side].extend(rounds(*(plain, drafted)[side], batch, calls))
    used = sum((Counter(widths) for _, widths in samples[1]), Counter())
    shares = tuple((w, n / used.total()) for w, n in sorted(used.items()))
    whole = Costs(round_ms(samples[0], False), round_ms(samples[1], len(shares) > 1), shares)
    if not parts:
        return whole
    params, options = drafted
    ask = plan(params, batches[0], **options)
    parts_of: dict[Any, Part] = {w: verifying(params, ask.program, w) for w, _ in shares}
    parts_of["draft"] = drafting(params, ask.program)
    found = in_turn({name: Timer(part.loop(ask.jobs)) for name, part in parts_of.items()}, repeats)
    ms = {name: 1e3 * seconds for name, seconds in found.items()}
    return dataclasses.replace(
        whole, verify_ms=sum(share * ms[w] for w, share in shares), draft_ms=ms["draft"]
    )


Sample = tuple[
    float, list[int]
]  # seconds of a device call, and the number of drafts verified in each of its rounds


def rounds(params: Params, options: Mapping[str, Any], batch: Sequence[Any], calls: int) -> list[Sample]:
    """Device calls of decoding a batch, timed one by one, without the host's part."""
    call = plan(params, batch, **options)
    engine = call.engines()[0]
    found: list[Sample] = []
    state = prefill_rows(
        engine, host_state(call.program, padded(call.program, call.jobs)), call.drive.prefill_chunk
    )[0]
    engine.compile_rounds(state, "device")
    jax.block_until_ready(state)
    for _ in range(calls):
        began = time.perf_counter()
        state, emit = engine.chunk(state, call.drive.rounds)
        jax.block_until_ready(emit)
        seconds = time.perf_counter() - began
        if widths := _widths(emit):
            found.append((seconds, widths))
    return found


def _widths(emit: Emit) -> list[int]:
    return [w - 1 for w in np.asarray(emit.width).tolist() if w > 0]


def round_ms(samples: Sequence[Sample], mixed: bool) -> float:
    """Milliseconds per round: the median over device calls, or, where rounds differ in width, the mean over rounds."""
    if not samples:
        raise ValueError(
            "no round was run: every prompt was answered by its prefill; give more max_new_tokens"
        )
    if mixed:
        return 1e3 * sum(seconds for seconds, _ in samples) / sum(len(widths) for _, widths in samples)
    return 1e3 * statistics.median(seconds / len(widths) for seconds, widths in samples)


class Loop:
    """Turns of one part in a device loop, each call from where the one before it stopped."""

    def __init__(self, run: Callable[[Any, State], State], state: State):
        self._run, self._state = run, state

    def __call__(self, turns: int) -> State:
        self._state = self._run(jnp.int32(turns), self._state)
        return self._state


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of a round: what a turn of it is, and the engine whose program it belongs to."""

    name: str
    engine: Engine
    turn: Callable[..., State]

    def compiled(self, jobs: Sequence[Job]) -> Any:
        """The compiled loop, kept with the engine's programs, and what makes its state; allocates nothing."""
        program, weights = self.engine.program, self.engine.weights
        state = compile_init(self.engine, _halfway(program, jobs))
        turns = functools.partial(turning, program, self.turn)
        return self.engine._get(self.name, turns, (2,), weights, jax.ShapeDtypeStruct((), jnp.int32), state)

    def loop(self, jobs: Sequence[Job]) -> Loop:
        """The loop over rows of ``jobs``."""
        run = functools.partial(self.compiled(jobs), self.engine.weights)
        return Loop(run, self.engine.init(_halfway(self.engine.program, jobs)))


def compile_init(engine: Engine, host: State) -> State:
    """Compile what fills an engine's caches; shapes of the state."""
    program = engine.program
    engine._get("init", lambda h: fill_caches(program, h), (), host)
    return jax.eval_shape(lambda: fill_caches(program, host))


def verifying(params: Params, program: Program, width: int) -> Part:
    """The target's pass over ``width`` drafts and the last committed token, acceptance and commit; c(width + 1).

    ``program``: of a planned call, whose rows, buffer and sampling options count, not its drafter.
    """
    pair = without_drafter(params).meta.pair
    alone = dataclasses.replace(program, pair=pair, k=max(width, ROOM), rule="match", logprobs=False)
    turn = functools.partial(_verify, width)
    return Part(f"verify {width} alone", Engine(alone, (params.target, None)), turn)


def drafting(params: Params, program: Program) -> Part:
    """The drafter's pass for the program's ``k`` drafts; D(k)."""
    return Part("draft alone", Engine(program, (params.target, params.drafter)), draft)


def _halfway(program: Program, jobs: Sequence[Job]) -> State:
    """Rows in the middle of their answers, with room for any number of turns."""
    host = host_state(program, padded(program, jobs))
    middle = np.minimum((host.length + host.limit) // 2, program.tokens - 1).astype(np.int32)
    return dataclasses.replace(host, length=middle, limit=np.full_like(host.limit, 2**30))


def _verify(k: int, program: Program, weights, i, state: State) -> State:
    """Drafts are tokens of the prompt, others in every turn; afterwards the row is where it was."""
    at = (i * (k + 1) + jnp.arange(k)) % state.prompt_len[:, None]
    proposal = Proposal(jnp.take_along_axis(state.tokens, at, 1), jnp.full(state.length.shape, k, jnp.int32))
    after, _, _ = rnd.verify(program.pair, weights, state, proposal, "match")
    return dataclasses.replace(after, length=state.length, done=state.done, reason=state.reason)
