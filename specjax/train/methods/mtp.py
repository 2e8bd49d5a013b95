"""Training a layer for multi-token prediction, also for a target that came without one.

Steps after the first attend as in decoding, to what the first step made of the text and to the row's own pairs; recipes
that let each step attend only to its own rows train something that does not decode. Labels are the text's tokens
(arXiv 2404.19737).
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float

from specjax.drafters import mtp, mtp_model as model, serial as decoding
from specjax.drafters.mtp import Config, Weights
from specjax.layers.rope import RopeConfig, rope_angles
from specjax.targets import deepseek, qwen3, qwen3_5
from specjax.train import init as initial, serial, shape
from specjax.train.losses import Transform
from specjax.train.serial import Head, Net
from specjax.train.types import Batch, Features, Metrics, Recipe, by_muon
from specjax.types import Shared, TapSpec

_SHAPE = ("heads", "kv_heads", "head_dim", "mlp_size")
_GIVEN = ("k", "drafting", "draft_vocab", "eos_ids", "own_embed", "own_head")


def recipe(**changes: Any) -> Recipe:
    """Three steps, each weighing 0.6 of the one before; the text's own tokens as labels. One layer trained for three
    steps goes on drafting beyond them."""
    given = by_muon(changes, adamw=1.5e-3) | {"terms": (("ce", 1.0),), "decay": 0.6, "unroll": 3}
    return serial.with_room(Recipe(method="mtp", **{**given, **changes}), changes)


def config(settings: Mapping[str, Any], target_cfg: Any) -> Config:
    """A layer of the target's own family where that has them, else a dense one of Qwen3's kind, as large as the
    target's layers.

    ``heads``, ``kv_heads``, ``head_dim``, ``mlp_size``: its shape, in the latter case. ``k`` (default 3), ``drafting``,
    ``draft_vocab``, ``eos_ids``, ``own_embed``, ``own_head``: as :func:`specjax.drafters.mtp.config` has them.
    """
    known = {*_SHAPE, *_GIVEN}
    if unknown := sorted(set(settings) - known):
        raise ValueError(f"the MTP drafter has no setting(s) {unknown}; known: {', '.join(sorted(known))}")
    given = {key: value for key, value in settings.items() if value is not None}
    sizes = {key: int(given[key]) for key in _SHAPE if key in given}
    family = next((name for name, kind in _FAMILIES.items() if type(target_cfg) is kind), None)
    if family is None or (family == "qwen3" and target_cfg.experts):
        family, layer = "qwen3", _layer(target_cfg, sizes)
    else:
        layer = dataclasses.replace(target_cfg, **sizes)
    rest = {key: given[key] for key in _GIVEN if key in given}
    return mtp.config({"k": 3, **rest, "family": family, "model": layer}, target_cfg)


#: Families that have such a layer, by the name of the config they are rebuilt from.
_FAMILIES: dict[str, type] = {
    "qwen3": qwen3.Config,
    "qwen3_5_text": qwen3_5.Config,
    "deepseek_v3": deepseek.Config,
}


def _layer(target_cfg: Any, sizes: Mapping[str, int]) -> qwen3.Config:
    """Config of one dense Qwen3 layer for a target of another family; rope over whole heads."""
    heads, kv_heads, head_dim = shape.attention(target_cfg)
    found = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "mlp_size": int(target_cfg.mlp_size)}
    found |= sizes
    if found["heads"] % found["kv_heads"]:
        raise ValueError(f"{found['heads']} query heads cannot share {found['kv_heads']} key heads")
    return qwen3.Config(
        vocab_size=int(target_cfg.vocab_size),
        hidden_size=int(target_cfg.hidden_size),
        num_layers=1,
        max_positions=int(target_cfg.max_positions),
        eps=float(getattr(target_cfg, "eps", 1e-6)),
        rope=RopeConfig(found["head_dim"], shape.full_attention(target_cfg).rope.theta),
        tied=False,
        **found,
    )


def init(cfg: Config, target: Any, shared: Shared, key: jax.Array) -> Weights:
    """Weights to begin with: the final norm is the target's, matrices are small and random."""
    p = initial.random_weights(mtp.abstract(cfg), key)
    gain = initial.final_gain(target)
    changes: dict[str, Any] = {"norm": gain - 1 if model.norms_stored_minus_one(cfg) else gain}
    for name, table in (("embed", shared.embed), ("head", shared.head)):
        if getattr(p, name) is not None:
            changes[name] = shape.rows_of(table, np.arange(cfg.model.vocab_size))
    return dataclasses.replace(p, **changes)


def frozen(cfg: Config) -> tuple[str, ...]:
    """Tables of the layer's own, where it has any: copies of the target's."""
    del cfg
    return ("embed", "head")


def needs(cfg: Config) -> TapSpec:
    """The feature, and the final state for the teacher, which usually are the same."""
    return mtp.NEEDS(cfg) | TapSpec(hidden=True)


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
    return serial.objective(recipe, batch, features, shared, rows, states, head(p, shared, cfg))


def matches(
    p: Weights, shared: Shared, cfg: Config, batch: Batch, features: Features, k: int
) -> Bool[Array, "R T k"]:
    """Greedy drafts that are the text's own tokens, by anchor."""
    rows = serial.Rows(None, batch.doc >= 0)
    states = serial.unroll(net(p, shared, cfg), batch, feature(p, cfg, batch, features), rows, k)
    logits = functools.partial(model.logits, model.head(p, shared, cfg))
    return serial.hits(batch, states, logits, model.target_ids(cfg))


def head(p: Weights, shared: Shared, cfg: Config) -> Head:
    """What is drafted from."""
    return Head(model.head(p, shared, cfg), model.target_ids(cfg), Transform(), trained=False)


def feature(p: Weights, cfg: Config, batch: Batch, features: Features) -> Float[Array, "R T D"]:
    """What the first step reads of the target."""
    del batch
    state = features.hidden if cfg.tap is None else features.taps[cfg.tap]
    return state.astype(p.norm.dtype)


def net(p: Weights, shared: Shared, cfg: Config) -> Net:
    """The network as :func:`specjax.train.serial.unroll` takes it."""
    kind, layer = p.norm.dtype, cfg.model
    angles = lambda pos: rope_angles(layer.rope, pos)  # noqa: E731
    if isinstance(layer, deepseek.Config):
        heads, scale = serial.latent_parts(layer.latent, deepseek.LOW_RANK_EPS, angles), layer.latent.scale
    else:
        heads, scale = _heads(layer, angles), layer.head_dim**-0.5
    return Net(
        embed=lambda tokens: decoding.embed(p.embed, shared.embed, tokens, kind),
        through=functools.partial(model.through, p, cfg),
        recycled=lambda out: out,
        windows=(None,),
        scale=scale,
        **heads,
    )


def _heads(layer: Any, angles: Any) -> dict[str, Any]:
    """Parts of the attention of a layer with key and value heads."""
    if isinstance(layer, qwen3_5.Config):
        return {
            "keys_values": lambda w, u, pos: qwen3_5.keys_values(w.mixer, layer, u, angles(pos)),
            "queries": lambda w, u, pos: qwen3_5.queries(w.mixer, layer, u, angles(pos)),
            "output": lambda w, mixed, gate: qwen3_5.output(w.mixer, mixed, gate),
        }
    return {
        "keys_values": lambda w, u, pos: qwen3.keys_values(w, layer, u, angles(pos)),
        "queries": lambda w, u, pos: (qwen3.queries(w, layer, u, angles(pos)), None),
        "output": lambda w, mixed, _: qwen3.output(w, mixed),
    }
