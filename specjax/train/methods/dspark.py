"""Training DSpark drafters (arXiv 2607.05147): DFlash's block, a correction by the token before, and a confidence.

In training the token before each draft is the text's, as it is in decoding as long as drafts are accepted. Further term
of :attr:`specjax.train.types.Recipe.terms`: ``confidence``, the binary cross entropy between the confidence and alpha,
the chance that rejection sampling keeps the draft, which is not differentiated.

DeepSpec's recipe is ``(("ce", 0.1), ("l1", 0.9), ("confidence", 1.0))``.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.drafters import dspark, markov
from specjax.drafters.dflash_config import Config as DFlashConfig
from specjax.drafters.dspark import Config, Weights
from specjax.layers.linear import linear
from specjax.train import block, block_loss, init as initial, losses
from specjax.train.methods import dflash
from specjax.train.products import lookup
from specjax.train.terms import check_terms
from specjax.train.types import Batch, Features, Metrics, Recipe
from specjax.types import Shared, TapSpec

CONFIDENCE, MASKED = "confidence", dflash.MASKED
#: Rank of the correction, and standard deviation of its vectors of previous tokens at the start.
RANK, MARKOV_STD = 64, 0.1


def recipe(**changes: Any) -> Recipe:
    """DFlash's recipe for the corrected logits, and the confidence."""
    given = {"terms": (("ce", 1.0), (CONFIDENCE, 1.0))}
    return dataclasses.replace(dflash.recipe(**{**given, **changes}), method="dspark")


def config(settings: Mapping[str, Any], target_cfg: Any) -> Config:
    """DFlash's usual shape, with a correction of rank 64 and a confidence that reads the previous token's vector.

    Settings are those of :func:`specjax.train.methods.dflash.config` and ``markov_rank`` (0: none), ``markov_kind``
    ("vanilla", "gated" or "rnn"), ``confidence`` and ``confidence_markov`` (bool), ``confidence_threshold``.
    ValueError as DFlash's.
    """
    given = {key: value for key, value in settings.items() if value is not None}
    given.setdefault("markov_rank", RANK)
    given.setdefault("confidence", True)
    given.setdefault("confidence_markov", bool(given["confidence"] and given["markov_rank"]))
    return dspark.config(
        {"markov_rows": target_cfg.vocab_size, **dflash.complete(given, target_cfg)}, target_cfg
    )


def init(
    cfg: Config, target: Any, shared: Shared, key: jax.Array, vocabulary: Iterable[int] | None = None
) -> Weights:
    """The backbone as :func:`specjax.train.methods.dflash.init` makes it, and heads; the correction is 0 at first."""
    inner, outer = jax.random.split(key)
    p = initial.random_weights(dataclasses.replace(dspark.abstract(cfg), backbone=()), outer)
    if p.markov is not None:
        before = p.markov.before * (MARKOV_STD / initial.STD)
        p = p.replace(markov=p.markov.replace(before=before, after=jnp.zeros_like(p.markov.after)))
    return p.replace(backbone=dflash.init(cfg, target, shared, inner, vocabulary))


def frozen(cfg: Config) -> tuple[str, ...]:
    """The backbone's tables."""
    return tuple(f"backbone.{name}" for name in dflash.frozen(cfg))


def needs(cfg: DFlashConfig) -> TapSpec:
    """As DFlash."""
    return dflash.needs(cfg)


def loss(
    p: Weights, shared: Shared, cfg: Config, recipe: Recipe, batch: Batch, features: Features, key: jax.Array
) -> tuple[Float[Array, ""], Metrics]:
    """Mean of the terms over the drafts of randomly anchored blocks, and :func:`specjax.train.block_loss.metrics`; with
    a confidence also how far it is from alpha.

    ValueError for terms that are not known or that the config has no part for.
    """
    terms = check_terms(recipe.terms, (CONFIDENCE,))
    factor = dict(recipe.terms).get(CONFIDENCE, 0)
    if factor and p.confidence is None:
        raise ValueError("loss term 'confidence' needs a drafter with a confidence head")
    done = block_loss.forward(p.backbone, shared, cfg, recipe, batch, features, key)
    extra, before = None, None
    if p.markov is not None:
        vectors, before = forced(p.markov, cfg.markov, done.labels.previous, done.hidden)
        extra = (vectors, p.markov.after)
    outcome = block_loss.head(
        p.backbone, shared, cfg, recipe, features, done, terms, extra=extra, taught=bool(factor)
    )
    total = losses.mean(outcome.total, outcome.weight)
    found = block_loss.metrics(outcome, done.labels, terms)
    if factor:
        odds = markov.confidence_logits(p.confidence, done.hidden, before if cfg.confidence_markov else None)
        alpha = outcome.rows["alpha"]
        bce = jax.nn.softplus(odds) - odds * alpha
        weights = outcome.counted * block_loss.position_weights(cfg, recipe.gamma)
        total = total + factor * losses.mean(jnp.sum(weights * bce), jnp.sum(weights))
        found[CONFIDENCE] = losses.metric(bce, outcome.counted)
        found["confidence_error"] = losses.metric(jnp.abs(jax.nn.sigmoid(odds) - alpha), outcome.counted)
    found["loss"] = (total * outcome.weight, outcome.weight)
    return total, found


def forced(
    p: markov.Markov, cfg: markov.Settings, previous: Int[Array, "*B K"], hidden: Float[Array, "*B K D"]
) -> tuple[Float[Array, "*B K R"], Float[Array, "*B K R"]]:
    """Vectors of the correction at all positions of blocks, the tokens before each being given, and those tokens' own
    vectors: what :func:`specjax.drafters.markov.walk` makes one after the other."""
    before = lookup(p.before, previous).astype(hidden.dtype)
    if cfg.kind != "rnn":
        return markov.vectors(p, cfg, before, hidden, jnp.zeros_like(before))[0], before
    state, out = jnp.zeros_like(before[..., 0, :]), []
    for t in range(previous.shape[-1]):
        vector, state = markov.vectors(p, cfg, before[..., t, :], hidden[..., t, :], state)
        out.append(vector)
    return jnp.stack(out, -2), before


def matches(
    p: Weights, shared: Shared, cfg: Config, batch: Batch, features: Features, k: int
) -> Bool[Array, "R T k"]:
    """Greedy drafts that are the text's own tokens, by anchor."""

    def choose(hidden, logits, previous):
        if p.markov is None:
            return jnp.argmax(logits, -1)
        vectors, _ = forced(p.markov, cfg.markov, previous, hidden)
        more = linear(vectors, p.markov.after, out_dtype=jnp.float32)
        return jnp.argmax(logits + markov.fit(more, logits.shape[-1]), -1)

    return block.matches(p.backbone, shared, cfg, batch, features, k, choose)
