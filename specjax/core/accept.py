"""Acceptance: how much of a proposal the target keeps, and the one token it adds itself.

``match`` draws the target's token at every position and keeps drafts while they equal the draw. Exact for
any drafter and any temperature; with the same seed it emits what plain decoding emits.
``reject`` is the ratio test with a residual draw (Leviathan et al., arXiv 2211.17192); a deterministic
draft is a point mass, whose residual is the target without that token.

``accept`` takes the target's hidden states, not logits: positions are unembedded in blocks whose float32
logits stay under a limit, and the result does not depend on the block size.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.core import sampling as smp
from specjax.types import LENGTH, NONFINITE, RUNNING, STOP, Proposal, Rule, State, Verdict

#: Bytes of float32 logits held at once; about three temporaries of this size live beside them.
LOGIT_BYTES = 256 * 2**20

Unembed = Callable[[Float[Array, "B Q D"]], Float[Array, "B Q V"]]


def accept(
    hidden: Float[Array, "B Q D"],
    unembed: Unembed,
    proposal: Proposal,
    count: Int[Array, " B"],
    active: Bool[Array, " B"],
    state: State,
    rule: Rule,
    logprobs: bool,
    logit_bytes: int = LOGIT_BYTES,
) -> Verdict:
    """Decide the tokens at positions ``length .. length + count`` of each active row.

    ``proposal.tokens`` is [B, Q-1]; only the first ``count`` of a row are tested. Inactive rows emit
    nothing. A row whose logits are not finite ends with reason NONFINITE and emits nothing there.
    """
    rows = _Rows(unembed, proposal.tokens, state, logprobs)
    if rule == "match" or state.sampling.greedy:
        accepted, tokens, scores, bad = _match(hidden, rows, count, logit_bytes)
    else:
        accepted, tokens, scores, bad = _reject(hidden, rows, proposal, count, logit_bytes)
    return _finish(accepted, tokens, scores, bad, active, state)


class _Rows:
    """Inputs shared by the rules, with the head applied on demand."""

    def __init__(self, unembed: Unembed, drafts, state: State, logprobs: bool):
        self.unembed, self.drafts, self.state, self.logprobs = unembed, drafts, state, logprobs
        self.keys = None if state.sampling.greedy else smp.row_keys(state.key_data)

    @property
    def sampled(self) -> Bool[Array, " B"]:
        """Rows that draw; the others take the argmax."""
        temperature = self.state.sampling.temperature
        return self.state.done & False if temperature is None else temperature > 0

    def processed(self, hidden, drafts, first):
        """(raw, before temperature, what is drawn from) float32 logits of some positions."""
        sampling = self.state.sampling
        raw = self.unembed(hidden)
        adjusted = smp.adjust(raw, sampling, self.state.counts, drafts, first)
        if sampling.greedy:
            return raw, adjusted, adjusted
        cut = smp.temper(adjusted, sampling.temperature)
        return raw, adjusted, smp.filtered(cut, sampling) if sampling.filtered else cut

    def score(self, raw, tokens):
        """Raw log-softmax of the tokens (before bias, penalties and temperature)."""
        if not self.logprobs:
            return jnp.zeros(tokens.shape, jnp.float32)
        return _take(raw, tokens) - jax.nn.logsumexp(raw, -1)


def _match(hidden, rows: _Rows, count, logit_bytes):
    sampling, length = rows.state.sampling, rows.state.length

    def block(part, first):
        raw, adjusted, logits = rows.processed(part, rows.drafts, first)
        tokens = jnp.argmax(adjusted, -1)
        if not sampling.greedy:
            pos = length[:, None] + first + jnp.arange(part.shape[1])
            noise = smp.gumbel(smp.position_keys(rows.keys, smp.MATCH, pos), raw.shape[-1])
            drawn = jnp.argmax(logits + noise, -1)
            tokens = jnp.where(rows.sampled[:, None], drawn, tokens)
        return tokens.astype(jnp.int32), rows.score(raw, tokens), smp.nonfinite(adjusted)

    tokens, scores, bad = _in_blocks(block, hidden, rows, logit_bytes)
    k = rows.drafts.shape[1]
    same = (tokens[:, :k] == rows.drafts) & (jnp.arange(k) < count[:, None]) & ~bad[:, :k]
    return _prefix(same), tokens, scores, bad


def _reject(hidden, rows: _Rows, proposal: Proposal, count, logit_bytes):
    length = rows.state.length
    k = rows.drafts.shape[1]
    padded = jnp.pad(rows.drafts, ((0, 0), (0, 1)))  # the bonus position has no draft

    def block(part, first):
        raw, adjusted, logits = rows.processed(part, rows.drafts, first)
        roomy = jnp.pad(padded, ((0, 0), (0, part.shape[1])))  # the last block may reach beyond the end
        drafts = jax.lax.dynamic_slice_in_dim(roomy, first, part.shape[1], 1)
        p = jnp.exp(_take(logits, drafts) - jax.nn.logsumexp(logits, -1))
        top = jnp.argmax(adjusted, -1) == drafts
        return p, top, rows.score(raw, drafts), smp.nonfinite(adjusted)

    p, top, scores, bad = _in_blocks(block, hidden, rows, logit_bytes)
    keys = smp.round_keys(rows.keys, length)
    pos = length[:, None] + jnp.arange(k + 1)
    u = jax.vmap(jax.vmap(jax.random.uniform))(smp.position_keys(keys, smp.ACCEPT, pos))[:, :k]
    passed = u * _draft_probability(proposal) < p[:, :k]
    passed = jnp.where(rows.sampled[:, None], passed, top[:, :k])
    accepted = _prefix(passed & (jnp.arange(k) < count[:, None]) & ~bad[:, :k])
    extra, extra_score = _extra(hidden, rows, proposal, accepted, count, keys)
    at_cut = jnp.arange(k + 1) == accepted[:, None]
    tokens = jnp.where(at_cut, extra[:, None], padded)
    return accepted, tokens, jnp.where(at_cut, extra_score[:, None], scores), bad


def _extra(hidden, rows: _Rows, proposal: Proposal, accepted, count, keys):
    """The token after the accepted prefix: residual after a rejection, the target's own otherwise."""
    length = rows.state.length
    row = jnp.take_along_axis(hidden, accepted[:, None, None], 1)
    raw, adjusted, logits = _at_cut(rows, row, accepted)
    p = jax.nn.softmax(logits[:, 0], -1)
    residual = jnp.maximum(p - _draft_row(proposal, accepted, p.shape[-1]), 0)
    rejected = (accepted < count) & (jnp.sum(residual, -1) > 0)
    weight = jnp.where(rejected[:, None], residual, p)
    noise = smp.gumbel(smp.position_keys(keys, smp.EXTRA, (length + accepted)[:, None]), p.shape[-1])
    drawn = jnp.argmax(jnp.log(weight) + noise[:, 0], -1)
    token = jnp.where(rows.sampled, drawn, jnp.argmax(adjusted[:, 0], -1)).astype(jnp.int32)
    return token, rows.score(raw, token[:, None])[:, 0]


def _at_cut(rows: _Rows, row, accepted):
    """Processed logits at a per-row cut: count the accepted drafts into the history first."""
    state = rows.state
    if state.counts is None:
        return rows.processed(row, rows.drafts[:, :0], 0)
    counts = smp.count_tokens(state.counts, rows.drafts, accepted)
    at = _Rows(rows.unembed, rows.drafts[:, :0], dataclasses.replace(state, counts=counts), rows.logprobs)
    return at.processed(row, at.drafts, 0)


def _draft_probability(proposal: Proposal) -> Float[Array, "B K"]:
    """q of each drafted token: 1 where the row is a point mass."""
    one = jnp.ones(proposal.tokens.shape, jnp.float32)
    if proposal.q is None:
        return one
    q = proposal.q.astype(jnp.float32)
    if proposal.q_ids is None:
        drawn = _take(q, proposal.tokens)
    else:
        drawn = jnp.sum(jnp.where(proposal.q_ids == proposal.tokens[..., None], q, 0), -1)
    return drawn if proposal.point is None else jnp.where(proposal.point[:, None], one, drawn)


def _draft_row(proposal: Proposal, index, vocab: int) -> Float[Array, "B V"]:
    """Draft distribution over the target vocabulary at one position per row."""
    k = proposal.tokens.shape[1]
    if k == 0:
        return jnp.zeros((index.shape[0], vocab), jnp.float32)
    at = jnp.minimum(index, k - 1)[:, None]
    token = jnp.take_along_axis(proposal.tokens, at, 1)
    one_hot = (token == jnp.arange(vocab)).astype(jnp.float32)
    if proposal.q is None:
        return one_hot
    q = jnp.take_along_axis(proposal.q, at[..., None], 1)[:, 0].astype(jnp.float32)
    if proposal.q_ids is not None:
        q = jnp.zeros((q.shape[0], vocab), jnp.float32).at[:, proposal.q_ids].set(q)
    return q if proposal.point is None else jnp.where(proposal.point[:, None], one_hot, q)


def _in_blocks(block, hidden, rows: _Rows, logit_bytes: int):
    """Apply ``block(hidden part, index of its first position)`` over positions, a few at a time."""
    b, q = hidden.shape[:2]
    vocab = jax.eval_shape(rows.unembed, hidden[:, :1]).shape[-1]
    size = max(1, min(q, logit_bytes // (4 * b * vocab)))
    if size >= q:
        return block(hidden, 0)
    parts = -(-q // size)
    stacked = jnp.pad(hidden, ((0, 0), (0, parts * size - q), (0, 0)))
    stacked = stacked.reshape(b, parts, size, -1).swapaxes(0, 1)
    out = jax.lax.map(lambda x: block(x[0], x[1]), (stacked, jnp.arange(parts) * size))
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(b, parts * size)[:, :q], out)


def _finish(accepted, tokens, scores, bad, active, state: State) -> Verdict:
    """Cut at the first stop id or bad row and at the budget: ``emitted`` is the one number used after."""
    index = jnp.arange(tokens.shape[1])
    room = jnp.where(active, state.limit - state.length, 0)
    wanted = jnp.minimum(accepted + 1, room)
    usable = _prefix(~bad)
    stops = (tokens[:, :, None] == state.stop_ids[:, None, :]).any(-1) & (index < wanted[:, None])
    first_stop = jnp.where(stops.any(1), jnp.argmax(stops, 1), tokens.shape[1])
    emitted = jnp.minimum(jnp.minimum(wanted, first_stop + 1), usable)
    stopped = active & (first_stop < emitted)
    broken = active & ~stopped & (usable < wanted)
    full = active & (state.length + emitted >= state.limit)
    reason = jnp.where(stopped, STOP, jnp.where(broken, NONFINITE, jnp.where(full, LENGTH, RUNNING)))
    return Verdict(
        accepted=jnp.minimum(accepted, emitted).astype(jnp.int32),
        out_tokens=tokens.astype(jnp.int32),
        emitted=emitted.astype(jnp.int32),
        reason=reason.astype(jnp.int32),
        logprobs=scores,
    )


def _prefix(flags: Bool[Array, "B N"]) -> Int[Array, " B"]:
    """Length of the leading run of True."""
    return jnp.sum(jnp.cumprod(flags.astype(jnp.int32), 1), 1, dtype=jnp.int32)


def _take(values: Float[Array, "B N V"], index: Int[Array, "B N"]) -> Float[Array, "B N"]:
    return jnp.take_along_axis(values, index[..., None], -1)[..., 0]
