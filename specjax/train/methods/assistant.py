"""Training assistants of Gemma 4's form: a few layers with queries alone, over keys and values that the target lends.

All drafts of a round stand at one position and see what the target has made of the text before the anchor; only token
and state change from step to step. The output head is the assistant's own and trained; embeddings are the target's.
Where the head is narrower than the target's, it begins as what the target's head is in the directions that move its
logits most.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from specjax.drafters import assistant, assistant_config, assistant_model as model
from specjax.drafters.assistant import Config, Weights
from specjax.layers.linear import linear
from specjax.layers.rope import rope_angles, rotate
from specjax.targets import gemma
from specjax.train import init as initial, serial, shape
from specjax.train.attention import attend_packed, take_rows, visible
from specjax.train.losses import Transform
from specjax.train.serial import Head, Rows
from specjax.train.types import Batch, Features, Metrics, Recipe, by_muon
from specjax.types import Shared, TapSpec

_SHAPE = ("layers", "width", "heads", "mlp_size")
_GIVEN = ("k", "drafting", "position_offset", "softcap")


def recipe(**changes: Any) -> Recipe:
    """Five steps, each weighing 0.8 of the one before; the text's own tokens as labels."""
    given = by_muon(changes, adamw=1e-3) | {"terms": (("ce", 1.0),), "decay": 0.8, "unroll": 5}
    return serial.with_room(Recipe(method="assistant", **{**given, **changes}), changes)


def config(settings: Mapping[str, Any], target_cfg: Any) -> Config:
    """Four layers half as wide as the target with as many query heads; where the target has layers of two kinds, the
    last reads full attention and the others the sliding ones.

    ``layers``: how many, or of which kinds ("sliding", "full"), one by one. ``width``, ``heads``, ``mlp_size``
    (default: four times the width). ``k`` (default 5), ``drafting``, ``position_offset``, ``softcap``: as
    :class:`specjax.drafters.assistant.Config` has them.
    """
    known = {*_SHAPE, *_GIVEN}
    if unknown := sorted(set(settings) - known):
        raise ValueError(f"the assistant has no setting(s) {unknown}; known: {', '.join(sorted(known))}")
    given = {key: value for key, value in settings.items() if value is not None}
    kinds = sorted(assistant_config.lent(target_cfg))
    types = given.get("layers", 4)
    if isinstance(types, int):
        types = (kinds[-1],) * (types - 1) + (kinds[0],)
    width = int(given.get("width", max(1, int(target_cfg.hidden_size) // 2)))
    heads, mlp_size = int(given.get("heads", target_cfg.heads)), int(given.get("mlp_size", 4 * width))
    rest = {"k": 5} | {key: given[key] for key in _GIVEN if key in given}
    return assistant_config.shaped(target_cfg, tuple(types), width, heads, mlp_size, **rest)


def init(cfg: Config, target: Any, shared: Shared, key: jax.Array) -> Weights:
    """Weights to begin with. ValueError for a head in clusters: what they are is not learned."""
    if cfg.centroids:
        raise ValueError("an assistant whose head is in clusters can be trained on, not begun")
    p = initial.random_weights(assistant.abstract(cfg), key)
    table, width = shape.rows_of(shared.head, np.arange(cfg.body.vocab_size)), cfg.body.hidden_size
    gain = initial.rms(initial.final_gain(target))
    changes: dict[str, Any] = {"layers": tuple(map(initial.with_calm_queries, p.layers))}
    if width <= cfg.target_size:
        basis = initial.directions(table, width)
        spread = gain * (cfg.target_size / width) ** 0.5
        changes |= {
            "head": linear(table, basis.T),
            "post": basis,
            "norm": jnp.full((width,), 1.0, jnp.float32) * spread,
        }
    # both halves of a pair count the same, however small a target's embeddings are beside its states
    halves = jnp.repeat(
        jnp.stack([initial.rms(shared.embed) * shared.embed_scale, gain]), cfg.target_size, axis=0
    )
    return dataclasses.replace(p, pre=p.pre / halves, **changes)


def frozen(cfg: Config) -> tuple[str, ...]:
    """Clusters of the head, where there are any."""
    return ("clusters",) if cfg.centroids else ()


def needs(cfg: Config) -> TapSpec:
    """The final state, and keys and values."""
    return assistant.NEEDS(cfg)


def loss(
    p: Weights,
    shared: Shared,
    cfg: Config,
    recipe: Recipe,
    batch: Batch,
    features: Features,
    key: jax.Array,
) -> tuple[Float[Array, ""], Metrics]:
    """See :func:`specjax.train.serial.objective`; over the whole head, also where it is in clusters."""
    rows = serial.choose(batch, recipe.answers, key)
    outputs = unroll(p, shared, cfg, batch, features, rows, recipe.unroll)
    head = Head(p.head[: cfg.vocab_size], model.target_ids(cfg), Transform(softcap=cfg.softcap), trained=True)
    return serial.objective(recipe, batch, features, shared, rows, outputs, head)


def matches(
    p: Weights, shared: Shared, cfg: Config, batch: Batch, features: Features, k: int
) -> Bool[Array, "R T k"]:
    """Greedy drafts that are the text's own tokens, by anchor."""
    outputs = unroll(p, shared, cfg, batch, features, Rows(None, batch.doc >= 0), k)
    return serial.hits(batch, outputs, functools.partial(model.logits, p, cfg), model.target_ids(cfg))


def unroll(
    p: Weights, shared: Shared, cfg: Config, batch: Batch, features: Features, rows: Rows, steps: int
) -> list[Float[Array, "R N D"]]:
    """Normed output of every step."""
    dtype, outputs = p.norm.dtype, []
    pos = take_rows(batch.pos, rows.at) + cfg.position_offset
    kv = {}
    for name in cfg.kinds:
        kind, view = getattr(cfg.body, name), (features.kv or {})[name]
        lent = tuple(x.swapaxes(1, 2).astype(dtype) for x in (view.k, view.v))
        seen = visible(batch, rows.at, cfg.position_offset, cfg.window(kind))
        kv[name] = (*lent, seen, rope_angles(kind.rope, pos))

    def attention(i, layer, x):
        *lent, angles = kv[model.kind_name(cfg, i)]
        q = rotate(model.queries(layer, cfg, x), *angles, cfg.body.kind(i).rope.pair)
        return gemma.output(attend_packed(q, *lent, (), 1.0), layer.o)

    state = take_rows(features.hidden, rows.at)
    for step in range(steps):
        tokens = serial.following(batch.tokens, rows, 1 + step)
        embedded = gemma.embed(shared.embed, tokens, shared.embed_scale)
        outputs.append(model.through(p, cfg, embedded, state, attention))
        state = model.recycled(p, outputs[-1])
    return outputs
