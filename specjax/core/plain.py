"""Rounds without drafts although there is a drafter, which takes in all of their positions at once at the end.

A self-tuned call decodes like this where drafting does not pay. Such a round costs what plain decoding costs: the
features a drafter reads are set aside, and one pass of its own brings it in step.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax import registry
from specjax.core import round as rnd
from specjax.types import Pair, Proposal, Rule, State, Taps, TargetOut, Verdict


class Seen(NamedTuple):
    """Features of R positions per row: what the drafter will read."""

    hidden: Float[Array, "B R D"] | None
    taps: Taps


def room(pair: Pair, weights: rnd.Weights, state: State, rounds: int) -> Seen:
    """Zeros for the features of ``rounds`` positions."""
    wanted, cfg = rnd.needs(pair), pair.target_cfg
    dtype = registry.target(pair.family).shared(weights[0], cfg).embed.dtype
    empty = lambda: jnp.zeros((state.length.shape[0], rounds, cfg.hidden_size), dtype)  # noqa: E731
    return Seen(empty() if wanted.hidden else None, {j: empty() for j in wanted.taps})


def step(
    pair: Pair, weights: rnd.Weights, state: State, at, seen: Seen, rule: Rule | None, logprobs: bool
) -> tuple[State, Verdict, Seen]:
    """Round ``at`` of several: one token per row, and its features set aside."""
    nothing = Proposal(state.tokens[:, :0], jnp.zeros_like(state.length))
    block, pos = rnd.block_of(state, nothing)
    out = rnd.look(pair, weights, state, block, pos)
    verdict = rnd.judge(pair, weights, state, out.hidden, nothing, nothing.count, rule or "match", logprobs)
    put = lambda held, x: jax.lax.dynamic_update_slice(held, x.astype(held.dtype), (0, at, 0))  # noqa: E731
    hidden = None if seen.hidden is None else put(seen.hidden, out.hidden)
    taps = {j: put(held, out.taps[j]) for j, held in seen.taps.items()}
    return rnd.settle(pair, state, out.cache, verdict), verdict, Seen(hidden, taps)


def catch_up(
    pair: Pair, weights: rnd.Weights, state: State, length: Int[Array, " B"], seen: Seen, rounds: int
) -> State:
    """The state with the drafter in step again; rows had ``length`` tokens when the first of ``rounds`` began."""
    last = state.tokens.shape[1] - 1
    token = lambda pos: jnp.take_along_axis(state.tokens, jnp.clip(pos, 0, last), 1)  # noqa: E731
    pos = length[:, None] - 1 + jnp.arange(rounds)
    out = TargetOut(seen.hidden, seen.taps, None)
    before = token(pos[:, :1] - 1)[:, 0]
    keep = state.length - length
    return rnd.inject(pair, weights, state, token(pos), token(pos + 1), pos, keep, out, "extend", before)
