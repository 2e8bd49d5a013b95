"""Training of drafters that draft one token after the other: every position of a text begins a round at once.

Row p of a text is the pair (what the target made of position p, token p + 1); it predicts token p + 2, and its anchor
is token p + 1. Step k of its round has the drafter's own last output in place of the target's feature, the text's token
p + 1 + k, position p + k, and predicts token p + 2 + k. It attends to the pairs that the first step made of positions
up to p, and to its own pairs of steps 1 to k: what decoding has in the cache at that moment, so that the numbers are
those of decoding, draft by draft.

Known as training-time test (EAGLE-3, arXiv 2503.01840). Steps after the first run over rows whose labels are trained
(:class:`Rows`).
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.layers import latent
from specjax.layers.latent import Latent
from specjax.layers.norm import plain
from specjax.train import losses
from specjax.train.attention import Own, attend_packed, take_rows, visible
from specjax.train.losses import Transform
from specjax.train.types import Batch, Features, Metrics, Recipe
from specjax.types import Shared

#: ``attention(index, layer, u, x)`` as :mod:`specjax.drafters.eagle3_model` has it.
Attention = Callable[[int, Any, Array, Array], tuple[Array, Array]]


@dataclasses.dataclass(frozen=True)
class Net:
    """A drafter's network in parts that its decoding is made of, too. All arrays are ``[R N ...]``.

    ``embed(tokens)``. ``through(embedded, feature, attention)``: the output, ``attention`` deciding which rows go on.
    ``recycled(output)``: what the next step gets for a feature. ``keys_values(layer, u, pos)``. ``queries(layer, u,
    pos)``: queries, and whatever ``output(layer, mixed, more)`` wants beside the mixture. ``windows``: one per layer.
    """

    embed: Callable[[Int[Array, "R N"]], Float[Array, "R N D"]]
    through: Callable[[Array, Array, Attention], Array]
    recycled: Callable[[Array], Array]
    keys_values: Callable[[Any, Array, Array], tuple[Array, Array]]
    queries: Callable[[Any, Array, Array], tuple[Array, Any]]
    output: Callable[[Any, Array, Any], Array]
    windows: tuple[int | None, ...]
    scale: float


def latent_parts(mla: Latent, eps: float, angles: Callable[[Array], Any]) -> dict[str, Callable]:
    """Three parts of a :class:`Net` with latent attention: one key/value head, whose keys are the latent and the rope
    channels, and whose values are the latent."""

    def keys_values(layer, u, pos):
        far, low = latent.keys_values(layer, mla, eps, u, angles(pos))
        return jnp.concatenate([low, far], -1), low

    def queries(layer, u, pos):
        return jnp.concatenate(latent.queries(layer, mla, eps, u, angles(pos)), -1), None

    def output(layer, mixed, _):
        return latent.output(layer, mla, mixed)

    return {"keys_values": keys_values, "queries": queries, "output": output}


#: Share of a row that rounds begin at, unless a recipe says otherwise: prompts take about a third of usual data.
SHARE = 0.75


def with_room(recipe: Recipe, given: Mapping[str, Any]) -> Recipe:
    """The recipe with ``answers`` for its length where it is not ``given``."""
    if "answers" in given:
        return recipe
    return dataclasses.replace(recipe, answers=max(1, round(SHARE * recipe.length)))


class Rows(NamedTuple):
    """Rows that begin a round. ``at`` None: all of them, in order."""

    at: Int[Array, "R N"] | None
    used: Bool[Array, "R N"]


def choose(batch: Batch, most: int | None, key: jax.Array) -> Rows:
    """Rows whose first label is trained; where a row of the batch has more than ``most``, that many at random."""
    first = labelled(batch, Rows(None, batch.doc >= 0), 1)[1][0]
    if most is None or most >= first.shape[1]:
        return Rows(None, first)
    drawn = jnp.where(first, jax.random.uniform(key, first.shape), -1.0)
    kept, index = jax.lax.top_k(drawn, most)
    order = jnp.argsort(index, -1)
    return Rows(jnp.take_along_axis(index, order, 1), jnp.take_along_axis(kept >= 0, order, 1))


def labelled(batch: Batch, rows: Rows, steps: int) -> tuple[Int[Array, "k R N"], Bool[Array, "k R N"]]:
    """Token p + 2 + k for every step, and whether it is to be predicted: it and all before it in the round are
    trained tokens of the row's own document."""
    length = batch.doc.shape[1]
    index = jnp.arange(length)[None] if rows.at is None else rows.at
    doc, known, tokens, wanted = take_rows(batch.doc, rows.at), rows.used, [], []
    for ahead in range(2, 2 + steps):
        at = jnp.broadcast_to(index + ahead, known.shape)
        inside = (at < length) & (take_rows(batch.doc, at) == doc) & (doc >= 0)
        known = known & inside & take_rows(batch.trained, at)
        tokens.append(take_rows(batch.tokens, at))
        wanted.append(known)
    return jnp.stack(tokens), jnp.stack(wanted)


def following(x: Array, rows: Rows, ahead: int) -> Array:
    """``x[r, p + ahead]`` for every row p; beyond the end the last, which no label counts."""
    index = jnp.arange(x.shape[1])[None] if rows.at is None else rows.at
    return take_rows(x, jnp.broadcast_to(index + ahead, rows.used.shape))


def unroll(
    net: Net, batch: Batch, feature: Float[Array, "R T D"], rows: Rows, steps: int
) -> list[Float[Array, "R N D"]]:
    """The recycled state of every step. The first step runs over all rows of the batch, of its last layer only
    those in ``rows``."""
    layers = range(len(net.windows))
    context: list[Own] = []
    own: list[list[Own]] = [[] for _ in layers]
    every, states = Rows(None, batch.doc >= 0), []

    def attention_of(step: int) -> Attention:
        current = rows if step else every
        pos = take_rows(batch.pos, current.at) + step

        def attention(i: int, layer: Any, u: Any, x: Array):
            u = plain(u)
            (own[i] if step else context).append(net.keys_values(layer, u, pos))
            on, window = current, net.windows[i]
            if step == 0 and i == layers[-1]:
                on, u, x = rows, take_rows(u, rows.at), take_rows(x, rows.at)
            q, more = net.queries(layer, u, take_rows(batch.pos, on.at) + step)
            mine = tuple(own[i] if window is None else own[i][-window:])
            seen = visible(batch, on.at, step, window)
            return x, net.output(layer, attend_packed(q, *context[i], seen, mine, net.scale), more)

        return attention

    for step in range(steps):
        tokens = following(batch.tokens, rows if step else every, 1 + step)
        out = net.through(net.embed(tokens), feature, attention_of(step))
        feature = net.recycled(out)
        states.append(feature)
    return states


@dataclasses.dataclass(frozen=True)
class Head:
    """What drafts are read from: rows of the output head, the target id of each (None: the same and as many), how
    products become logits, and whether the rows are trained."""

    table: Float[Array, "Vd D"]
    ids: Int[Array, " Vd"] | None
    transform: Transform
    trained: bool

    def labels(self, tokens: Int[Array, "..."], vocab: int) -> Int[Array, "..."]:
        """Draft ids of tokens, -1 for those that are not drafted."""
        if self.ids is None:
            return tokens
        places = jnp.arange(self.ids.shape[0], dtype=jnp.int32)
        return jnp.full((vocab,), -1, jnp.int32).at[self.ids].set(places)[tokens]


def objective(
    recipe: Recipe,
    batch: Batch,
    features: Features,
    shared: Shared,
    rows: Rows,
    outputs: list[Float[Array, "R N D"]],
    head: Head,
) -> tuple[Float[Array, ""], Metrics]:
    """Loss and metrics of what the head reads in every step.

    Each step's loss is the mean over its rows; step k counts ``decay ** k``. A row counts when its label is trained
    (:func:`labelled`) and can be drafted. The teacher of a row is the target's distribution over the draft vocabulary
    where it predicts the row's label. Accuracies are of all trained labels: one that cannot be drafted is a miss.
    ``tau``: tokens per round if every row began one.
    """
    steps = len(outputs)
    tokens, wanted = labelled(batch, rows, steps)
    labels = head.labels(tokens, shared.head.shape[0])
    counted = wanted & (labels >= 0)
    share = recipe.decay ** jnp.arange(steps, dtype=jnp.float32)
    share = share / jnp.sum(share) / jnp.maximum(jnp.sum(counted, (1, 2)), 1)
    teacher, taught = None, Transform()
    if losses.needs_teacher(recipe.terms):
        hidden = [following(features.hidden, rows, 1 + k) for k in range(steps)]
        lent = shared.head if head.ids is None else shared.head[head.ids]
        teacher, taught = (
            (_flat(hidden).astype(lent.dtype), lent),
            Transform(shared.logit_scale, shared.softcap),
        )
    loss, found = losses.head_loss(
        _flat(outputs).astype(head.table.dtype),
        head.table,
        _flat(labels),
        _flat(jnp.where(counted, share[:, None, None], 0.0)),
        recipe.terms,
        teacher=teacher,
        student_transform=head.transform,
        teacher_transform=taught,
        train_head=head.trained,
        chunks=recipe.chunks * steps,
    )
    by_step = lambda x: x.reshape(-1, steps, wanted.shape[-1]).swapaxes(0, 1)  # noqa: E731
    return loss, _metrics(loss, by_step(found["correct"]) & counted, wanted, by_step(found["ce"]), counted)


def _flat(steps: Any) -> Array:
    """``[k R N ...]`` as rows in the order R k N: rows of a batch that are spread over devices stay spread."""
    stacked = jnp.stack(list(steps), 1)
    return stacked.reshape(-1, *stacked.shape[3:])


def _metrics(loss, correct, wanted, ce, counted) -> Metrics:
    out = {"loss": (loss, jnp.float32(1))}
    every, some = wanted.astype(jnp.float32), counted.astype(jnp.float32)
    for k in range(len(correct)):
        out[f"accuracy_{k}"] = losses.metric(correct[k], every[k])
        out[f"ce_{k}"] = losses.metric(ce[k], some[k])
    length = 1 + jnp.sum(jnp.cumprod(correct.astype(jnp.float32), 0), 0)
    return out | {"tau": losses.metric(length, every[0])}


def hits(
    batch: Batch,
    states: list[Float[Array, "R T D"]],
    logits: Callable[[Float[Array, "N D"]], Float[Array, "N Vd"]],
    ids: Int[Array, " Vd"] | None,
) -> Bool[Array, "R T k"]:
    """:meth:`specjax.train.types.Method.matches` of the states of all rows. ``logits`` are those of decoding."""

    def best(stack: Float[Array, "k T D"]):
        chosen = jnp.argmax(logits(stack.reshape(-1, stack.shape[-1])), -1).astype(jnp.int32)
        return (chosen if ids is None else ids[chosen]).reshape(stack.shape[:2])

    drafts = jax.lax.map(best, jnp.stack(states, 1))  # [R k T], of row p
    every = Rows(None, batch.doc >= 0)
    found, length = [], batch.doc.shape[1]
    for k in range(len(states)):
        there = following(batch.doc, every, 2 + k) == batch.doc
        inside = (jnp.arange(length) + 2 + k < length) & there & (batch.doc >= 0)
        found.append((drafts[:, k] == following(batch.tokens, every, 2 + k)) & inside)
    right = jnp.stack(found, -1) & following(batch.trained, every, 2)[..., None]
    return jnp.pad(right[:, :-1], ((0, 0), (1, 0), (0, 0)))  # by anchor, which is token p + 1
