"""The transformer layer that learned drafters share: grouped-query attention with optional head norms,
SwiGLU, pre-norm. Llama-style and Qwen3-style bodies differ in ``qk_norm`` only.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from flax import struct
from jaxtyping import Array, Float

from specjax.layers.linear import linear
from specjax.layers.norm import rms_norm
from specjax.layers.rope import RopeConfig, rope_config
from specjax.types import ArraySpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Body:
    """Frozen geometry of a drafter's layers. ``windows``: per layer, None = full attention."""

    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_size: int
    eps: float
    rope: RopeConfig
    qk_norm: bool
    qkv_bias: bool = False
    o_bias: bool = False
    windows: tuple[int | None, ...] = (None,)

    @property
    def layers(self) -> int:
        return len(self.windows)


def body(hf: Mapping[str, Any], qk_norm: bool) -> Body:
    """Body from transformer keys as Hugging Face configs spell them.

    Raises ValueError for a setting that is not implemented, KeyError for a missing one.
    """
    if hf.get("hidden_act", "silu") != "silu" or hf.get("mlp_bias"):
        raise ValueError(
            f"drafter body: hidden_act={hf.get('hidden_act')!r}, mlp_bias={hf.get('mlp_bias')!r}; "
            "supported: silu without bias"
        )
    heads, width, layers = (
        int(hf["num_attention_heads"]),
        int(hf["hidden_size"]),
        int(hf["num_hidden_layers"]),
    )
    head_dim = int(hf.get("head_dim") or width // heads)
    bias = bool(hf.get("attention_bias", False))
    return Body(
        hidden_size=width,
        heads=heads,
        kv_heads=int(hf.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        mlp_size=int(hf["intermediate_size"]),
        eps=float(hf.get("rms_norm_eps", 1e-6)),
        rope=rope_config(hf, head_dim),
        qk_norm=qk_norm,
        qkv_bias=bias,
        o_bias=bias,
        windows=_windows(hf, layers),
    )


def _windows(hf: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Window of every layer: only layers whose type says so slide."""
    kinds = hf.get("layer_types") or ["full_attention"] * layers
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown or len(kinds) != layers:
        raise ValueError(
            f"drafter body: layer_types {list(kinds)} for {layers} layers; supported: full_attention, "
            "sliding_attention, one per layer"
        )
    if "sliding_attention" in kinds and not hf.get("sliding_window"):
        raise ValueError("drafter body: layer_types has sliding layers, but there is no sliding_window")
    return tuple(int(hf["sliding_window"]) if kind == "sliding_attention" else None for kind in kinds)


@struct.dataclass
class Layer:
    """Weights of one layer. ``W`` is the width its attention reads (2D in EAGLE-3's first layer)."""

    attn_norm: Float[Array, " D"]
    q: Float[Array, "H C W"]
    k: Float[Array, "G C W"]
    v: Float[Array, "G C W"]
    o: Float[Array, "D H C"]
    q_bias: Float[Array, "H C"] | None
    k_bias: Float[Array, "G C"] | None
    v_bias: Float[Array, "G C"] | None
    o_bias: Float[Array, " D"] | None
    q_norm: Float[Array, " C"] | None
    k_norm: Float[Array, " C"] | None
    mlp_norm: Float[Array, " D"]
    gate: Float[Array, "F D"]
    up: Float[Array, "F D"]
    down: Float[Array, "D F"]


def layer_specs(cfg: Body, prefix: str, width: int | None = None) -> Layer:
    """Specs of one layer under ``prefix`` ("layers.0."), by the names all formats share."""
    d, h, g, c, f = cfg.hidden_size, cfg.heads, cfg.kv_heads, cfg.head_dim, cfg.mlp_size
    w = d if width is None else width
    spec = lambda name, shape, axes, init="normal": ArraySpec(shape, axes, (prefix + name,), init)  # noqa: E731
    head = lambda name, on: spec(f"self_attn.{name}.weight", (c,), (None,), "ones") if on else None  # noqa: E731
    bias = lambda name, n, axis: (  # noqa: E731
        spec(f"self_attn.{name}_proj.bias", (n, c), (axis, None), "zeros") if cfg.qkv_bias else None
    )
    return Layer(
        attn_norm=spec("input_layernorm.weight", (d,), (None,), "ones"),
        q=spec("self_attn.q_proj.weight", (h, c, w), ("heads", None, None)),
        k=spec("self_attn.k_proj.weight", (g, c, w), ("kv_heads", None, None)),
        v=spec("self_attn.v_proj.weight", (g, c, w), ("kv_heads", None, None)),
        o=spec("self_attn.o_proj.weight", (d, h, c), (None, "heads", None)),
        q_bias=bias("q", h, "heads"),
        k_bias=bias("k", g, "kv_heads"),
        v_bias=bias("v", g, "kv_heads"),
        o_bias=spec("self_attn.o_proj.bias", (d,), (None,), "zeros") if cfg.o_bias else None,
        q_norm=head("q_norm", cfg.qk_norm),
        k_norm=head("k_norm", cfg.qk_norm),
        mlp_norm=spec("post_attention_layernorm.weight", (d,), (None,), "ones"),
        gate=spec("mlp.gate_proj.weight", (f, d), ("mlp", None)),
        up=spec("mlp.up_proj.weight", (f, d), ("mlp", None)),
        down=spec("mlp.down_proj.weight", (d, f), (None, "mlp")),
    )


def queries(layer: Layer, cfg: Body, x: Float[Array, "B Q W"]) -> Float[Array, "B Q H C"]:
    """Queries before rope."""
    q = linear(x, layer.q, layer.q_bias)
    return q if layer.q_norm is None else rms_norm(q, layer.q_norm, cfg.eps)


def keys_values(
    layer: Layer, cfg: Body, x: Float[Array, "B Q W"]
) -> tuple[Float[Array, "B Q G C"], Float[Array, "B Q G C"]]:
    """Keys (before rope) and values."""
    k = linear(x, layer.k, layer.k_bias)
    k = k if layer.k_norm is None else rms_norm(k, layer.k_norm, cfg.eps)
    return k, linear(x, layer.v, layer.v_bias)


def output(layer: Layer, mixed: Float[Array, "B Q H C"]) -> Float[Array, "B Q D"]:
    """The output projection of attention."""
    heads = mixed.reshape(*mixed.shape[:2], -1)
    return linear(heads, layer.o.reshape(layer.o.shape[0], -1), layer.o_bias)
