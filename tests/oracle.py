"""Acceptance and sampling as plain loops over rows, in float64, with the library's own random numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax.core import sampling as smp
from specjax.types import LENGTH, NONFINITE, RUNNING, STOP

INF = float("inf")


def adjust(logits, row, history, prompt):
    """Bias and penalties of one position: ``history`` are the emitted tokens before it."""
    out = np.array(logits, np.float64) + row.get("bias", 0.0)
    for t in range(len(out)):
        times = history.count(t)
        if times or t in prompt:
            r = row.get("repetition", 1.0)
            out[t] = out[t] / r if out[t] > 0 else out[t] * r
        out[t] -= row.get("frequency", 0.0) * times + row.get("presence", 0.0) * (times > 0)
    return out


def allowed(logits, row):
    """Ids that survive top-k, top-p and min-p, by sorting; ties at a threshold stay."""
    keep = np.ones(len(logits), bool)
    k = row.get("top_k", 0)
    if 0 < k < len(logits):
        keep &= logits >= np.sort(logits)[-k]
    p = row.get("top_p", 1.0)
    if p < 1:
        probs = softmax(np.where(keep, logits, -INF))
        order = np.sort(probs)[::-1]
        last = np.flatnonzero(np.cumsum(order) >= p)
        keep &= probs >= (order[last[0]] if last.size else 0.0)
    if row.get("min_p", 0.0) > 0:
        probs = softmax(np.where(keep, logits, -INF))
        keep &= probs >= row["min_p"] * probs.max() * (1 - 1e-9)
    return keep


def softmax(x):
    weight = np.exp(np.asarray(x, np.float64) - np.max(x))
    return weight / weight.sum()


def law(logits, row, history=(), prompt=()):
    """(what an arg-max reads, probabilities a token is drawn from) at one position."""
    adjusted = adjust(logits, row, list(history), prompt)
    temperature = row.get("temperature", 0.0)
    if temperature == 0:
        return adjusted, None
    cut = adjusted / temperature
    return adjusted, softmax(np.where(allowed(cut, row), cut, -INF))


@functools.partial(jax.jit, static_argnums=(2, 3))
def noise(key_data, length, q, vocab):
    """Random numbers of one row and round: what each tag draws at each of q positions."""
    keys = smp.row_keys(key_data[None])
    pos = length + jnp.arange(q)[None]
    rounds = smp.round_keys(keys, length[None])
    return {
        "match": smp.gumbel(smp.position_keys(keys, smp.MATCH, pos), vocab)[0],
        "extra": smp.gumbel(smp.position_keys(rounds, smp.EXTRA, pos), vocab)[0],
        "accept": jax.vmap(jax.random.uniform)(smp.position_keys(rounds, smp.ACCEPT, pos)[0]),
    }


def accept_row(logits, drafts, row, rule, q=None):
    """One row decided token by token: ``(accepted, tokens emitted, reason, log-probabilities)``.

    ``logits`` [Q V] raw; ``drafts`` the valid ones only; ``row`` a dict of sampling values with ``length``,
    ``limit``, ``stops``, ``key``, ``history``, ``prompt``; ``q`` [K V] over the target's ids, None = point.
    """
    random = None
    if row.get("key") is not None:
        random = noise(row["key"], row["length"], logits.shape[0], logits.shape[1])
        random = {name: np.asarray(x, np.float64) for name, x in random.items()}
    tokens, scores, accepted = [], [], 0
    keep = len(drafts)
    if rule == "block" and random is not None and row.get("temperature", 0.0) > 0:
        keep, weight = _block(logits, drafts, row, random["accept"], q)
        random |= {"keep": keep, "weight": weight}
    for i in range(len(drafts) + 1):
        if row["length"] + len(tokens) >= row["limit"]:
            return accepted, tokens, LENGTH, scores
        history = [*row.get("history", ()), *drafts[:i]]
        raw = np.asarray(logits[i], np.float64)
        with np.errstate(invalid="ignore"):
            if not np.isfinite(np.max(raw)):
                return accepted, tokens, NONFINITE, scores
        adjusted, probs = law(raw, row, history, row.get("prompt", ()))
        draft = drafts[i] if i < len(drafts) else None
        token = _decide(i, draft, adjusted, probs, random, rule, None if q is None or draft is None else q[i])
        tokens.append(token)
        scores.append(raw[token] - np.log(np.exp(raw - raw.max()).sum()) - raw.max())
        kept = token == draft and i < keep
        accepted += kept
        if token in row.get("stops", ()):
            return accepted, tokens, STOP, scores
        if not kept:
            break
    full = row["length"] + len(tokens) >= row["limit"]
    return accepted, tokens, LENGTH if full else RUNNING, scores


def _decide(i, draft, adjusted, probs, random, rule, q):
    """The token at one position; the draft itself when it is accepted."""
    if probs is None:
        return int(np.argmax(adjusted))
    with np.errstate(divide="ignore"):
        if rule == "match":
            return int(np.argmax(np.log(probs) + random["match"][i]))
        if rule == "block":
            weight = random["weight"] if i == random["keep"] else None
            return draft if weight is None else int(np.argmax(np.log(weight) + random["extra"][i]))
        weight = probs
        if draft is not None:
            exists = 0 <= draft < len(probs)
            if exists and random["accept"][i] * (1.0 if q is None else q[draft]) < probs[draft]:
                return draft
            weight = np.maximum(probs - (np.arange(len(probs)) == draft if q is None else q), 0)
            weight = probs if weight.sum() == 0 else weight
        return int(np.argmax(np.log(weight) + random["extra"][i]))


def chances(p, q, drafts):
    """Block verification of one row: ``(chance that the first i drafts are kept, given that no longer prefix is,
    for i = 0..K; what the extra token is drawn from, up to a factor, behind i drafts)``.

    ``p`` are the K + 1 target laws along the drafts, ``q`` the K draft laws.
    """
    k, reach = len(drafts), [1.0]
    for i, token in enumerate(drafts):
        ratio = p[i][token] / (q[i][token] or 1.0) if 0 <= token < len(p[i]) else 0.0
        reach.append(min(reach[-1] * ratio, 1.0))
    over = [np.maximum(reach[i] * p[i] - q[i], 0) for i in range(k)]
    inner = [
        o.sum() / (o.sum() + 1 - r) if o.sum() + 1 - r > 0 else 1.0 for o, r in zip(over, reach, strict=False)
    ]
    return [*inner, reach[k]], [*over, p[k]]


def _block(logits, drafts, row, u, q):
    """(drafts kept, weights of the extra token): drafts at and behind a bad position do not exist."""
    p = []
    for i in range(len(drafts) + 1):
        history = [*row.get("history", ()), *drafts[:i]]
        with np.errstate(invalid="ignore"):
            if not np.isfinite(np.max(np.asarray(logits[i], np.float64))):
                break
        p.append(law(logits[i], row, history, row.get("prompt", ()))[1])
    if not p:
        return 0, None
    broken = len(p) <= len(drafts)
    drafts = drafts[: len(p)] if broken else drafts
    vocab = len(p[0])
    point = [(np.arange(vocab) == d).astype(float) for d in drafts]
    p += [np.full(vocab, 1 / vocab)] * broken  # never drawn from: the row ends there
    chance, weights = chances(p, point if q is None else q, drafts)
    keep = max([i for i in range(1, len(drafts) + 1) if u[i - 1] < chance[i]], default=0)
    weight = weights[keep]
    return keep, weight if weight.sum() > 0 else p[keep]
