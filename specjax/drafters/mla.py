"""Latent attention for drafter layers (DeepSeek, Kimi); the attention itself is :mod:`specjax.layers.latent`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from flax import struct
from jaxtyping import Array, Float, Int

from specjax.core.cache import Filled
from specjax.drafters.body import Body
from specjax.layers import latent as attention
from specjax.layers.attention import causal
from specjax.layers.latent import Latent, create_cache, latent
from specjax.layers.norm import Rows
from specjax.layers.rope import rope_angles, rope_config
from specjax.types import ArraySpec

__all__ = [
    "Latent",
    "Layer",
    "create_cache",
    "heads",
    "keys_values",
    "latent",
    "latent_body",
    "layer_specs",
    "mix",
    "queries",
]


def latent_body(base: Body, hf: Mapping[str, Any]) -> Body:
    """``base`` with rope over the positional channels only; ValueError for a bias, which is not implemented."""
    if base.qkv_bias or base.o_bias:
        raise ValueError("drafter body: attention_bias with latent attention is not supported")
    return dataclasses.replace(base, rope=rope_config(hf, int(hf["qk_rope_head_dim"])))


@struct.dataclass
class Layer:
    """Weights of one layer. ``W`` width attention reads, ``R`` query rank (or W), ``L`` rank of the latent."""

    attn_norm: Float[Array, " D"]
    q_down: Float[Array, "R W"] | None
    q_norm: Float[Array, " R"] | None
    q: Float[Array, "H C R"]  # C: nope channels, then rope channels
    kv_down: Float[Array, "Lr W"]  # latent, then the shared rope channels of the key
    kv_norm: Float[Array, " L"]
    kv_up: Float[Array, "H Ckv L"]  # nope channels of the key, then the value
    o: Float[Array, "D H Cv"]
    mlp_norm: Float[Array, " D"]
    gate: Float[Array, "F D"]
    up: Float[Array, "F D"]
    down: Float[Array, "D F"]


def layer_specs(cfg: Body, mla: Latent, prefix: str, width: int | None = None) -> Layer:
    """Specs of one layer under ``prefix`` ("layers.0.")."""
    d, f = cfg.hidden_size, cfg.mlp_size
    spec = lambda name, shape, axes, init="normal": ArraySpec(  # noqa: E731
        shape, axes, (f"{prefix}{name}.weight",), init
    )
    return Layer(
        attn_norm=spec("input_layernorm", (d,), (None,), "ones"),
        **attention.specs(mla, cfg.heads, d, prefix + "self_attn.", width),
        mlp_norm=spec("post_attention_layernorm", (d,), (None,), "ones"),
        gate=spec("mlp.gate_proj", (f, d), ("mlp", None)),
        up=spec("mlp.up_proj", (f, d), ("mlp", None)),
        down=spec("mlp.down_proj", (d, f), (None, "mlp")),
    )


def keys_values(
    layer: Layer, cfg: Body, mla: Latent, x: Rows, pos: Int[Array, "B Q"]
) -> tuple[Float[Array, "B Q 1 R"], Float[Array, "B Q 1 L"]]:
    """Rotated rope channels of the key and the normed latent."""
    return attention.keys_values(layer, mla, cfg.eps, x, rope_angles(cfg.rope, pos))


def queries(layer: Layer, cfg: Body, mla: Latent, x: Rows, pos: Int[Array, "B Q"]) -> attention.Queries:
    """What meets the latent, and what meets the rope channels of the key."""
    return attention.queries(layer, mla, cfg.eps, x, rope_angles(cfg.rope, pos))


def heads(
    layer: Layer, cfg: Body, mla: Latent, x: Rows, pos: Int[Array, "B Q"]
) -> tuple[attention.Queries, Float[Array, "B Q 1 R"], Float[Array, "B Q 1 L"]]:
    """:func:`queries` and :func:`keys_values` of the same rows."""
    return attention.heads(layer, mla, cfg.eps, x, rope_angles(cfg.rope, pos))


def mix(
    layer: Layer,
    mla: Latent,
    asked: attention.Queries,
    pos: Int[Array, "B Q"],
    cached: tuple[Float[Array, "B 1 S R"], Float[Array, "B 1 S L"], Filled | Int[Array, "B S"]],
    window: int | None,
) -> Float[Array, "B Q D"]:
    """Attention of :func:`queries` at positions ``pos`` over what :func:`keys_values` put into the cache."""
    keys, low, key_pos = cached
    return attention.mix(layer, mla, asked, (keys, low), causal(pos, key_pos, window))
