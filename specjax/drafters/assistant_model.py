"""The network of a Gemma 4 assistant: layers with queries alone, over keys and values that the target lends."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.core.cache import Filled
from specjax.drafters.assistant_config import Config
from specjax.layers import head as heads
from specjax.layers.attention import attend
from specjax.layers.linear import linear, precision_of
from specjax.layers.mlp import geglu
from specjax.layers.norm import Normed, Rows, rms_norm_wide
from specjax.layers.rope import rope_angles, rotate
from specjax.targets import gemma
from specjax.targets.gemma import Kind
from specjax.types import ArraySpec, Ctx, Shared


@struct.dataclass
class Layer:
    """Weights of one layer."""

    attn_norm: Float[Array, " D"]
    q: Float[Array, "H C D"]
    o: Float[Array, "D H C"]
    q_norm: Float[Array, " C"]
    post_attn_norm: Float[Array, " D"]
    mlp_norm: Float[Array, " D"]
    gate: Float[Array, "F D"]
    up: Float[Array, "F D"]
    down: Float[Array, "D F"]
    post_mlp_norm: Float[Array, " D"]
    scalar: Float[Array, "1"]


@struct.dataclass
class Clusters:
    """Tokens in clusters of one size: ``order`` lists the ids of one after the other."""

    centroids: Float[Array, "N D"]
    order: Int[Array, " V"]


@struct.dataclass
class Weights:
    """All weights; ``W`` is the target's width. ``head`` is the only table: embeddings are the target's."""

    pre: Float[Array, "D WW"]
    layers: tuple[Layer, ...]
    norm: Float[Array, " D"]
    post: Float[Array, "W D"]
    head: Float[Array, "V D"]
    clusters: Clusters | None


def abstract(cfg: Config) -> Weights:
    """Weight struct of ArraySpecs, with the names of a published file."""
    d, w, v, n = cfg.body.hidden_size, cfg.target_size, cfg.body.vocab_size, cfg.centroids
    clusters = Clusters(
        centroids=ArraySpec((n, d), (None, None), ("masked_embedding.centroids.weight",)),
        order=ArraySpec((v,), (None,), ("masked_embedding.token_ordering",), "zeros", dtype="int32"),
    )
    return Weights(
        pre=ArraySpec((d, 2 * w), (None, None), ("pre_projection.weight",)),
        layers=tuple(_layer(cfg, i, f"model.layers.{i}.") for i in range(cfg.body.num_layers)),
        norm=ArraySpec((d,), (None,), ("model.norm.weight",), "ones"),
        post=ArraySpec((w, d), (None, None), ("post_projection.weight",)),
        head=ArraySpec((v, d), ("vocab", None), ("lm_head.weight",)),
        clusters=clusters if n else None,
    )


def _layer(cfg: Config, index: int, prefix: str) -> Layer:
    kind, d = cfg.body.kind(index), cfg.body.hidden_size
    norms = {
        "attn_norm": ("input_layernorm", d),
        "q_norm": ("self_attn.q_norm", kind.head_dim),
        "post_attn_norm": ("post_attention_layernorm", d),
        "mlp_norm": ("pre_feedforward_layernorm", d),
        "post_mlp_norm": ("post_feedforward_layernorm", d),
    }
    heads = gemma.head_specs(cfg.body, kind, prefix, "qo")
    return Layer(
        q=heads["q"],
        o=heads["o"],
        scalar=ArraySpec((1,), (None,), (prefix + "layer_scalar",), "ones"),
        **gemma.norm_specs(norms, prefix, "ones"),
        **gemma.mlp_specs(cfg.body, cfg.body.dense_size, prefix),
    )


class Seen(NamedTuple):
    """What queries of one kind of layer need all through a round, in which nothing of it changes."""

    k: Float[Array, "B G S C"]
    v: Float[Array, "B G S C"]
    key_pos: Filled | Int[Array, "B S"]  # negative: not to be seen
    pos: Int[Array, "B 1"]
    cos: Float[Array, "B 1 R"]
    sin: Float[Array, "B 1 R"]


def look(p: Weights, cfg: Config, ctx: Ctx) -> dict[str, Seen]:
    """The target's keys and values, by kind of layer, and where the drafts of this round stand.

    Visible is what lies before the anchor. Entries at its position or beyond are those of rejected drafts. Full layers
    have a slot per position.
    """
    pos, end, out = ctx.length[:, None] - 2 + cfg.position_offset, ctx.length - 1, {}
    for name in cfg.kinds:
        view, kind = ctx.kv_view(name), getattr(cfg.body, name)
        full = name == "full"
        committed = Filled(end, view.k.shape[2]) if full else jnp.where(view.pos < end[:, None], view.pos, -1)
        k, v = view.k.astype(p.norm.dtype), view.v.astype(p.norm.dtype)
        out[name] = Seen(k, v, committed, pos, *rope_angles(kind.rope, pos))
    return out


def run(
    p: Weights,
    cfg: Config,
    shared: Shared,
    seen: dict[str, Seen],
    token: Int[Array, " B"],
    state: Float[Array, "B W"],
) -> Float[Array, "B D"]:
    """Normed output for one (token, state) pair per row: what :func:`logits` and :func:`recycled` read."""

    def attention(i, layer, x):
        return _attend(layer, cfg, cfg.body.kind(i), x, seen[kind_name(cfg, i)])

    embedded = gemma.embed(shared.embed, token[:, None], shared.embed_scale)
    return through(p, cfg, embedded, state[:, None], attention)[:, 0]


def kind_name(cfg: Config, layer: int) -> str:
    """What kind of the target's layers a layer reads."""
    return "full" if layer in cfg.body.full_layers else "sliding"


def through(
    p: Weights,
    cfg: Config,
    embedded: Float[Array, "B Q W"],
    state: Float[Array, "B Q W"],
    attention: Callable[[int, Layer, Rows], Float[Array, "B Q D"]],
) -> Float[Array, "B Q D"]:
    """Normed output of rows of pairs. ``embedded``: as the target scales it. ``attention(index, layer, x)``: what is
    mixed of the target's values, projected."""
    eps, dtype = cfg.body.eps, p.norm.dtype
    x = linear(jnp.concatenate([embedded.astype(dtype), state.astype(dtype)], -1), p.pre)
    for i, layer in enumerate(p.layers):
        mixed = attention(i, layer, Normed(x, layer.attn_norm, eps, wide=True))
        x = x + rms_norm_wide(mixed, layer.post_attn_norm, eps)
        y = geglu(Normed(x, layer.mlp_norm, eps, wide=True), layer.gate, layer.up, layer.down)
        x = (x + rms_norm_wide(y, layer.post_mlp_norm, eps)) * layer.scalar
    return rms_norm_wide(x, p.norm, eps)


def _attend(layer: Layer, cfg: Config, kind: Kind, x: Rows, at: Seen) -> Float[Array, "B 1 D"]:
    """Attention without a scale: the norms of queries and keys set it."""
    q = rotate(queries(layer, cfg, x), at.cos, at.sin, kind.rope.pair)
    return gemma.output(attend(q, at.k, at.v, at.pos, at.key_pos, 1.0, cfg.window(kind)), layer.o)


def queries(layer: Layer, cfg: Config, x: Rows) -> Float[Array, "B Q H C"]:
    """Normed queries before rope."""
    return rms_norm_wide(linear(x, layer.q), layer.q_norm, cfg.body.eps)


def recycled(p: Weights, normed: Float[Array, "*N D"]) -> Float[Array, "*N W"]:
    """What the next draft receives in place of the target's hidden state."""
    return linear(normed, p.post)


def logits(p: Weights, cfg: Config, normed: Float[Array, "B D"]) -> Float[Array, "B Vd"]:
    """float32 logits over the ids that head and target both have; -inf for tokens outside the chosen clusters."""
    if p.clusters is None:
        out = _capped(cfg, linear(normed, p.head, out_dtype=jnp.float32))
    else:
        out = _clustered(p.head, p.clusters, cfg, normed)
    return out[:, : cfg.vocab_size]


def best(p: Weights, cfg: Config, normed: Float[Array, "B D"]) -> Int[Array, " B"]:
    """The draft id with the largest of the :func:`logits`, which are not kept if every token may be drafted."""
    if p.clusters is not None:
        return jnp.argmax(logits(p, cfg, normed), -1).astype(jnp.int32)
    return heads.best(normed, p.head, heads.Cap(softcap=cfg.softcap, size=cfg.vocab_size))[1]


def _clustered(head, clusters: Clusters, cfg: Config, normed: Float[Array, "B D"]) -> Float[Array, "B V"]:
    """Logits of the members of the clusters whose centroids fit best."""
    scores = linear(normed, clusters.centroids, out_dtype=jnp.float32)
    best = jax.lax.top_k(scores, cfg.top_centroids)[1]
    ids = clusters.order.reshape(cfg.centroids, -1)[best].reshape(normed.shape[0], -1)
    found = jnp.einsum(
        "bnd,bd->bn",
        head[ids],
        normed,
        precision=precision_of(normed.dtype),
        preferred_element_type=jnp.float32,
    )
    rows = jnp.arange(normed.shape[0])[:, None]
    return jnp.full((normed.shape[0], head.shape[0]), -jnp.inf).at[rows, ids].set(_capped(cfg, found))


def _capped(cfg: Config, out: Float[Array, "B N"]) -> Float[Array, "B N"]:
    return out if cfg.softcap is None else cfg.softcap * jnp.tanh(out / cfg.softcap)


def target_ids(cfg: Config) -> Int[Array, " Vd"] | None:
    """Target id of every draft id; None when they are the same and as many."""
    rows = cfg.body.vocab_size
    return None if rows >= cfg.vocab_size else jnp.arange(rows, dtype=jnp.int32)
