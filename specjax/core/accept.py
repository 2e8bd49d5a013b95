"""Acceptance: how much of a proposal the target keeps, and the one token it adds itself.

``match`` draws the target's token at every position and keeps drafts while they equal the draw. Exact for
any drafter and any temperature; with the same seed it emits what plain decoding emits.
``reject`` is the ratio test with a residual draw (Leviathan et al., arXiv 2211.17192); a deterministic
draft is a point mass, whose residual is the target without that token.
``block`` decides the whole block at once and keeps at least as many drafts on average (Sun et al., arXiv
2403.10444): a token the target likes more than the drafter does pays for a later one it likes less.

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
#: ``best(hidden, lse)``: largest logit of every row, its id and the logsumexp of all, if asked for.
Best = Callable[[Float[Array, "B Q D"], bool], tuple[Array, Array, Array | None]]


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
    best: Best | None = None,
) -> Verdict:
    """Decide the tokens at positions ``length .. length + count`` of each active row.

    ``proposal.tokens`` is [B, Q-1]; only the first ``count`` of a row are tested. Inactive rows emit
    nothing. A row whose logits are not finite ends with reason NONFINITE and emits nothing there. ``best`` serves
    greedy rows whose logits nothing changes, without keeping them.
    """
    rows = _Rows(unembed, proposal.tokens, state, logprobs)
    if rule == "match" or state.sampling.greedy:
        accepted, tokens, scores, bad = _match(hidden, rows, count, logit_bytes, best)
    else:
        decide = _reject if rule == "reject" else _block
        accepted, tokens, scores, bad = decide(hidden, rows, proposal, count, logit_bytes)
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


def _match(hidden, rows: _Rows, count, logit_bytes, best: Best | None = None):
    sampling, length = rows.state.sampling, rows.state.length
    plain = sampling.greedy and sampling.bias is None and rows.state.counts is None

    def block(carry, part, first):
        if plain and best is not None:
            top, tokens, lse = best(part, rows.logprobs)
            scores = jnp.zeros(tokens.shape, jnp.float32) if lse is None else top - lse
            return carry, (tokens, scores, ~jnp.isfinite(top))
        raw, adjusted, logits = rows.processed(part, rows.drafts, first)
        tokens = jnp.argmax(adjusted, -1)
        if not sampling.greedy:
            pos = length[:, None] + first + jnp.arange(part.shape[1])
            noise = smp.gumbel(smp.position_keys(rows.keys, smp.MATCH, pos), raw.shape[-1])
            drawn = jnp.argmax(logits + noise, -1)
            tokens = jnp.where(rows.sampled[:, None], drawn, tokens)
        return carry, (tokens.astype(jnp.int32), rows.score(raw, tokens), smp.nonfinite(adjusted))

    tokens, scores, bad = _in_blocks(block, hidden, rows, logit_bytes)
    k = rows.drafts.shape[1]
    same = (tokens[:, :k] == rows.drafts) & (jnp.arange(k) < count[:, None]) & ~bad[:, :k]
    return _prefix(same), tokens, scores, bad


def _reject(hidden, rows: _Rows, proposal: Proposal, count, logit_bytes):
    k = rows.drafts.shape[1]

    def block(carry, part, first):
        raw, adjusted, logits = rows.processed(part, rows.drafts, first)
        drafts = _columns(rows.drafts, first, part.shape[1])
        p = _probability(logits, jax.nn.logsumexp(logits, -1), drafts)
        return carry, (
            p,
            jnp.argmax(adjusted, -1) == drafts,
            rows.score(raw, drafts),
            smp.nonfinite(adjusted),
        )

    p, top, scores, bad = _in_blocks(block, hidden, rows, logit_bytes)
    keys, u = _uniform(rows, k)
    passed = u * _draft_probability(proposal) < p[:, :k]
    passed = jnp.where(rows.sampled[:, None], passed, top[:, :k])
    accepted = _prefix(passed & (jnp.arange(k) < count[:, None]) & ~bad[:, :k])
    extra = _extra(hidden, rows, proposal, accepted, count, keys, jnp.ones(accepted.shape))
    return accepted, *_placed(rows.drafts, scores, accepted, *extra), bad


def _block(hidden, rows: _Rows, proposal: Proposal, count, logit_bytes):
    """``reach[:, i]``: the ratio of p and q over the first i drafts, capped at 1 on the way. ``surplus[:, i]``:
    the mass of reach * p above q at the position after them. Drafts behind a bad position do not exist."""
    k = rows.drafts.shape[1]
    q = _draft_probability(proposal)
    q = jnp.where(q > 0, q, 1)  # a token that cannot have been drawn from q counts as certain

    def block(reach, part, first):
        n = part.shape[1]
        raw, adjusted, logits = rows.processed(part, rows.drafts, first)
        drafts, norm = _columns(rows.drafts, first, n), jax.nn.logsumexp(logits, -1)
        ratio = _probability(logits, norm, drafts) / _columns(q, first, n)
        reaches = [reach]
        for i in range(n):
            reaches.append(jnp.minimum(reaches[-1] * ratio[:, i], 1.0))
        here = jnp.stack(reaches[:-1], 1)
        at = lambda i: jnp.broadcast_to(first + i, reach.shape)  # noqa: E731
        law = jnp.stack([_draft_row(proposal, at(i), logits.shape[-1]) for i in range(n)], 1)
        over = jnp.maximum(here[..., None] * jnp.exp(logits - norm[..., None]) - law, 0)
        top = jnp.argmax(adjusted, -1) == drafts
        return reaches[-1], (here, jnp.sum(over, -1), top, rows.score(raw, drafts), smp.nonfinite(adjusted))

    one = jnp.ones(count.shape, jnp.float32)
    reach, surplus, top, scores, bad = _in_blocks(block, hidden, rows, logit_bytes, one)
    count = jnp.minimum(count, _prefix(~bad))
    keys, u = _uniform(rows, k)
    length = jnp.arange(1, k + 1)
    passed = (u < _chances(reach, surplus, count)[:, 1:]) & (length <= count[:, None])
    longest = jnp.max(jnp.where(passed, length, 0), 1, initial=0)
    accepted = jnp.where(rows.sampled, longest, _prefix(top[:, :k] & (length <= count[:, None])))
    at_cut = jnp.take_along_axis(reach, accepted[:, None], 1)[:, 0]
    extra = _extra(hidden, rows, proposal, accepted, count, keys, at_cut)
    return accepted, *_placed(rows.drafts, scores, accepted, *extra), bad


def _chances(reach: Float[Array, "B Q"], surplus: Float[Array, "B Q"], count: Int[Array, " B"]):
    """Chance that the first i drafts of a block are kept, given that no longer prefix is."""
    whole = surplus + 1 - reach
    inner = jnp.where(whole > 0, surplus / jnp.where(whole > 0, whole, 1), 1)
    return jnp.where(jnp.arange(reach.shape[1]) == count[:, None], reach, inner)


def _uniform(rows: _Rows, k: int):
    """This round's keys, and the number in [0, 1) that decides about each draft."""
    keys = smp.round_keys(rows.keys, rows.state.length)
    pos = rows.state.length[:, None] + jnp.arange(k)
    return keys, jax.vmap(jax.vmap(jax.random.uniform))(smp.position_keys(keys, smp.ACCEPT, pos))


def _columns(values: Array, first, n: int) -> Array:
    """``values[:, first : first + n]``, with ones where it ends before: the bonus position has no draft, and the
    last block of positions may reach beyond it."""
    roomy = jnp.pad(values, ((0, 0), (0, n + 1)), constant_values=1)
    return jax.lax.dynamic_slice_in_dim(roomy, first, n, 1)


def _probability(logits: Float[Array, "B N V"], norm: Float[Array, "B N"], tokens: Int[Array, "B N"]):
    """Probability of each token, 0 for ids that do not exist."""
    exists = (tokens >= 0) & (tokens < logits.shape[-1])
    return jnp.where(exists, jnp.exp(_take(logits, jnp.where(exists, tokens, 0)) - norm), 0)


def _placed(drafts, scores, accepted, extra, extra_score):
    """Tokens and scores of the block, with the extra token behind the accepted ones."""
    at_cut = jnp.arange(scores.shape[1]) == accepted[:, None]
    tokens = jnp.where(at_cut, extra[:, None], jnp.pad(drafts, ((0, 0), (0, 1))))
    return tokens, jnp.where(at_cut, extra_score[:, None], scores)


def _extra(hidden, rows: _Rows, proposal: Proposal, accepted, count, keys, reach):
    """The token after the accepted prefix: residual after a rejection, the target's own otherwise."""
    length = rows.state.length
    row = jnp.take_along_axis(hidden, accepted[:, None, None], 1)
    raw, adjusted, logits = _at_cut(rows, row, accepted)
    p = jax.nn.softmax(logits[:, 0], -1)
    residual = jnp.maximum(reach[:, None] * p - _draft_row(proposal, accepted, p.shape[-1]), 0)
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


def _in_blocks(block, hidden, rows: _Rows, logit_bytes: int, carry=()):
    """Apply ``block(carry, hidden part, index of its first position) -> (carry, results)`` over positions, a few
    at a time and in order."""
    b, q = hidden.shape[:2]
    vocab = jax.eval_shape(rows.unembed, hidden[:, :1]).shape[-1]
    size = max(1, min(q, logit_bytes // (4 * b * vocab)))
    if size >= q:
        return block(carry, hidden, 0)[1]
    parts = -(-q // size)
    stacked = jnp.pad(hidden, ((0, 0), (0, parts * size - q), (0, 0)))
    stacked = stacked.reshape(b, parts, size, -1).swapaxes(0, 1)
    _, out = jax.lax.scan(lambda c, x: block(c, *x), carry, (stacked, jnp.arange(parts) * size))
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
