"""Training EAGLE-3 drafters by training-time test (arXiv 2503.01840).

The draft vocabulary is a table in the weights, ``d2t``: :func:`config` is told how large it is, :func:`init` which
tokens it has. A drafter without an output head of its own drafts from the target's rows, which are not trained; a head
of its own is. Embeddings are not, unless they had to begin at random because widths differ.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from specjax.drafters import body, eagle3, eagle3_model as model, serial as decoding
from specjax.drafters.eagle3 import Config, Weights
from specjax.layers.rope import rope_angles
from specjax.train import init as initial, serial, shape
from specjax.train.losses import Transform
from specjax.train.serial import Head, Net
from specjax.train.types import Batch, Features, Metrics, Recipe, by_muon
from specjax.types import AbsorbIn, Shared, TapSpec

DRAFT_VOCAB = 8192
#: Layers by what they are like: settings of :func:`specjax.drafters.eagle3.config`.
BODIES: dict[str, dict[str, Any]] = {
    "qwen3": {"qk_norm": True},
    "llama": {},
    "gemma4": {"flavour": "gemma4", "qk_norm": True},
    "latent": {"latent": True},
}
_OWN = {"body", "layers", "draft_vocab", "transformer"}


def recipe(**changes: Any) -> Recipe:
    """Seven steps, each weighing 0.8 of the one before; soft labels over the draft vocabulary. By Muon."""
    given = by_muon(changes, adamw=1.5e-3) | {"terms": (("kl", 1.0),), "decay": 0.8, "unroll": 7, "chunks": 1}
    return serial.with_room(Recipe(method="eagle3", **{**given, **changes}), changes)


def config(settings: Mapping[str, Any], target_cfg: Any) -> Config:
    """A drafter of one layer shaped like the target's, with norms of queries and keys, on three taps.

    ``body``: "qwen3" (default), "llama", "gemma4" or "latent" (sizes as the target's, or in ``transformer``).
    ``layers``: how many. ``draft_vocab``: how many tokens are
    drafted, or which (:func:`init` is told which again); default 8192, and all of a smaller vocabulary.
    ``transformer``: keys of the layers as Hugging Face spells them, over those taken from the target. All else is a
    setting of :func:`specjax.drafters.eagle3.config`: ``taps`` (default: the residual streams after 2, L/2 and L - 3 of
    L layers), ``k`` (default 7), ``norm_output``, ``fc_norm``, ``own_head`` (default false) ...
    """
    given = {key: value for key, value in settings.items() if value is not None}
    kind = given.get("body", "qwen3")
    if kind not in BODIES:
        raise ValueError(f"body must be one of {', '.join(BODIES)}, got {kind!r}")
    hf = shape.transformer(target_cfg, int(given.get("layers", 1)))
    if kind == "gemma4":
        hf["hidden_act"] = "gelu_pytorch_tanh"
    if kind == "latent":
        hf |= shape.latent_keys(target_cfg)
    hf |= given.get("transformer", {})
    if missing := sorted(set(shape.LATENT) - set(hf)) if kind == "latent" else []:
        raise ValueError(f"a latent body needs its sizes in transformer, which has no {', '.join(missing)}")
    vocab = int(target_cfg.vocab_size)
    size = shape.draft_size(given.get("draft_vocab", min(DRAFT_VOCAB, vocab)), vocab)
    rest = {key: value for key, value in given.items() if key not in _OWN}
    defaults = {
        "taps": shape.spread_taps(int(target_cfg.num_layers)),
        "k": 7,
        "own_head": False,
        "draft_vocab_size": size,
        "reduced": size < vocab,
    }
    return eagle3.config({**BODIES[kind], **defaults, **rest, "transformer": hf}, target_cfg)


def init(
    cfg: Config, target: Any, shared: Shared, key: jax.Array, vocabulary: Iterable[int] | None = None
) -> Weights:
    """Weights to begin with: the final norm and tables are the target's where widths agree, else small and random.

    ``vocabulary``: ids of the draft vocabulary; None: the lowest. ValueError unless there are as many as ``cfg`` has.
    """
    p = initial.random_weights(eagle3.abstract(cfg), key)
    ids, changes = np.arange(cfg.head_rows), dict[str, Any]()
    if cfg.reduced:
        ids = shape.vocabulary(vocabulary, cfg.head_rows, cfg.vocab_size)
        changes["d2t"] = jnp.asarray(ids - np.arange(len(ids)), jnp.int32)
    if cfg.body.hidden_size == cfg.target_size:
        changes["norm"] = initial.final_gain(target)
        if cfg.own_embed:
            changes["embed"] = shape.rows_of(shared.embed, np.arange(cfg.embed_rows))
        if cfg.own_head:
            changes["head"] = shape.rows_of(shared.head, ids)
    if cfg.body.flavour == "gemma4":
        changes["layers"] = tuple(map(initial.with_calm_queries, p.layers))
    return dataclasses.replace(p, **changes)


def frozen(cfg: Config) -> tuple[str, ...]:
    """The table of the draft vocabulary, and an embedding that is a copy of the target's."""
    return ("d2t", "embed") if cfg.body.hidden_size == cfg.target_size else ("d2t",)


def needs(cfg: Config) -> TapSpec:
    """The taps, and the final state for the teacher."""
    return TapSpec(cfg.taps, hidden=True)


def loss(
    p: Weights,
    shared: Shared,
    cfg: Config,
    recipe: Recipe,
    batch: Batch,
    features: Features,
    key: jax.Array,
) -> tuple[Float[Array, ""], Metrics]:
    """See :func:`specjax.train.serial.objective`."""
    rows = serial.choose(batch, recipe.answers, key)
    states = serial.unroll(net(p, shared, cfg), batch, feature(p, cfg, batch, features), rows, recipe.unroll)
    outputs = [model.read(p, cfg, state) for state in states]
    return serial.objective(recipe, batch, features, shared, rows, outputs, head(p, shared, cfg))


def matches(
    p: Weights, shared: Shared, cfg: Config, batch: Batch, features: Features, k: int
) -> Bool[Array, "R T k"]:
    """Greedy drafts that are the text's own tokens, by anchor."""
    rows = serial.Rows(None, batch.doc >= 0)
    states = serial.unroll(net(p, shared, cfg), batch, feature(p, cfg, batch, features), rows, k)
    logits = functools.partial(model.scores, p, cfg, model.head(p, shared, cfg))
    return serial.hits(batch, states, logits, model.target_ids(p, cfg))


def head(p: Weights, shared: Shared, cfg: Config) -> Head:
    """What is drafted from; rows beyond the target's vocabulary are left out."""
    table = model.head(p, shared, cfg)[: cfg.vocab_size]
    transform = Transform(cfg.logit_scale, cfg.softcap)
    return Head(table, model.target_ids(p, cfg), transform, trained=cfg.own_head)


def feature(p: Weights, cfg: Config, batch: Batch, features: Features) -> Float[Array, "R T D"]:
    """What the first step reads of the target."""
    keep = jnp.sum(batch.doc >= 0, 1)
    block = AbsorbIn(batch.tokens, batch.tokens, batch.pos, keep, features.hidden, features.taps, "extend")
    return model.fuse(p, cfg, block)


def net(p: Weights, shared: Shared, cfg: Config) -> Net:
    """The network as :func:`specjax.train.serial.unroll` takes it."""
    kind = p.norm.dtype
    heads = _latent(cfg) if cfg.mla is not None else _heads(cfg)
    return Net(
        embed=lambda tokens: decoding.embed(p.embed, shared.embed, tokens, kind),
        through=functools.partial(model.through, p, cfg),
        recycled=functools.partial(model.recycled, p, cfg),
        windows=cfg.body.windows,
        scale=cfg.body.scale if cfg.mla is None else cfg.mla.scale,
        **heads,
    )


def _heads(cfg: Config) -> dict[str, Any]:
    return {
        "keys_values": lambda layer, u, pos: model.keys_values(layer, cfg, u, pos),
        "queries": lambda layer, u, pos: (model.queries(layer, cfg, u, pos), None),
        "output": lambda layer, mixed, _: body.output(layer, mixed),
    }


def _latent(cfg: Config) -> dict[str, Any]:
    angles = lambda pos: rope_angles(cfg.body.rope, pos)  # noqa: E731
    return serial.latent_parts(cfg.mla, cfg.body.eps, angles)
