"""Losses of block drafters over the head's rows: weights by draft position, and the teacher."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.drafters import dflash
from specjax.drafters.dflash_config import Config, max_k
from specjax.train import block, losses
from specjax.train.losses import Transform
from specjax.train.terms import needs_teacher
from specjax.train.types import Batch, Features, Metrics, Recipe, Terms
from specjax.types import Shared


class Pass(NamedTuple):
    """Blocks of a batch, what their drafts are to be, and the rows that predict them."""

    blocks: block.Anchors
    labels: block.Labels
    hidden: Float[Array, "R A K D"]


class Outcome(NamedTuple):
    """A head's loss: ``total / weight`` is the mean. ``rows``: what each draft was, ``[R A K]``. ``counted``: the
    labels that count and are in the draft vocabulary."""

    total: Float[Array, ""]
    weight: Float[Array, ""]
    rows: dict[str, Float[Array, "R A K"]]
    counted: Bool[Array, "R A K"]


def forward(
    p: dflash.Weights,
    shared: Shared,
    cfg: Config,
    recipe: Recipe,
    batch: Batch,
    features: Features,
    key: Array,
) -> Pass:
    """Blocks at anchors drawn by ``key``. ValueError for a recipe whose ``anchors``, ``gamma`` or ``dpace`` make no
    sense."""
    smooth = recipe.dpace
    if recipe.anchors < 1 or not recipe.gamma > 0 or not (smooth is None or 0 <= smooth <= 1):
        raise ValueError(
            f"a block drafter's recipe needs anchors of at least 1, gamma above 0 and dpace from 0 to 1 or None; got "
            f"anchors={recipe.anchors}, gamma={recipe.gamma}, dpace={smooth}"
        )
    blocks = block.anchors(batch, recipe.anchors, key)
    return Pass(
        blocks, block.labels(batch, cfg, blocks), block.rows(p, shared, cfg, batch, features, blocks.at)
    )


def head(
    p: dflash.Weights,
    shared: Shared,
    cfg: Config,
    recipe: Recipe,
    features: Features,
    done: Pass,
    terms: Terms,
    extra: tuple[Float[Array, "R A K S"], Float[Array, "U S"]] | None = None,
    taught: bool = False,
    best: int = 0,
) -> Outcome:
    """``terms`` of every draft, weighing ``exp(-i / gamma)`` or, with ``recipe.dpace``, by D-PACE. The head itself is
    not trained. ``extra``: vectors and table of a correction. ``taught``: the teacher is wanted, whatever the terms.
    ``best``: see :func:`specjax.train.losses.head_loss`."""
    table = shared.head if p.head is None else p.head
    drafted = draft_ids(p, cfg, done.labels.tokens)
    counted = done.labels.counted & (drafted >= 0)
    weights = counted.astype(jnp.float32)
    if recipe.dpace is None:
        weights = weights * position_weights(cfg, recipe.gamma)
    fold = lambda x: x.reshape(-1, *x.shape[3:])  # noqa: E731
    total, rows = losses.head_loss(
        fold(done.hidden),
        table,
        fold(drafted),
        fold(weights),
        terms,
        teacher=_teacher(p, shared, cfg, features, done) if taught or needs_teacher(terms) else None,
        student_transform=student(cfg),
        teacher_transform=Transform(
            shared.logit_scale, shared.softcap, None if cfg.draft_vocab else cfg.vocab
        ),
        extra=None if extra is None else (fold(extra[0]), extra[1]),
        chunks=recipe.chunks,
        dpace_smooth=recipe.dpace,
        group=max_k(cfg),
        best=best,
    )
    unfold = lambda x: x.reshape(*counted.shape, *x.shape[1:])  # noqa: E731
    return Outcome(total, jnp.sum(weights), {k: unfold(x) for k, x in rows.items()}, counted)


def student(cfg: Config) -> Transform:
    """How the drafter's products become logits."""
    return Transform(cfg.output_multiplier, cfg.softcap, None if cfg.draft_vocab else cfg.vocab)


def _teacher(p, shared, cfg, features, done):
    """The target's rows that predict the drafts, and its head, in a reduced vocabulary those tokens' rows of it."""
    hidden = block.teacher(features.hidden, cfg, done.blocks)
    ids = dflash.target_ids(p)
    return hidden.reshape(-1, hidden.shape[-1]), shared.head if ids is None else shared.head[ids]


def draft_ids(p: dflash.Weights, cfg: Config, tokens: Int[Array, "..."]) -> Int[Array, "..."]:
    """Ids in the draft vocabulary; -1: not in it."""
    ids = dflash.target_ids(p)
    if ids is None:
        return tokens
    places = jnp.arange(ids.shape[0], dtype=jnp.int32)
    return jnp.full((cfg.vocab,), -1, jnp.int32).at[ids].set(places)[tokens]


def position_weights(cfg: Config, gamma: float) -> Float[Array, " K"]:
    """``exp(-i / gamma)`` of draft i."""
    return jnp.exp(-jnp.arange(max_k(cfg), dtype=jnp.float32) / gamma)


def metrics(outcome: Outcome, labels: block.Labels, terms: Terms) -> Metrics:
    """Means of the terms and of the teacher's ``alpha``, ``accuracy_i`` of every draft position, and ``tau``: the mean
    length of what a round at these anchors emits. A label outside the draft vocabulary counts as missed."""
    rows, on = outcome.rows, labels.counted.astype(jnp.float32)
    hit = (rows["correct"] & outcome.counted).astype(jnp.float32)
    out = {
        name: losses.metric(rows[name], outcome.counted)
        for name in ("ce", *dict(terms), "alpha")
        if name in rows
    }
    out |= {f"accuracy_{i}": (jnp.sum(hit[..., i]), jnp.sum(on[..., i])) for i in range(on.shape[-1])}
    blocks = jnp.sum(on[..., 0])
    out["tau"] = (jnp.sum(jnp.cumprod(hit, -1)) + blocks, blocks)
    return out
