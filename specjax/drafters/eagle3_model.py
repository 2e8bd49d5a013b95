"""The network of an EAGLE-3 drafter: what it makes of a row of (target feature, next token) pairs."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.core.cache import DenseKV, RingKV
from specjax.drafters import body, mla
from specjax.drafters.eagle3_config import Config
from specjax.drafters.serial import Place, row
from specjax.layers import head as heads
from specjax.layers.attention import attend
from specjax.layers.linear import linear
from specjax.layers.norm import Joined, Rows, plain
from specjax.layers.rope import rope_angles
from specjax.types import AbsorbIn, ArraySpec, Shared


@struct.dataclass
class Weights:
    """All weights. ``N`` = taps x target width. Borrowed tables are None."""

    input_norm: Float[Array, " N"] | None
    fc_norm: tuple[Float[Array, " W"], ...] | None
    fc: Float[Array, "D N"] | None
    hidden_norm: Float[Array, " D"]
    layers: tuple[Any, ...]  # body.Layer or mla.Layer
    norm: Float[Array, " D"]
    embed: Float[Array, "V D"] | None
    head: Float[Array, "Vd D"] | None
    d2t: Int[Array, " Vd"] | None  # target id minus draft id


def abstract(cfg: Config) -> Weights:
    """Weight struct of ArraySpecs. The first layer reads embedding and feature side by side."""
    d, wide = cfg.body.hidden_size, len(cfg.taps) * cfg.target_size
    norm = lambda name, size: ArraySpec((size,), (None,), (f"{name}.weight",), "ones")  # noqa: E731
    table = lambda name, rows: ArraySpec((rows, d), ("vocab", None), (f"{name}.weight",))  # noqa: E731
    per_tap = tuple(norm(f"fc_norm.{j}", cfg.target_size) for j in range(len(cfg.taps)))
    return Weights(
        input_norm=norm("input_norm", wide) if cfg.norm_before_fc else None,
        fc_norm=per_tap if cfg.fc_norm else None,
        fc=ArraySpec((d, wide), (None, None), ("fc.weight",)) if cfg.taps else None,
        hidden_norm=norm("layers.0.hidden_norm", d),
        layers=tuple(_layer_specs(cfg, i) for i in range(cfg.body.layers)),
        norm=norm("norm", d),
        embed=table("embed_tokens", cfg.embed_rows) if cfg.own_embed else None,
        head=table("lm_head", cfg.head_rows) if cfg.own_head else None,
        d2t=ArraySpec((cfg.head_rows,), (None,), ("d2t",), "zeros", dtype="int32") if cfg.reduced else None,
    )


def _layer_specs(cfg: Config, index: int) -> body.Layer | mla.Layer:
    prefix, width = f"layers.{index}.", 2 * cfg.body.hidden_size if index == 0 else None
    if cfg.mla is not None:
        return mla.layer_specs(cfg.body, cfg.mla, prefix, width)
    return body.layer_specs(cfg.body, prefix, width)


def create_cache(cfg: Config, rows: int, slots: int, q_max: int, dtype: Any) -> tuple[DenseKV | RingKV, ...]:
    """One cache per layer: a ring where a window allows it."""
    if cfg.mla is not None:
        return tuple(mla.create_cache(cfg.mla, rows, slots, dtype) for _ in cfg.body.windows)
    g, c = cfg.body.kv_heads, cfg.body.head_dim
    return tuple(
        DenseKV.create(rows, g, slots, c, dtype) if w is None else RingKV.create(rows, g, w, q_max, c, dtype)
        for w in cfg.body.windows
    )


def fuse(p: Weights, cfg: Config, block: AbsorbIn) -> Float[Array, "B Q D"]:
    """The target's taps as one feature per position. Recycled states never come through here."""
    kind = p.norm.dtype
    if p.fc is None:
        return jnp.asarray(block.hidden, kind)
    parts = [block.taps[j].astype(kind) for j in cfg.taps]
    if p.fc_norm is None:
        joined = jnp.concatenate(parts, -1)
        return linear(joined if p.input_norm is None else body.normed(joined, p.input_norm, cfg.body), p.fc)
    normed = Joined(tuple(body.normed(x, w, cfg.body) for x, w in zip(parts, p.fc_norm, strict=True)))
    return linear(
        normed if p.input_norm is None else body.normed(normed.array(), p.input_norm, cfg.body), p.fc
    )


#: ``attention(index, layer, u, x)``: the residual stream of the rows that go on, and what attention adds to it.
Attention = Callable[
    [int, Any, Rows, Float[Array, "B Q D"]],
    tuple[Float[Array, "B N D"], Float[Array, "B N D"]],
]


def through(
    p: Weights,
    cfg: Config,
    embedded: Float[Array, "B Q D"],
    feature: Float[Array, "B Q D"],
    attention: Attention,
) -> Float[Array, "B N D"]:
    """Output (before the final norm) of the rows that ``attention`` lets go on, which knows their keys and values.

    Embeddings are raw table rows; their scale is the drafter's own, never the target's.
    """
    shape = cfg.body
    normed = body.normed(feature, p.hidden_norm, shape)
    embedded = embedded * jnp.asarray(cfg.input_scale, embedded.dtype)
    x = normed.array() if cfg.norm_before_residual else feature
    first = Joined((body.normed(embedded, p.layers[0].attn_norm, shape), normed))
    for i, layer in enumerate(p.layers):
        u = body.normed(x, layer.attn_norm, shape) if i else first
        x, added = attention(i, layer, u, x)
        x = body.after_attention(layer, shape, x, added)
        added = body.feed(layer, shape, body.normed(x, layer.mlp_norm, shape))
        x = body.after_mlp(layer, shape, x, added)
    return x


def run(
    p: Weights,
    cfg: Config,
    embedded: Float[Array, "B Q D"],
    feature: Float[Array, "B Q D"],
    at: Place,
    cache: tuple[DenseKV | RingKV, ...],
) -> tuple[Float[Array, "B D"], tuple[DenseKV | RingKV, ...]]:
    """Output of row ``at.last`` (before the final norm) and the caches with the whole block written.

    Of the last layer only that row is computed: the others matter to nothing but the caches.
    """
    written = []

    def attention(i, layer, u, x):
        pos, few = at.pos, i == len(cache) - 1 and at.pos.shape[1] > 1
        q, k, v = (None, *keys_values(layer, cfg, u, pos)) if few else all_heads(layer, cfg, u, pos)
        *cached, kv = cache[i].extend(k, v, pos, at.valid, at.mode)
        written.append(kv)
        if few:
            u, x, pos = (row(a, at.last) for a in (u, x, pos))
            q = queries(layer, cfg, u, pos)
        return x, _attention(layer, cfg, q, x.dtype, pos, cached, cfg.body.windows[i])

    return through(p, cfg, embedded, feature, attention)[:, 0], tuple(written)


def keys_values(
    layer: Any, cfg: Config, u: Rows, pos: Int[Array, "B Q"]
) -> tuple[Float[Array, "B Q G C"], Float[Array, "B Q G Cv"]]:
    """Rotated keys, and values; with latent attention what :func:`mla.keys_values` gives."""
    if cfg.mla is not None:
        return mla.keys_values(layer, cfg.body, cfg.mla, u, pos)
    k, v = body.keys_values(layer, cfg.body, u)
    return body.turn(k, cfg.body, rope_angles(cfg.body.rope, pos)), v


def queries(layer: Any, cfg: Config, u: Rows, pos: Int[Array, "B Q"]) -> Any:
    """Rotated queries ``[B Q H C]``; with latent attention what :func:`mla.queries` gives."""
    if cfg.mla is not None:
        return mla.queries(layer, cfg.body, cfg.mla, u, pos)
    return body.turn(body.queries(layer, cfg.body, u), cfg.body, rope_angles(cfg.body.rope, pos))


def all_heads(layer: Any, cfg: Config, u: Rows, pos: Int[Array, "B Q"]) -> tuple[Any, Array, Array]:
    """:func:`queries` and :func:`keys_values` of the same rows."""
    if cfg.mla is not None:
        return mla.heads(layer, cfg.body, cfg.mla, u, pos)
    angles = rope_angles(cfg.body.rope, pos)
    q, k, v = body.heads_of(layer, cfg.body, u)
    return body.turn(q, cfg.body, angles), body.turn(k, cfg.body, angles), v


def _attention(layer, cfg: Config, q, dtype, pos, cached, window):
    if cfg.mla is not None:
        return mla.mix(layer, cfg.mla, q, pos, tuple(cached), window)
    keys, values, key_pos = cached
    out = attend(q.astype(keys.dtype), keys, values, pos, key_pos, cfg.body.scale, window)
    return body.output(layer, out.astype(dtype))


def recycled(p: Weights, cfg: Config, x: Float[Array, "*N D"]) -> Float[Array, "*N D"]:
    """What the next draft step receives in place of a feature, and what logits are made of."""
    return body.norm(x, p.norm, cfg.body) if cfg.norm_output else x


def logits(p: Weights, shared: Shared, cfg: Config, state: Float[Array, "B D"]) -> Float[Array, "B Vd"]:
    """float32 logits over the draft vocabulary."""
    return scores(p, cfg, head(p, shared, cfg), state)


def head(p: Weights, shared: Shared, cfg: Config) -> Float[Array, "rows D"]:
    """Rows of the output head that are drafted from. A borrowed cut one is gathered, unless :func:`ready` has."""
    table = shared.head if p.head is None else p.head
    return table[target_ids(p, cfg)] if p.head is None and p.d2t is not None else table


def ready(p: Weights, shared: Shared, cfg: Config) -> Weights:
    """Weights with the rows of a borrowed cut head as a table of their own."""
    return dataclasses.replace(p, head=head(p, shared, cfg)) if p.head is None and p.d2t is not None else p


def scores(
    p: Weights, cfg: Config, table: Float[Array, "rows D"], state: Float[Array, "B D"]
) -> Float[Array, "B Vd"]:
    """float32 logits by the rows of :func:`head`, soft-capped if the drafter says so (the target's own cap is not
    its); rows of a head beyond the target's vocabulary are left out."""
    return heads.logits(read(p, cfg, state).astype(table.dtype), table, cap(cfg))


def best(
    p: Weights, cfg: Config, table: Float[Array, "rows D"], state: Float[Array, "B D"]
) -> Int[Array, " B"]:
    """The draft id with the largest of the :func:`scores`, which are not kept."""
    return heads.best(_before_head(p, cfg, state), table, cap(cfg))[1]


def cap(cfg: Config) -> heads.Cap:
    """How logits are made of products with the head."""
    return heads.Cap(cfg.logit_scale, cfg.softcap, cfg.vocab_size)


def read(p: Weights, cfg: Config, state: Float[Array, "*N D"]) -> Float[Array, "*N D"]:
    """What the head reads of a recycled state."""
    return plain(_before_head(p, cfg, state))


def _before_head(p: Weights, cfg: Config, state) -> Rows:
    return state if cfg.norm_output else body.normed(state, p.norm, cfg.body)


def target_ids(p: Weights, cfg: Config) -> Int[Array, " Vd"] | None:
    """Target id of every draft id; None when they are the same and as many."""
    rows = jnp.arange(min(cfg.head_rows, cfg.vocab_size), dtype=jnp.int32)
    if p.d2t is not None:
        return rows + p.d2t[: rows.shape[0]]
    return None if cfg.head_rows >= cfg.vocab_size else rows
