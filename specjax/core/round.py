"""One round: draft, verify, accept, commit. Pure functions of (weights, state); nothing here knows a
family or a drafter by name. The parts of a round are named scopes (draft, verify, accept, commit, inject), so that
traces of a device can be read by them.

Invariants (the tests assert each):

I1 ``tokens[b, :length[b]]`` is committed; the anchor's keys and values are not in the cache yet.
I2 cache slots at or beyond ``length - 1`` are garbage and invisible; a rejection moves ``length`` only.
I3 the drafter has absorbed exactly the positions before the anchor.
I4 a finished row emits 0 and none of its visible fields change.
I5 a live row emits between 1 and count + 1 tokens (unless its logits are not finite: then it ends).
I6 a row's output depends neither on its neighbours nor on B.
I7 ``emitted`` alone drives the token write, cache commit, absorb's keep, penalty counts and length.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax import registry
from specjax.core import sampling as smp
from specjax.core.accept import Best, accept
from specjax.types import (
    LENGTH,
    RUNNING,
    AbsorbIn,
    Ctx,
    Mode,
    Pair,
    Proposal,
    Rule,
    State,
    TapSpec,
    TargetOut,
    Verdict,
)

Weights = tuple[Any, Any]  # (target weights, drafter weights or None)


@jax.named_scope("draft")
def draft(pair: Pair, weights: Weights, state: State, k: int, drawn: bool = True) -> tuple[Proposal, State]:
    """Ask the drafter for up to ``k`` tokens per row; without a drafter the proposal is empty.

    ``drawn`` False: its best tokens, whatever the temperature.
    """
    rows = state.length.shape[0]
    if pair.drafter is None or k == 0:
        none = jnp.zeros((rows, 0), jnp.int32)
        return Proposal(none, jnp.zeros((rows,), jnp.int32)), state
    target, drafter = registry.target(pair.family), registry.drafter(pair.drafter)
    ctx = Ctx(
        tokens=state.tokens,
        length=state.length,
        anchor=jnp.take_along_axis(state.tokens, state.length[:, None] - 1, 1)[:, 0],
        live=~state.done,
        temperature=state.sampling.temperature,
        kv_view=functools.partial(target.kv_view, weights[0], pair.target_cfg, state.target),
    )
    proposal, dstate = drafter.draft(
        weights[1],
        target.shared(weights[0], pair.target_cfg),
        pair.drafter_cfg,
        k,
        state.drafter,
        ctx,
        None if state.sampling.greedy or not drawn else _draft_keys(state),
    )
    return proposal, dataclasses.replace(state, drafter=dstate)


def _draft_keys(state: State) -> Array:
    """One key per row for this round's draft noise, apart from the noise that verifies."""
    keys = smp.round_keys(smp.row_keys(state.key_data), state.length)
    return smp.position_keys(keys, smp.DRAFT, state.length[:, None])[:, 0]


def cut(proposal: Proposal, least: Float[Array, " K"]) -> Proposal:
    """The proposal up to the first draft of which the chance that it and all before it are kept is below ``least``.

    A draft's confidence is made from the drafts before it, so the cut says nothing about the draft itself.
    """
    if proposal.confidence is None:
        return proposal
    worth = jnp.cumprod(proposal.confidence, 1) >= least
    count = jnp.sum(jnp.cumprod(worth.astype(jnp.int32), 1), 1, dtype=jnp.int32)
    return dataclasses.replace(proposal, count=jnp.minimum(proposal.count, count))


def verify(
    pair: Pair,
    weights: Weights,
    state: State,
    proposal: Proposal,
    rule: Rule | None = None,
    logprobs: bool = False,
    widths: tuple[int, ...] = (),
) -> tuple[State, Verdict, Int[Array, ""]]:
    """Check a proposal in one forward pass and commit what is kept.

    ``widths``: other numbers of drafts to compile for; the narrowest that holds every row's count runs.
    Returns the new state, the verdict, and how many positions per row the target ran over.
    """
    k = proposal.tokens.shape[1]
    rule = rule or natural_rule(proposal)
    count = jnp.where(state.done, 0, jnp.minimum(proposal.count, state.limit - state.length - 1))
    sizes = sorted({w for w in widths if w < k} | {k})
    chosen = jnp.sum(jnp.max(count) > jnp.asarray(sizes[:-1], jnp.int32), dtype=jnp.int32)
    steps = [functools.partial(_verify_width, pair, w, k, rule, logprobs) for w in sizes]
    state, verdict = _run_one(steps, chosen, weights, state, proposal, count)
    return state, verdict, jnp.asarray(sizes, jnp.int32)[chosen] + 1


def _run_one(steps: list[Any], chosen, weights, state: State, proposal: Proposal, count):
    """Run ``steps[chosen]``.

    Each step sits in a loop of at most one turn rather than in a branch of ``lax.switch``: XLA updates the
    caches of a loop in place, but copies them whole on the way through a conditional.
    """
    if len(steps) == 1:
        return steps[0](weights, state, proposal, count)
    shape = jax.eval_shape(steps[0], weights, state, proposal, count)[1]
    carry = (chosen, state, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape))
    for i, step in enumerate(steps):
        selected = functools.partial(_selected, i)
        once = functools.partial(_once, step, weights, proposal, count)
        carry = jax.lax.while_loop(selected, once, carry)
    return carry[1:]


def _selected(i: int, carry):
    return carry[0] == i


def _once(step, weights, proposal: Proposal, count, carry):
    return (jnp.int32(-1), *step(weights, carry[1], proposal, count))


def natural_rule(proposal: Proposal) -> Rule:
    """``reject`` when the drafter says what it drew from, ``match`` otherwise."""
    return "match" if proposal.q is None else "reject"


def _verify_width(pair: Pair, width: int, k: int, rule, logprobs, weights, state: State, proposal, count):
    proposal = truncated(proposal, width)
    block, pos = block_of(state, proposal)
    out = look(pair, weights, state, block, pos)
    verdict = judge(pair, weights, state, out.hidden, proposal, count, rule, logprobs)
    state = settle(pair, state, out.cache, verdict)
    state = inject(pair, weights, state, block, verdict.out_tokens, pos, verdict.emitted, out, "verify")
    pad = lambda x: jnp.pad(x, ((0, 0), (0, k - width)))  # noqa: E731
    return state, dataclasses.replace(
        verdict, out_tokens=pad(verdict.out_tokens), logprobs=pad(verdict.logprobs)
    )


def block_of(state: State, proposal: Proposal) -> tuple[Int[Array, "B Q"], Int[Array, "B Q"]]:
    """What is verified: the anchor and the drafts behind it, and their positions."""
    anchor = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, 1)
    block = jnp.concatenate([anchor, proposal.tokens], 1)
    return block, state.length[:, None] - 1 + jnp.arange(block.shape[1])


@jax.named_scope("verify")
def look(pair: Pair, weights: Weights, state: State, block, pos) -> TargetOut:
    """The target's pass over a block; nothing is committed."""
    target, cfg = registry.target(pair.family), pair.target_cfg
    valid = jnp.full(state.length.shape, block.shape[1], jnp.int32)
    return target.forward(weights[0], cfg, block, pos, valid, state.target, needs(pair), "verify")


@jax.named_scope("accept")
def judge(
    pair: Pair, weights: Weights, state: State, hidden, proposal: Proposal, count, rule, logprobs
) -> Verdict:
    """How many drafts are kept, and the target's own token behind them."""
    unembed = functools.partial(registry.target(pair.family).unembed, weights[0], pair.target_cfg)
    best = streamed(pair, weights)
    return accept(hidden, unembed, proposal, count, ~state.done, state, rule, logprobs, best=best)


def streamed(pair: Pair, weights: Weights) -> Best | None:
    """The target's best tokens without its logits, if its family knows how."""
    best = getattr(registry.target(pair.family), "best", None)
    return None if best is None else functools.partial(best, weights[0], pair.target_cfg)


@jax.named_scope("commit")
def settle(pair: Pair, state: State, cache: Any, verdict: Verdict) -> State:
    """The state with what was emitted, ``cache`` being the target's after :func:`look`."""
    cache = registry.target(pair.family).commit(pair.target_cfg, cache, verdict.emitted)
    return commit(dataclasses.replace(state, target=cache), verdict)


def truncated(proposal: Proposal, width: int) -> Proposal:
    """The first ``width`` drafts; ``count`` stays as it is."""
    cut = lambda x: None if x is None else x[:, :width]  # noqa: E731
    return dataclasses.replace(
        proposal, tokens=cut(proposal.tokens), q=cut(proposal.q), confidence=cut(proposal.confidence)
    )


def commit(state: State, verdict: Verdict) -> State:
    """Write the emitted tokens and everything that follows from their number."""
    q = verdict.out_tokens.shape[1]
    offset = jnp.arange(state.tokens.shape[1]) - state.length[:, None]
    fresh = (offset >= 0) & (offset < verdict.emitted[:, None])
    written = jnp.take_along_axis(verdict.out_tokens, jnp.clip(offset, 0, q - 1), 1)
    counts = state.counts
    if counts is not None:
        counts = smp.count_tokens(counts, verdict.out_tokens, verdict.emitted)
    return dataclasses.replace(
        state,
        tokens=jnp.where(fresh, written, state.tokens),
        length=state.length + verdict.emitted,
        done=state.done | (verdict.reason != RUNNING),
        reason=jnp.where(state.done, state.reason, verdict.reason),
        counts=counts,
    )


def ready(pair: Pair, weights: Weights) -> Weights:
    """Weights for a program of many rounds: what a drafter would make of them in every round is made once."""
    make = None if pair.drafter is None else getattr(registry.drafter(pair.drafter), "ready", None)
    if make is None:
        return weights
    shared = registry.target(pair.family).shared(weights[0], pair.target_cfg)
    return weights[0], make(weights[1], shared, pair.drafter_cfg)


def needs(pair: Pair) -> TapSpec:
    """What the drafter asks of the target's forward pass."""
    if pair.drafter is None:
        return TapSpec()
    return registry.drafter(pair.drafter).NEEDS(pair.drafter_cfg)


@jax.named_scope("inject")
def inject(
    pair: Pair, weights, state: State, tokens, next_tokens, pos, keep, out, mode: Mode, before=None
) -> State:
    """Hand the target's features ``out`` of a block to the drafter."""
    if pair.drafter is None:
        return state
    hidden = out.hidden if needs(pair).hidden else None
    block = AbsorbIn(tokens, next_tokens, pos, keep, hidden, out.taps, mode, before)
    shared = registry.target(pair.family).shared(weights[0], pair.target_cfg)
    dstate = registry.drafter(pair.drafter).absorb(weights[1], shared, pair.drafter_cfg, state.drafter, block)
    return dataclasses.replace(state, drafter=dstate)


def prefill(
    pair: Pair,
    weights: Weights,
    state: State,
    start: Int[Array, " B"],
    width: int,
    rule: Rule = "match",
    logprobs: bool = False,
) -> tuple[State, Verdict]:
    """Feed ``width`` prompt positions per row from ``start`` on; rows that reach their prompt's end draw
    their first token (the same acceptance with nothing drafted) in the same pass.

    Positions at or beyond a row's prompt are padding. Rows whose prompt ended earlier are left alone.
    """
    target, cfg = registry.target(pair.family), pair.target_cfg
    pos = start[:, None] + jnp.arange(width)
    last = state.tokens.shape[1] - 1
    block = jnp.take_along_axis(state.tokens, jnp.minimum(pos, last), 1)
    feeding = ~state.done & (start < state.prompt_len)
    valid = jnp.where(feeding, jnp.clip(state.prompt_len - start, 0, width), 0)
    out = target.forward(weights[0], cfg, block, pos, valid, state.target, needs(pair), "extend")
    ends = feeding & (start + width >= state.prompt_len)
    hidden = jnp.take_along_axis(out.hidden, jnp.maximum(valid - 1, 0)[:, None, None], 1)
    empty = Proposal(block[:, :0], jnp.zeros_like(valid))
    unembed = functools.partial(target.unembed, weights[0], cfg)
    best = streamed(pair, weights)
    verdict = accept(hidden, unembed, empty, empty.count, ends, state, rule, logprobs, best=best)
    state = commit(dataclasses.replace(state, target=out.cache), verdict)
    # both from the state after: a drafter that reads tokens alone waits for the target, else XLA runs the two side by
    # side and needs their temporaries at once
    tokens, following = (jnp.take_along_axis(state.tokens, jnp.minimum(at, last), 1) for at in (pos, pos + 1))
    return inject(pair, weights, state, tokens, following, pos, valid, out, "extend"), verdict


def finish(state: State, rows: Array) -> State:
    """Mark rows as done from the host (a stop string, a cancelled request)."""
    return dataclasses.replace(
        state, done=state.done | rows, reason=jnp.where(rows & ~state.done, LENGTH, state.reason)
    )


def insert(state: State, rows: Int[Array, " b"], part: State) -> State:
    """Overwrite rows of every leaf with those of ``part``; distinct ``rows``, those beyond the last go nowhere."""
    put = lambda whole, new: whole.at[rows].set(new, mode="drop", unique_indices=True)  # noqa: E731
    return jax.tree.map(put, state, part)
