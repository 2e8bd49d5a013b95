"""DSpark's heads: a low-rank correction of each draft's logits by the token before it, and a confidence.

Source: DeepSpec (``vanilla``, ``gated`` and ``rnn`` heads) and speculators, whose names and orders of
concatenation are the same.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.drafters.pick import greedy, pick
from specjax.kernels import dispatch
from specjax.layers.linear import linear
from specjax.types import ArraySpec

Kind = Literal["vanilla", "gated", "rnn"]


@dataclasses.dataclass(frozen=True)
class Settings:
    """Rank and kind of the correction; ``vocab``: rows of the table of previous tokens, which are target ids."""

    rank: int
    kind: Kind
    vocab: int


@struct.dataclass
class Markov:
    """Weights of the correction. ``mix`` and ``bias`` belong to the gate (``Z = R``) or to the recurrence (``3R``)."""

    before: Float[Array, "V R"]
    after: Float[Array, "U R"]
    mix: Float[Array, "Z Y"] | None
    bias: Float[Array, " Z"] | None


@struct.dataclass
class Confidence:
    """Weights of the confidence; it reads the hidden row and, if ``Y`` is wider, the previous token's vector."""

    weight: Float[Array, "1 Y"]
    bias: Float[Array, " 1"]


def markov_specs(cfg: Settings, head: int, width: int) -> Markov:
    """Specs of the correction for ``head`` draft ids."""
    r, name = cfg.rank, "markov_head."
    project, rows, columns = {
        "vanilla": ("", 0, 0),
        "gated": ("gate_proj", r, width + r),
        "rnn": ("joint_proj", 3 * r, 2 * r + width),
    }[cfg.kind]
    spec = lambda shape, axes, rest, init="normal": ArraySpec(shape, axes, (name + rest,), init)  # noqa: E731
    return Markov(
        before=spec((cfg.vocab, r), ("vocab", None), "markov_w1.weight"),
        after=spec((head, r), ("vocab", None), "markov_w2.weight"),
        mix=spec((rows, columns), (None, None), f"{project}.weight") if project else None,
        bias=spec((rows,), (None,), f"{project}.bias", "zeros") if project else None,
    )


def confidence_specs(width: int) -> Confidence:
    """Specs of the confidence head over inputs of a width."""
    return Confidence(
        ArraySpec((1, width), (None, None), ("confidence_head.proj.weight",)),
        ArraySpec((1,), (None,), ("confidence_head.proj.bias",), "zeros"),
    )


def start(p: Markov, rows: int) -> Float[Array, "B R"]:
    """State of the recurrence before the first draft."""
    return jnp.zeros((rows, p.before.shape[1]), p.before.dtype)


def vectors(
    p: Markov,
    cfg: Settings,
    previous: Float[Array, "*B R"],
    hidden: Float[Array, "*B D"],
    state: Float[Array, "*B R"],
) -> tuple[Float[Array, "*B R"], Float[Array, "*B R"]]:
    """What the table ``after`` is multiplied with to correct a position, and the next state (only "rnn" has one)."""
    x = previous
    if cfg.kind == "gated":
        x = jax.nn.sigmoid(linear(jnp.concatenate([hidden, previous], -1), p.mix, p.bias)) * previous
    elif cfg.kind == "rnn":
        mixed = linear(jnp.concatenate([state, previous, hidden], -1), p.mix, p.bias)
        gate, candidate, out = jnp.split(mixed, 3, -1)
        gate = jax.nn.sigmoid(gate)
        state = gate * state + (1 - gate) * jnp.tanh(candidate)
        x = jnp.tanh(out)
    return x, state


def walk(
    p: Markov,
    cfg: Settings,
    hidden: Float[Array, "B K D"],
    logits: Float[Array, "B K U"],
    anchor: Int[Array, " B"],
    ids: Int[Array, " U"] | None,
    keys: Array | None,
    temperature: Float[Array, " B"] | None,
) -> tuple[Int[Array, "B K"], Float[Array, "B K U"] | None, Float[Array, "B K R"]]:
    """Tokens left to right, each from logits corrected by the one before it (the anchor for the first).

    Returns target ids, the distributions they were drawn from (None when greedy), and the vectors of the
    tokens before them. ``ids``: target id of every draft id, None when they are the same.
    """
    if cfg.kind == "vanilla" and greedy(keys, temperature) and p.before.dtype == hidden.dtype:
        return best_walk(p, logits, anchor, ids)
    return _walk(p, cfg, hidden, logits, anchor, ids, keys, temperature)


def best_walk(
    p: Markov, logits: Float[Array, "B K U"], anchor: Int[Array, " B"], ids: Int[Array, " S"] | None
) -> tuple[Int[Array, "B K"], None, Float[Array, "B K R"]]:
    """:func:`walk` of a vanilla head that takes the best token: on a GPU by a kernel."""

    def reference(before, after, logits, anchor, ids=None):
        head, cfg = Markov(before, after, None, None), Settings(before.shape[1], "vanilla", before.shape[0])
        unread = jnp.zeros((*logits.shape[:2], 1), before.dtype)
        return _walk(head, cfg, unread, logits, anchor, ids, None, None)[0]

    run = dispatch.implementation("markov", (p.before, p.after, logits, ids), reference)
    tokens = run(p.before, p.after, logits, anchor, *(() if ids is None else (ids,)))
    return tokens, None, p.before[jnp.concatenate([anchor[:, None], tokens[:, :-1]], 1)]


def _walk(p: Markov, cfg: Settings, hidden, logits, anchor, ids, keys, temperature):
    token, state = anchor, start(p, anchor.shape[0])
    tokens, drawn, before = [], [], []
    for t in range(logits.shape[1]):
        previous = p.before[token].astype(hidden.dtype)
        x, state = vectors(p, cfg, previous, hidden[:, t], state)
        more = fit(linear(x, p.after, out_dtype=jnp.float32), logits.shape[2])
        chosen, q = pick(logits[:, t] + more, keys, t, temperature)
        token = chosen if ids is None else ids[chosen]
        tokens.append(token)
        drawn.append(q)
        before.append(previous)
    q = None if drawn[0] is None else jnp.stack(drawn, 1)
    return jnp.stack(tokens, 1), q, jnp.stack(before, 1)


def fit(more: Float[Array, "*B U"], size: int) -> Float[Array, "*B V"]:
    """The correction for ``size`` ids: tables differ in rows of padding."""
    wider = ((0, 0),) * (more.ndim - 1)
    return jnp.pad(more, (*wider, (0, max(0, size - more.shape[-1]))))[..., :size]


def confidence(
    p: Confidence, hidden: Float[Array, "B K D"], before: Float[Array, "B K R"] | None
) -> Float[Array, "B K"]:
    """Chance that a draft is accepted if all before it are; it knows the drafts before it and not the draft."""
    return jax.nn.sigmoid(confidence_logits(p, hidden, before))


def confidence_logits(
    p: Confidence, hidden: Float[Array, "*B D"], before: Float[Array, "*B R"] | None
) -> Float[Array, "*B"]:
    """float32 log odds of it."""
    x = hidden.astype(jnp.float32)
    if before is not None:
        x = jnp.concatenate([x, before.astype(jnp.float32)], -1)
    return linear(x, p.weight.astype(jnp.float32), p.bias.astype(jnp.float32))[..., 0]
