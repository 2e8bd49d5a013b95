"""The network of an EAGLE-3 drafter: what it makes of a row of (target feature, next token) pairs."""

from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.core.cache import DenseKV, RingKV
from specjax.drafters import body, mla
from specjax.drafters.eagle3_config import Config
from specjax.drafters.serial import Place, row
from specjax.layers.attention import attend
from specjax.layers.linear import linear
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
    if p.fc_norm is not None:
        parts = [body.norm(x, w, cfg.body) for x, w in zip(parts, p.fc_norm, strict=True)]
    joined = jnp.concatenate(parts, -1)
    if p.input_norm is not None:
        joined = body.norm(joined, p.input_norm, cfg.body)
    return linear(joined, p.fc)


def run(
    p: Weights,
    cfg: Config,
    embedded: Float[Array, "B Q D"],
    feature: Float[Array, "B Q D"],
    at: Place,
    cache: tuple[DenseKV | RingKV, ...],
) -> tuple[Float[Array, "B D"], tuple[DenseKV | RingKV, ...]]:
    """Output of row ``at.last`` (before the final norm) and the caches with the whole block written.

    Of the last layer only that row is computed: the others matter to nothing but the caches. Embeddings are raw
    table rows; their scale is the drafter's own, never the target's.
    """
    shape, pos, kept = cfg.body, at.pos, []
    normed = body.norm(feature, p.hidden_norm, shape)
    embedded = embedded * jnp.asarray(cfg.input_scale, embedded.dtype)
    x = normed if cfg.norm_before_residual else feature
    u = jnp.concatenate([body.norm(embedded, p.layers[0].attn_norm, shape), normed], -1)
    for i, (layer, kv) in enumerate(zip(p.layers, cache, strict=True)):
        u = body.norm(x, layer.attn_norm, shape) if i else u
        k, v = _keys_values(layer, cfg, u, pos)
        keys, values, key_pos, kv = kv.extend(k, v, pos, at.valid, at.mode)
        if i == len(cache) - 1:
            u, x, pos = (row(a, at.last) for a in (u, x, pos))
        added = _attention(layer, cfg, u, pos, (keys, values, key_pos), shape.windows[i])
        x = body.after_attention(layer, shape, x, added)
        added = body.feed(layer, shape, body.norm(x, layer.mlp_norm, shape))
        x = body.after_mlp(layer, shape, x, added)
        kept.append(kv)
    return x[:, 0], tuple(kept)


def _keys_values(layer, cfg: Config, u, pos):
    if cfg.mla is not None:
        return mla.keys_values(layer, cfg.body, cfg.mla, u, pos)
    k, v = body.keys_values(layer, cfg.body, u)
    return body.turn(k, cfg.body, rope_angles(cfg.body.rope, pos)), v


def _attention(layer, cfg: Config, u, pos, cached, window):
    if cfg.mla is not None:
        return mla.mix(layer, cfg.body, cfg.mla, u, pos, cached, window)
    keys, values, key_pos = cached
    q = body.turn(body.queries(layer, cfg.body, u), cfg.body, rope_angles(cfg.body.rope, pos))
    out = attend(q.astype(keys.dtype), keys, values, pos, key_pos, cfg.body.scale, window)
    return body.output(layer, out.astype(u.dtype))


def recycled(p: Weights, cfg: Config, x: Float[Array, "B D"]) -> Float[Array, "B D"]:
    """What the next draft step receives in place of a feature, and what :func:`logits` reads."""
    return body.norm(x, p.norm, cfg.body) if cfg.norm_output else x


def logits(p: Weights, shared: Shared, cfg: Config, state: Float[Array, "B D"]) -> Float[Array, "B Vd"]:
    """float32 logits over the draft vocabulary, soft-capped if the drafter says so (the target's own cap is not
    its); rows of a head beyond the target's vocabulary are left out."""
    normed = state if cfg.norm_output else body.norm(state, p.norm, cfg.body)
    head = shared.head if p.head is None else p.head
    if p.head is None and p.d2t is not None:
        head = head[target_ids(p, cfg)]
    out = linear(normed.astype(head.dtype), head, out_dtype=jnp.float32) * cfg.logit_scale
    out = out if cfg.softcap is None else cfg.softcap * jnp.tanh(out / cfg.softcap)
    return out[:, : cfg.vocab_size]


def target_ids(p: Weights, cfg: Config) -> Int[Array, " Vd"] | None:
    """Target id of every draft id; None when they are the same and as many."""
    rows = jnp.arange(min(cfg.head_rows, cfg.vocab_size), dtype=jnp.int32)
    if p.d2t is not None:
        return rows + p.d2t[: rows.shape[0]]
    return None if cfg.head_rows >= cfg.vocab_size else rows
