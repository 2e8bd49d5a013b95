"""Training DFlash drafters (arXiv 2602.06036) and, where the config has its parts, DFlash2.

Embedding and output head are the target's and not trained. Further term of :attr:`specjax.train.types.Recipe.terms`:
``selector``, the cross entropy of DFlash2's choice among the best candidates (the label takes the last one's place
if it is not among them), as speculators trains it.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specjax.checkpoints.formats.block import default_taps
from specjax.drafters import dflash, dflash2
from specjax.drafters.dflash import Config, Weights
from specjax.layers.linear import linear
from specjax.train import block, block_loss, init as initial, losses, shape
from specjax.train.products import lookup, product
from specjax.train.terms import check_terms
from specjax.train.types import Batch, Features, Metrics, Recipe, by_muon
from specjax.types import Shared, TapSpec

#: Residual streams that are fused, unless told otherwise, and where they are too few layers to spread them over.
TAPS = 5
#: It needs a mask: an id that is in no text.
MASKED = True
SELECTOR = "selector"
#: Layers by what they are like: settings of :func:`specjax.drafters.dflash.config`, and keys of the transformer.
BODIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3": ({}, {}),
    "gemma4": ({"flavour": "gemma4"}, {"hidden_act": "gelu_pytorch_tanh"}),
}
OWN = ("body", "layers", "drafts", "draft_vocab", "transformer", "taps", "mask_id", "mask_embedding")


def recipe(**changes: Any) -> Recipe:
    """Cross entropy with the text, weighing ``exp(-i / 4)`` at draft position i; 64 blocks per row. By Muon, which
    needs a fraction of AdamW's steps."""
    given = by_muon(changes, adamw=6e-4) | {"terms": (("ce", 1.0),), "gamma": 4.0, "anchors": 64, "chunks": 2}
    return Recipe(method="dflash", **{**given, **changes})


def config(settings: Mapping[str, Any], target_cfg: Any) -> Config:
    """A drafter of four layers shaped like the target's, seven drafts in layout "shift", on five taps.

    ``mask_id``: an id that stands for "not known yet" and is in no text (:func:`specjax.train.mask.reserved` finds
    one), or ``mask_embedding=True``: a trained vector. ``body``: "qwen3" (default) or "gemma4". ``layers``,
    ``drafts``: how many. ``taps``: residual streams by number (default: z-lab's rule). ``draft_vocab``: how many tokens
    are drafted, or which (:func:`init` is told which again); default: all. ``transformer``: keys of the layers as
    Hugging Face spells them, over those taken from the target. All else is a setting of
    :func:`specjax.drafters.dflash.config`: ``layout``, ``k``, ``causal``, ``window_from``, ``conv``, ``selector`` ...

    ValueError for settings that are not understood or do not fit the target.
    """
    return dflash.config(complete(settings, target_cfg), target_cfg)


def complete(settings: Mapping[str, Any], target_cfg: Any) -> dict[str, Any]:
    """Settings as :func:`specjax.drafters.dflash.config` takes them; those it does not know are passed on."""
    given = {key: value for key, value in settings.items() if value is not None}
    kind = given.get("body", "qwen3")
    if kind not in BODIES:
        raise ValueError(f"body must be one of {', '.join(BODIES)}, got {kind!r}")
    more, keys = BODIES[kind]
    layers, drafts = whole("layers", given.get("layers", 4)), whole("drafts", given.get("drafts", 7))
    layout, width = given.get("layout", "shift"), int(target_cfg.hidden_size)
    taps = tuple(given.get("taps", usual_taps(int(target_cfg.num_layers))))
    mask = given.get("mask_id", 0 if given.get("mask_embedding") else None)
    if mask is None:
        raise ValueError(
            "a block drafter needs a mask: mask_id=<a token id that is in no text>, such as a reserved token, or "
            "mask_embedding=True for a vector of its own"
        )
    rest = {key: value for key, value in given.items() if key not in OWN}
    out = {
        "layout": layout,
        "block_size": drafts + (layout == "fill"),
        "taps": taps,
        "fc_width": len(taps) * width,
        "mask_id": mask,
        "mask_embedding": bool(given.get("mask_embedding", False)),
        "transformer": {**shape.transformer(target_cfg, layers), **keys, **given.get("transformer", {})},
        "causal": (False,) * layers,
        "input_scale": float(getattr(target_cfg, "embed_scale", 1.0)),
        "softcap": getattr(target_cfg, "softcap", None),
        **more,
    }
    if "draft_vocab" in given:
        size = shape.draft_size(given["draft_vocab"], int(target_cfg.vocab_size))
        if size < target_cfg.vocab_size:
            out |= {"draft_vocab": size, "own_head": True, "head_rows": size}
    return out | rest


def whole(name: str, value: Any) -> int:
    """ValueError unless ``value`` is a positive whole number."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    return value


def usual_taps(layers: int, count: int = TAPS) -> tuple[int, ...]:
    """Residual streams behind ``count`` layers from the second to the third last, evenly, as z-lab and DeepSpec choose
    them (SmolLM2-135M's 30: layers 1, 8, 14, 20, 27); of a target too shallow for that, behind its last layers."""
    if layers < count + 4:
        return tuple(range(max(0, layers - count), layers + 1))[-count:]
    return tuple(j + 1 for j in default_taps(layers, count))


def init(
    cfg: Config, target: Any, shared: Shared, key: jax.Array, vocabulary: Iterable[int] | None = None
) -> Weights:
    """Weights to begin with: final norm and tables are the target's, all else is small and random; DFlash2's
    convolutions change nothing at first.

    ``vocabulary``: ids of the draft vocabulary; None: the lowest. ValueError unless there are as many as ``cfg`` has.
    """
    p = initial.random_weights(dflash.abstract(cfg), key)
    changes: dict[str, Any] = {}
    ids = np.arange(cfg.own_head or 0)
    if cfg.draft_vocab:
        ids = shape.vocabulary(vocabulary, cfg.draft_vocab, cfg.vocab)
        changes["d2t"] = jnp.asarray(ids - np.arange(len(ids)), jnp.int32)
    if cfg.body.hidden_size == shared.embed.shape[1]:
        changes["norm"] = initial.final_gain(target)
        if cfg.own_embed:
            changes["embed"] = shape.rows_of(shared.embed, np.arange(cfg.own_embed))
        if cfg.own_head:
            changes["head"] = shape.rows_of(shared.head, ids)
        if cfg.mask_embedding:
            changes["mask"] = shape.rows_of(shared.embed, np.array([cfg.mask_id]))[0] * cfg.input_scale
    if cfg.body.flavour == "gemma4":
        changes["layers"] = tuple(map(initial.with_calm_queries, p.layers))
    if p.convs is not None:
        changes["convs"] = tuple(dflash2.LayerConvs(_through(c.attention), _through(c.mlp)) for c in p.convs)
    return dataclasses.replace(p, **changes)


def _through(conv: dflash2.Conv) -> dflash2.Conv:
    """A convolution that changes nothing."""
    return dflash2.Conv(jnp.zeros_like(conv.base).at[:, 0].set(1), jnp.zeros_like(conv.project))


def frozen(cfg: Config) -> tuple[str, ...]:
    """Copies of the target's tables, and the draft vocabulary's."""
    del cfg
    return ("embed", "head", "d2t")


def needs(cfg: Config) -> TapSpec:
    """The taps, and the final state for the teacher."""
    return dflash.NEEDS(cfg) | TapSpec(hidden=True)


def loss(
    p: Weights, shared: Shared, cfg: Config, recipe: Recipe, batch: Batch, features: Features, key: jax.Array
) -> tuple[Float[Array, ""], Metrics]:
    """Mean of the terms over the drafts of randomly anchored blocks, and :func:`specjax.train.block_loss.metrics`.

    ValueError for terms that are not known or that the config has no part for.
    """
    terms = check_terms(recipe.terms, (SELECTOR,))
    factor = dict(recipe.terms).get(SELECTOR, 0)
    if factor and p.selector is None:
        raise ValueError("loss term 'selector' needs a drafter with a candidate selector")
    done = block_loss.forward(p, shared, cfg, recipe, batch, features, key)
    best = cfg.selector.top if cfg.selector is not None and factor else 0
    outcome = block_loss.head(p, shared, cfg, recipe, features, done, terms, best=best)
    total = losses.mean(outcome.total, outcome.weight)
    found = block_loss.metrics(outcome, done.labels, terms)
    if factor:
        ce = _selection(p, p.selector, shared, cfg, done, outcome.rows["best"])
        weights = outcome.counted * block_loss.position_weights(cfg, recipe.gamma)
        total = total + factor * losses.mean(jnp.sum(weights * ce), jnp.sum(weights))
        found[SELECTOR] = losses.metric(ce, outcome.counted)
    found["loss"] = (total * outcome.weight, outcome.weight)
    return total, found


def _selection(
    p: Weights,
    selector: Any,
    shared: Shared,
    cfg: Config,
    done: block_loss.Pass,
    best: Int[Array, "R A K M"],
) -> Float[Array, "R A K"]:
    """Cross entropy of the selector's choice of the label, the right token being before it."""
    label, last = done.labels.tokens[..., None], jnp.arange(best.shape[-1]) == best.shape[-1] - 1
    ids = jnp.where(last & ~(best == label).any(-1, keepdims=True), label, best)
    head = shared.head if p.head is None else p.head
    unary = block_loss.student(cfg)(product("rakd,rakmd->rakm", done.hidden, head[ids]))
    before, after = (
        lookup(t, i) for t, i in ((selector.predecessor, done.labels.previous), (selector.successor, ids))
    )
    log_q = jax.nn.log_softmax(
        unary + dflash2.scores(before, linear(done.hidden, selector.project), after), -1
    )
    return -jnp.sum(jnp.where(ids == label, log_q, 0), -1)


def matches(
    p: Weights, shared: Shared, cfg: Config, batch: Batch, features: Features, k: int
) -> Bool[Array, "R T k"]:
    """Greedy drafts that are the text's own tokens, by anchor."""

    def choose(hidden, logits, previous):
        if p.selector is None:
            return jnp.argmax(logits, -1)
        best, ids = jax.lax.top_k(logits, cfg.selector.top)
        rank = linear(hidden, p.selector.project)
        more = dflash2.scores(p.selector.predecessor[previous], rank, p.selector.successor[ids])
        return jnp.take_along_axis(ids, jnp.argmax(best + more, -1)[..., None], -1)[..., 0]

    return block.matches(p, shared, cfg, batch, features, k, choose)
