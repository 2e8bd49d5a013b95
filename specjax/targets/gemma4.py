"""Gemma 4 text models: dense, with experts beside the dense block, and small ones with inputs per layer.

Checkpoint formats: Hugging Face ``Gemma4ForCausalLM``, and the text part of ``Gemma4ForConditionalGeneration``
and ``Gemma4UnifiedForConditionalGeneration``; experts fused or one by one.

Layers that see all positions have larger heads and turn only a quarter of their channels; in the larger models
one projection gives their keys and values, so that values alone are cached. In the small models the last layers
read keys and values of an earlier layer of their kind and keep none.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.core.cache import DenseKV, RingKV, ValueKV
from specjax.layers.attention import attend
from specjax.layers.linear import linear, linears
from specjax.layers.mlp import geglu, gelu_tanh
from specjax.layers.moe import experts, route
from specjax.layers.norm import Normed, rms_norm_wide
from specjax.layers.rope import rope_angles, rotate
from specjax.targets import gemma
from specjax.targets.decoder import commit, slots_of
from specjax.targets.gemma import PREFIXES, TIED, Kind, best, min_resume, shared, unembed
from specjax.targets.gemma4_config import Config, config
from specjax.targets.gemma4_weights import Gate, Inputs, Layer, Moe, Weights, abstract, skipped
from specjax.types import KVView, Mode, TapSpec, TargetOut

__all__ = [
    "PREFIXES", "TIED", "Config", "Weights", "abstract", "best", "commit", "config", "forward", "init_cache",
    "kv_view", "min_resume", "shared", "skipped", "unembed",
]  # fmt: skip

Cache = tuple[DenseKV | RingKV | ValueKV, ...]


def init_cache(cfg: Config, rows: int, slots: int, q_max: int, dtype: Any) -> Cache:
    """One cache per layer that has keys and values of its own."""

    def one(i: int):
        kind = cfg.kind(i)
        if cfg.values_only(i):
            return ValueKV.create(rows, kind.kv_heads, slots, kind.head_dim, dtype)
        return gemma.new_cache(kind, rows, slots, q_max, dtype)

    return tuple(one(i) for i in range(cfg.cached))


def forward(
    p: Weights,
    cfg: Config,
    tokens: Int[Array, "B Q"],
    pos: Int[Array, "B Q"],
    valid: Int[Array, " B"],
    cache: Cache,
    taps: TapSpec,
    mode: Mode,
) -> TargetOut:
    """One pass over Q contiguous positions per row. Tap 0 is the scaled embedding."""
    x = gemma.embed(p.embed, tokens, cfg.embed_scale)
    inputs = None if p.per_layer is None else _inputs(p.per_layer, cfg, tokens, x)
    angles = {kind: rope_angles(kind.rope, pos) for kind in (cfg.sliding, cfg.full)}
    slot_angles = _slot_angles(cfg, cache)
    kept, new_cache, seen = {}, [], {}
    for i, layer in enumerate(p.layers):
        if i in taps.taps:
            kept[i] = x
        kind = cfg.kind(i)
        q, *own = linears(Normed(x, layer.attn_norm, cfg.eps, wide=True), _projections(layer, i < cfg.cached))
        if i < cfg.cached:  # later layers of the kind read what the last of these left
            *seen[kind], kv = _extend(
                layer, cfg, kind, own, angles[kind], slot_angles, pos, valid, cache[i], mode
            )
            new_cache.append(kv)
        x = x + rms_norm_wide(
            _attend(layer, cfg, kind, q, angles[kind], pos, *seen[kind]), layer.post_attn_norm, cfg.eps
        )
        x = x + _feed_forward(layer, cfg, x)
        if inputs is not None and layer.per_layer is not None:
            x = x + _take_in(layer.per_layer, cfg, x, inputs[:, :, i])
        x = x * layer.scalar
    if cfg.num_layers in taps.taps:
        kept[cfg.num_layers] = x
    return TargetOut(rms_norm_wide(x, p.norm, cfg.eps), kept, tuple(new_cache))


def _inputs(
    p: Inputs, cfg: Config, tokens: Int[Array, "B Q"], x: Float[Array, "B Q D"]
) -> Float[Array, "B Q L P"]:
    """Every layer's own input: half of it the token's, half the embedding's."""
    size = cfg.per_layer_size
    split = lambda y: y.reshape(*tokens.shape, cfg.num_layers, size)  # noqa: E731
    token = split(gemma.embed(p.embed, tokens, size**0.5))
    context = split(_times(linear(x, p.project), cfg.hidden_size**-0.5))
    return _times(rms_norm_wide(context, p.norm, cfg.eps) + token, 2**-0.5)


def _times(x, factor: float):
    """A number multiplies in float32; only the embedding's is rounded before."""
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


def _take_in(
    p: Gate, cfg: Config, x: Float[Array, "B Q D"], given: Float[Array, "B Q P"]
) -> Float[Array, "B Q D"]:
    gated = gelu_tanh(linear(x, p.gate)) * given
    return rms_norm_wide(linear(gated, p.project), p.norm, cfg.eps)


def _projections(layer: Layer, caches: bool) -> tuple[Array, ...]:
    """Weights of queries and, in a layer with a cache of its own, of keys and values (None: they are the keys')."""
    own = () if not caches else (layer.k,) if layer.v is None else (layer.k, layer.v)
    return layer.q, *own


def _extend(layer, cfg, kind: Kind, own, angles, slot_angles, pos, valid, kv, mode: Mode):
    """Keys, values and positions that the layer's queries see, and its cache with the block."""
    raw, *rest = own
    values = rms_norm_wide(rest[0] if rest else raw, None, cfg.eps)
    if isinstance(kv, ValueKV):
        return kv.extend(functools.partial(_keys, layer.k_norm, kind, slot_angles), values, pos, valid, mode)
    keys = _turn(rms_norm_wide(raw, layer.k_norm, cfg.eps), kind, angles)
    return kv.extend(keys, values, pos, valid, mode)


def _keys(norm, kind: Kind, angles, values: Float[Array, "B G S C"]) -> Float[Array, "B G S C"]:
    """Keys of a layer that has one projection for both: they are values times the weight of their norm."""
    keys = (values.astype(jnp.float32) * norm.astype(jnp.float32)).astype(values.dtype)
    angles = [jnp.broadcast_to(a, (keys.shape[0], *a.shape[1:])) for a in angles]
    return _turn(keys.swapaxes(1, 2), kind, angles).swapaxes(1, 2)


def _turn(x, kind: Kind, angles):
    cos, sin = angles
    return rotate(x, cos, sin, kind.rope.pair)


def _slot_angles(cfg: Config, cache: Cache) -> tuple[Float[Array, "_ S R"], Float[Array, "_ S R"]] | None:
    """Rotation of every slot of the caches of values, the same for all of them."""
    held = [kv for kv in cache if isinstance(kv, ValueKV)]
    return rope_angles(cfg.full.rope, held[0].positions()) if held else None


def _attend(layer, cfg, kind: Kind, q, angles, pos, keys, values, key_pos):
    """Attention without a scale: the norms of queries and keys set it."""
    q = _turn(rms_norm_wide(q, layer.q_norm, cfg.eps), kind, angles)
    return gemma.output(attend(q, keys, values, pos, key_pos, 1.0, kind.window), layer.o)


def _feed_forward(layer: Layer, cfg: Config, x: Float[Array, "B Q D"]) -> Float[Array, "B Q D"]:
    """The dense block and the experts read the same residual stream."""
    y = geglu(Normed(x, layer.mlp_norm, cfg.eps, wide=True), layer.gate, layer.up, layer.down)
    if layer.moe is not None:
        chosen = _experts(layer.moe, cfg, x)
        y = rms_norm_wide(y, layer.moe.dense_norm, cfg.eps) + rms_norm_wide(
            chosen, layer.moe.post_norm, cfg.eps
        )
    return rms_norm_wide(y, layer.post_mlp_norm, cfg.eps)


def _experts(moe: Moe, cfg: Config, x: Float[Array, "B Q D"]) -> Float[Array, "B Q D"]:
    """The router reads the stream normed without a weight; each expert's weight has a factor of its own."""
    rows = x.reshape(-1, x.shape[-1])
    scaled = _times(rms_norm_wide(rows, None, cfg.eps) * moe.router_scale, cfg.hidden_size**-0.5)
    weights, ids = route(scaled, moe.router, cfg.experts_per_token, True)
    weights = weights * moe.expert_scale.astype(jnp.float32)[ids]
    rows = rms_norm_wide(rows, moe.norm, cfg.eps)
    return experts(rows, weights, ids, moe.gate, moe.up, moe.down, gelu_tanh).reshape(x.shape)


def kv_view(p: Weights, cfg: Config, cache: Cache, kind: str) -> KVView:
    """Keys, values and positions of the last layer of ``kind`` ("full" or "sliding") that has its own."""
    index = gemma.last_of(cfg, cfg.cached, kind)
    kv = cache[index]
    if not isinstance(kv, ValueKV):
        return gemma.view(kv)
    keys_of = functools.partial(_keys, p.layers[index].k_norm, cfg.full, _slot_angles(cfg, cache))
    keys, values = kv.read(keys_of)
    return KVView(keys, values, slots_of(kv.v))
