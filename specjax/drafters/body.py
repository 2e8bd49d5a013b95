"""The transformer layer that learned drafters share: grouped-query attention with optional head norms and a gated
feed-forward block.

Flavour "plain" is Llama's and Qwen3's layer, which differ in ``qk_norm`` only. Flavour "gemma4" has norms after
attention and feed-forward block as well as before, all of them rounded once; values that are normed without a weight;
scores without a scale; tanh-GELU; and a factor for the layer's output.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

from flax import struct
from jaxtyping import Array, Float

from specjax.kernels.kv_injection_op import Heads, Projections
from specjax.layers.linear import linear, linears
from specjax.layers.mlp import geglu, swiglu
from specjax.layers.norm import Normed, Rows, rms_norm, rms_norm_wide
from specjax.layers.rope import RopeConfig, rope_config, rotate
from specjax.types import ArraySpec

Flavour = Literal["plain", "gemma4"]
#: Activations of each flavour, as configs spell them; None = not said.
_ACTIVATIONS = {"plain": ("silu", None), "gemma4": ("gelu_pytorch_tanh", None)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Body:
    """Frozen geometry of a drafter's layers.

    ``windows``: per layer, None = full attention. ``values_from_keys``: no projection for values, they are the
    normed keys (before the weight of their norm and rope); only in flavour "gemma4".
    """

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
    flavour: Flavour = "plain"
    values_from_keys: bool = False

    @property
    def layers(self) -> int:
        return len(self.windows)

    @property
    def scale(self) -> float:
        """Factor of attention scores; Gemma's norms of queries and keys set it instead."""
        return self.head_dim**-0.5 if self.flavour == "plain" else 1.0

    def __post_init__(self):
        if self.flavour not in get_args(Flavour):
            raise ValueError(
                f"drafter body: flavour must be one of {get_args(Flavour)}, got {self.flavour!r}"
            )
        if self.flavour == "gemma4" and (not self.qk_norm or self.qkv_bias or self.o_bias):
            raise ValueError("drafter body: a gemma4 body norms queries and keys and has no bias")
        if self.values_from_keys and self.flavour != "gemma4":
            raise ValueError("drafter body: only a gemma4 body makes values of keys")


def body(
    hf: Mapping[str, Any], qk_norm: bool, flavour: Flavour = "plain", values_from_keys: bool = False
) -> Body:
    """Body from transformer keys as Hugging Face configs spell them.

    Raises ValueError for a setting that is not implemented, KeyError for a missing one.
    """
    activations = _ACTIVATIONS.get(flavour, ())
    if hf.get("hidden_act") not in activations or hf.get("mlp_bias"):
        raise ValueError(
            f"drafter body: hidden_act={hf.get('hidden_act')!r}, mlp_bias={hf.get('mlp_bias')!r}; "
            f"supported in flavour {flavour!r}: {' '.join(activations[:1])} without bias"
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
        flavour=flavour,
        values_from_keys=values_from_keys,
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
    """Weights of one layer. ``W`` is the width its attention reads (2D in EAGLE-3's first layer).

    The last three are Gemma's: norms of what attention and feed-forward block add, and the factor of the output.
    """

    attn_norm: Float[Array, " D"]
    q: Float[Array, "H C W"]
    k: Float[Array, "G C W"]
    v: Float[Array, "G C W"] | None
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
    post_attn_norm: Float[Array, " D"] | None
    post_mlp_norm: Float[Array, " D"] | None
    scalar: Float[Array, "1"] | None


def layer_specs(cfg: Body, prefix: str, width: int | None = None) -> Layer:
    """Specs of one layer under ``prefix`` ("layers.0."), by the names all formats share.

    ``post_attention_layernorm`` stands before the feed-forward block of a plain layer, and in Gemma after attention.
    """
    d, h, g, c, f = cfg.hidden_size, cfg.heads, cfg.kv_heads, cfg.head_dim, cfg.mlp_size
    w = d if width is None else width
    spec = lambda name, shape, axes, init="normal": ArraySpec(shape, axes, (prefix + name,), init)  # noqa: E731
    head = lambda name, on: spec(f"self_attn.{name}.weight", (c,), (None,), "ones") if on else None  # noqa: E731
    bias = lambda name, n, axis: (  # noqa: E731
        spec(f"self_attn.{name}_proj.bias", (n, c), (axis, None), "zeros") if cfg.qkv_bias else None
    )
    gemma = cfg.flavour == "gemma4"
    vector = lambda name, on=True: spec(f"{name}.weight", (d,), (None,), "ones") if on else None  # noqa: E731
    return Layer(
        attn_norm=vector("input_layernorm"),
        q=spec("self_attn.q_proj.weight", (h, c, w), ("heads", None, None)),
        k=spec("self_attn.k_proj.weight", (g, c, w), ("kv_heads", None, None)),
        v=None
        if cfg.values_from_keys
        else spec("self_attn.v_proj.weight", (g, c, w), ("kv_heads", None, None)),
        o=spec("self_attn.o_proj.weight", (d, h, c), (None, "heads", None)),
        q_bias=bias("q", h, "heads"),
        k_bias=bias("k", g, "kv_heads"),
        v_bias=bias("v", g, "kv_heads"),
        o_bias=spec("self_attn.o_proj.bias", (d,), (None,), "zeros") if cfg.o_bias else None,
        q_norm=head("q_norm", cfg.qk_norm),
        k_norm=head("k_norm", cfg.qk_norm),
        mlp_norm=vector("pre_feedforward_layernorm" if gemma else "post_attention_layernorm"),
        gate=spec("mlp.gate_proj.weight", (f, d), ("mlp", None)),
        up=spec("mlp.up_proj.weight", (f, d), ("mlp", None)),
        down=spec("mlp.down_proj.weight", (d, f), (None, "mlp")),
        post_attn_norm=vector("post_attention_layernorm", gemma),
        post_mlp_norm=vector("post_feedforward_layernorm", gemma),
        scalar=spec("layer_scalar", (1,), (None,), "ones") if gemma else None,
    )


def norm(x: Float[Array, "*N D"], weight: Float[Array, " D"], cfg: Body) -> Float[Array, "*N D"]:
    """RMS norm in the flavour's rounding."""
    return (rms_norm if cfg.flavour == "plain" else rms_norm_wide)(x, weight, cfg.eps)


def normed(x: Float[Array, "*N D"], weight: Float[Array, " D"], cfg: Body) -> Normed:
    """:func:`norm`, left to the product that reads it."""
    return Normed(x, weight, cfg.eps, wide=cfg.flavour != "plain")


def turn(
    x: Float[Array, "B Q N C"], cfg: Body, angles: tuple[Float[Array, "B Q R"], Float[Array, "B Q R"]]
) -> Float[Array, "B Q N C"]:
    """Queries or keys at their positions."""
    return rotate(x, *angles, cfg.rope.pair)


def queries(layer: Layer, cfg: Body, x: Rows) -> Float[Array, "B Q H C"]:
    """Queries before rope."""
    q = linear(x, layer.q, layer.q_bias)
    return q if layer.q_norm is None else norm(q, layer.q_norm, cfg)


def keys_values(layer: Layer, cfg: Body, x: Rows) -> tuple[Float[Array, "B Q G C"], Float[Array, "B Q G C"]]:
    """Keys (before rope) and values. Gemma's values are normed without a weight."""
    own = () if layer.v is None else (layer.v,)
    raw, *rest = linears(x, (layer.k, *own), (layer.k_bias, layer.v_bias)[: 1 + len(own)])
    return _finished(layer, cfg, raw, rest[0] if rest else raw)


def _finished(layer: Layer, cfg: Body, raw, v):
    k = raw if layer.k_norm is None else norm(raw, layer.k_norm, cfg)
    return k, v if cfg.flavour == "plain" else rms_norm_wide(v, None, cfg.eps)


def heads_of(
    layer: Layer, cfg: Body, x: Rows
) -> tuple[Float[Array, "B Q H C"], Float[Array, "B Q G C"], Float[Array, "B Q G C"]]:
    """:func:`queries` and :func:`keys_values` of the same rows."""
    own = () if layer.v is None else (layer.v,)
    q, raw, *rest = linears(
        x, (layer.q, layer.k, *own), (layer.q_bias, layer.k_bias, layer.v_bias)[: 2 + len(own)]
    )
    q = q if layer.q_norm is None else norm(q, layer.q_norm, cfg)
    return q, *_finished(layer, cfg, raw, rest[0] if rest else raw)


def projections(layer: Layer) -> Projections:
    """What keys and values of a layer are made with."""
    return Projections(layer.k, layer.v, layer.k_bias, layer.v_bias, layer.k_norm)


def heads(cfg: Body) -> Heads:
    """How keys and values are made."""
    gemma = cfg.flavour == "gemma4"
    return Heads(cfg.rope, cfg.eps, wide=gemma, value_norm=gemma)


def output(layer: Layer, mixed: Float[Array, "B Q H C"]) -> Float[Array, "B Q D"]:
    """The output projection of attention."""
    heads = mixed.reshape(*mixed.shape[:2], -1)
    return linear(heads, layer.o.reshape(layer.o.shape[0], -1), layer.o_bias)


def feed(layer: Any, cfg: Body, x: Rows) -> Float[Array, "B Q D"]:
    """The feed-forward block of a layer of any attention, over normed rows."""
    return (swiglu if cfg.flavour == "plain" else geglu)(x, layer.gate, layer.up, layer.down)


def after_attention(
    layer: Any, cfg: Body, x: Float[Array, "B Q D"], added: Float[Array, "B Q D"]
) -> Float[Array, "B Q D"]:
    """The residual stream with what attention adds; ``layer`` may have any attention if the body is plain."""
    return x + (added if cfg.flavour == "plain" else norm(added, layer.post_attn_norm, cfg))


def after_mlp(
    layer: Any, cfg: Body, x: Float[Array, "B Q D"], added: Float[Array, "B Q D"]
) -> Float[Array, "B Q D"]:
    """A layer's output: the residual stream with what the feed-forward block adds, in Gemma scaled as a whole."""
    if cfg.flavour == "plain":
        return x + added
    return (x + norm(added, layer.post_mlp_norm, cfg)) * layer.scalar.astype(x.dtype)
