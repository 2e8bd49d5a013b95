"""The parts of a round, each compiled and timed alone: the device's time of draft, verify, accept, commit and inject.

A part runs in a loop of turns (:mod:`specjax.turns`). What a turn gives goes into the next one's input (as a zero that
the compiler cannot know to be one), so that no turn can be left out or moved before the loop.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.config import Program
from specjax.core import round as rnd
from specjax.core.platform import compiler_options
from specjax.kernels import dispatch
from specjax.turns import Timer, turning
from specjax.types import Proposal, State, TargetOut, Verdict

#: Parts in the order in which a round runs them; each is a named scope of :mod:`specjax.core.round`.
PARTS = ("draft", "verify", "accept", "commit", "inject")
_NEVER = -1234567  # no token, count or length is this


class Parts:
    """Timers of the parts at one state, for one draft width."""

    def __init__(self, program: Program, weights: rnd.Weights, state: State, width: int):
        self.program, self.weights, self.state = program, weights, state
        k = program.k
        proposal, self.drafted = _compiled("draft once", program, k)(weights, state)
        self.cut = rnd.truncated(proposal, width)
        self.out, self.verdict = _compiled("look once", program, width)(weights, self.drafted, self.cut)

    def timers(self) -> dict[str, Timer]:
        """By part: a function that measures and gives seconds per turn. Parts that do not exist are left out."""
        after = dataclasses.replace(self.drafted, target=self.out.cache)
        features = dataclasses.replace(self.out, cache=None)
        width = self.cut.tokens.shape[1]
        make = functools.partial(_timer, self.program, width, self.weights)
        found = {
            "verify": make("verify", self.drafted, self.cut),
            "accept": make("accept", jnp.int32(0), self.drafted, self.out.hidden, self.cut),
            "commit": make("commit", after, self.verdict),
        }
        if self.program.pair.drafter is not None and self.program.k:
            found["draft"] = _timer(self.program, self.program.k, self.weights, "draft", self.state)
        if jax.tree.leaves(self.drafted.drafter):
            found["inject"] = make("inject", self.drafted, self.cut, self.verdict, features)
        return found


def _timer(program: Program, width: int, weights: rnd.Weights, part: str, carry: Any, *given: Any) -> Timer:
    run = _compiled(part, program, width)
    return Timer(lambda turns: run(weights, jnp.int32(turns), carry, *given))


@functools.lru_cache(maxsize=64)
def _compiled(part: str, program: Program, width: int) -> Callable:
    """The function of a part; compiled for its shapes on the first call and kept."""
    if part in _ONCE:
        return _ahead(program, jax.jit(functools.partial(_ONCE[part], program)))
    step: Callable = _STEPS[part]
    return _ahead(program, jax.jit(functools.partial(turning, program, step)))


def _ahead(program: Program, jitted: Any) -> Callable:
    """Compiled with the options and kernels that decoding is compiled with."""
    known: dict[Any, Any] = {}

    def call(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        key = tree, tuple((x.shape, x.dtype) for x in leaves)
        if key not in known:
            with dispatch.asking(program.kernels):
                lowered = jitted.lower(*args)
            known[key] = lowered.compile(compiler_options=compiler_options() or None)
        return known[key](*args)

    return call


def _draft_once(program: Program, weights: rnd.Weights, state: State) -> tuple[Proposal, State]:
    return rnd.draft(program.pair, weights, state, program.k)


def _look_once(program: Program, weights: rnd.Weights, state: State, proposal: Proposal):
    block, pos = rnd.block_of(state, proposal)
    out = rnd.look(program.pair, weights, state, block, pos)
    return out, _judge(program, weights, state, out.hidden, proposal)


def _judge(program: Program, weights, state: State, hidden, proposal: Proposal) -> Verdict:
    rule = program.rule or rnd.natural_rule(proposal)
    count = jnp.clip(jnp.minimum(proposal.count, state.limit - state.length - 1), 0, proposal.tokens.shape[1])
    return rnd.judge(program.pair, weights, state, hidden, proposal, count, rule, program.logprobs)


def draft(program: Program, weights, _, state: State) -> State:
    """One turn of drafting: the next one begins where this one did."""
    proposal, after = rnd.draft(program.pair, weights, state, program.k)
    return _moved(_next(state, drafter=after.drafter), _zero(proposal))


def _verify(program: Program, weights, _, state: State, proposal: Proposal) -> State:
    block, pos = rnd.block_of(state, proposal)
    out = rnd.look(program.pair, weights, state, block, pos)
    return _moved(_next(state, target=out.cache), _zero((out.hidden, out.taps)))


def _accept(program: Program, weights, _, zero, state: State, hidden, proposal: Proposal):
    return _zero(_judge(program, weights, state, hidden + zero.astype(hidden.dtype), proposal))


def _commit(program: Program, weights, _, state: State, verdict: Verdict) -> State:
    after = rnd.settle(program.pair, state, state.target, verdict)
    kept = _next(state, target=after.target)
    return _moved(kept, _zero((after.length, after.done, after.reason, after.tokens, after.counts)))


def _inject(program: Program, weights, _, state: State, proposal: Proposal, verdict: Verdict, out: TargetOut):
    block, pos = rnd.block_of(state, proposal)
    zero = state.length[0] - jnp.maximum(state.length[0], 0)  # not known to be one either
    out = jax.tree.map(lambda x: x + zero.astype(x.dtype), out)
    after = rnd.inject(
        program.pair, weights, state, block, verdict.out_tokens, pos, verdict.emitted, out, "verify"
    )
    first = jax.tree.leaves(after.drafter)[0].ravel()[:1]
    return _moved(_next(state, drafter=after.drafter), _zero(first))


_ONCE: dict[str, Callable] = {"draft once": _draft_once, "look once": _look_once}
_STEPS: dict[str, Callable] = {
    "draft": draft,
    "verify": _verify,
    "accept": _accept,
    "commit": _commit,
    "inject": _inject,
}


def _next(state: State, **changes: Any) -> State:
    """The state with new fields where they have the old ones' shapes, as a loop needs. Where they do not, the work is
    done for the sake of the other outputs."""
    shape = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)  # noqa: E731
    same = {name: new for name, new in changes.items() if shape(new) == shape(getattr(state, name))}
    kept = {name: jax.tree.map(_buffer, getattr(state, name), new) for name, new in same.items()}
    return dataclasses.replace(state, **kept)


def _buffer(old: jax.Array, new: jax.Array) -> jax.Array:
    """Buffers go on to the next turn, as they do in a round. Counts and positions stay: every turn begins where the
    first one did."""
    return new if jnp.issubdtype(new.dtype, jnp.floating) else old


def _moved(state: State, zero) -> State:
    return dataclasses.replace(state, length=state.length + zero)


def _zero(tree: Any):
    """An int32 zero that depends on every value of a tree."""
    total = jnp.int32(0)
    for leaf in jax.tree.leaves(tree):
        wide = jnp.float32 if jnp.issubdtype(leaf.dtype, jnp.floating) else jnp.int32
        total += jnp.where(jnp.sum(leaf.astype(wide)) == _NEVER, 1, 0)
    return total
