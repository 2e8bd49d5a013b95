"""Llama-type targets: Llama 2 and 3.x, SmolLM2, and Qwen2.5 (q/k/v biases).

Checkpoint format: Hugging Face ``LlamaForCausalLM`` and ``Qwen2ForCausalLM``.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from flax import struct
from jaxtyping import Array, Float, Int

from specjax.core.cache import DenseKV
from specjax.layers.attention import attend
from specjax.layers.linear import linear, linears
from specjax.layers.mlp import swiglu
from specjax.layers.norm import Normed, rms_norm
from specjax.layers.rope import RopeConfig, rope_angles, rope_config, rotate
from specjax.targets.decoder import Weights, best, commit, outer_specs, shared, slots_of, unembed, walk
from specjax.targets.hf import check_config, only_full_attention
from specjax.types import ArraySpec, KVView, Mode, TapSpec, TargetOut

__all__ = [
    "FIXED", "KNOWN", "Config", "Layer", "Weights", "abstract", "attention_of", "attention_specs", "best",
    "commit", "common_config", "config", "forward", "init_cache", "kv_view", "min_resume", "output", "project",
    "run_layers", "shared", "unembed",
]  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Frozen settings of a Llama-type target."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_size: int
    max_positions: int
    eps: float
    rope: RopeConfig
    tied: bool
    qkv_bias: bool = False
    o_bias: bool = False


def config(hf: Mapping[str, Any]) -> Config:
    """Config from ``config.json`` of a llama or qwen2 checkpoint."""
    check_config(hf, KNOWN, FIXED)
    return Config(**common_config(hf))


def common_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of :class:`Config` from a config dict that has been checked."""
    only_full_attention(hf)
    heads, width = int(hf["num_attention_heads"]), int(hf["hidden_size"])
    head_dim = int(hf.get("head_dim") or width // heads)
    qwen = hf.get("model_type") == "qwen2"
    return {
        "vocab_size": int(hf["vocab_size"]),
        "hidden_size": width,
        "num_layers": int(hf["num_hidden_layers"]),
        "heads": heads,
        "kv_heads": int(hf.get("num_key_value_heads") or heads),
        "head_dim": head_dim,
        "mlp_size": int(hf["intermediate_size"]),
        "max_positions": int(hf["max_position_embeddings"]),
        "eps": float(hf.get("rms_norm_eps", 1e-6)),
        "rope": rope_config(hf, head_dim),
        "tied": bool(hf.get("tie_word_embeddings", False)),
        "qkv_bias": qwen or bool(hf.get("attention_bias", False)),
        "o_bias": not qwen and bool(hf.get("attention_bias", False)),
    }


KNOWN = {
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "intermediate_size", "max_position_embeddings", "rms_norm_eps", "attention_bias",
    "max_window_layers", "sliding_window", "layer_types",
}  # fmt: skip
FIXED = {
    "hidden_act": ("silu",),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "pretraining_tp": (1, None),
}


@struct.dataclass
class Layer:
    """Weights of one decoder layer."""

    attn_norm: Float[Array, " D"]
    q: Float[Array, "H C D"]
    k: Float[Array, "G C D"]
    v: Float[Array, "G C D"]
    o: Float[Array, "D H C"]
    q_bias: Float[Array, "H C"] | None
    k_bias: Float[Array, "G C"] | None
    v_bias: Float[Array, "G C"] | None
    o_bias: Float[Array, " D"] | None
    mlp_norm: Float[Array, " D"]
    gate: Float[Array, "F D"]
    up: Float[Array, "F D"]
    down: Float[Array, "D F"]


def abstract(cfg: Config) -> Weights:
    """Weight struct of ArraySpecs."""
    layers = tuple(_abstract_layer(cfg, f"model.layers.{i}.") for i in range(cfg.num_layers))
    return Weights(layers=layers, **outer_specs(cfg))


def _abstract_layer(cfg: Config, prefix: str) -> Layer:
    d, f = cfg.hidden_size, cfg.mlp_size
    return Layer(
        **attention_specs(cfg, prefix),
        gate=ArraySpec((f, d), ("mlp", None), (prefix + "mlp.gate_proj.weight",)),
        up=ArraySpec((f, d), ("mlp", None), (prefix + "mlp.up_proj.weight",)),
        down=ArraySpec((d, f), (None, "mlp"), (prefix + "mlp.down_proj.weight",)),
    )


def attention_specs(cfg: Config, prefix: str) -> dict[str, ArraySpec | None]:
    """Specs of a layer's attention weights and of its two norms, by field name."""
    d, h, g, c = cfg.hidden_size, cfg.heads, cfg.kv_heads, cfg.head_dim
    spec = lambda name, shape, axes, init="normal": ArraySpec(shape, axes, (prefix + name,), init)  # noqa: E731
    bias = lambda name, n, axis: (  # noqa: E731
        spec(f"self_attn.{name}_proj.bias", (n, c), (axis, None), "zeros") if cfg.qkv_bias else None
    )
    return {
        "attn_norm": spec("input_layernorm.weight", (d,), (None,), "ones"),
        "q": spec("self_attn.q_proj.weight", (h, c, d), ("heads", None, None)),
        "k": spec("self_attn.k_proj.weight", (g, c, d), ("kv_heads", None, None)),
        "v": spec("self_attn.v_proj.weight", (g, c, d), ("kv_heads", None, None)),
        "o": spec("self_attn.o_proj.weight", (d, h, c), (None, "heads", None)),
        "q_bias": bias("q", h, "heads"),
        "k_bias": bias("k", g, "kv_heads"),
        "v_bias": bias("v", g, "kv_heads"),
        "o_bias": spec("self_attn.o_proj.bias", (d,), (None,), "zeros") if cfg.o_bias else None,
        "mlp_norm": spec("post_attention_layernorm.weight", (d,), (None,), "ones"),
    }


def init_cache(cfg: Config, rows: int, slots: int, q_max: int, dtype) -> tuple[DenseKV, ...]:
    """One dense cache per layer."""
    del q_max
    return tuple(
        DenseKV.create(rows, cfg.kv_heads, slots, cfg.head_dim, dtype) for _ in range(cfg.num_layers)
    )


def forward(
    p: Weights,
    cfg: Config,
    tokens: Int[Array, "B Q"],
    pos: Int[Array, "B Q"],
    valid: Int[Array, " B"],
    cache: tuple[DenseKV, ...],
    taps: TapSpec,
    mode: Mode,
) -> TargetOut:
    """One pass over Q contiguous positions per row."""
    return run_layers(p, cfg, tokens, pos, valid, cache, taps, mode, project, _feed_forward)


def run_layers(p, cfg, tokens, pos, valid, cache, taps, mode, project, feed_forward) -> TargetOut:
    """The stack with ``project(layer, cfg, x) -> q, k, v`` and ``feed_forward(layer, cfg, x)`` as parts."""
    angles = rope_angles(cfg.rope, pos)

    def step(_, layer, x, kv):
        q, k, v = project(layer, cfg, Normed(x, layer.attn_norm, cfg.eps))
        mixed, kv = _attention(layer, cfg, q, k, v, pos, valid, kv, angles, mode)
        x = x + mixed
        return x + feed_forward(layer, cfg, Normed(x, layer.mlp_norm, cfg.eps)), kv

    return walk(p.embed[tokens], p.layers, cache, taps, step, lambda x: rms_norm(x, p.norm, cfg.eps))


def project(layer, cfg, x):
    """Queries ``[B Q H C]``, keys and values ``[B Q G C]``, before rope."""
    del cfg
    return linears(x, (layer.q, layer.k, layer.v), (layer.q_bias, layer.k_bias, layer.v_bias))


def _feed_forward(layer, cfg, x):
    del cfg
    return swiglu(x, layer.gate, layer.up, layer.down)


def _attention(layer, cfg, q, k, v, pos, valid, kv, angles, mode):
    *cached, kv = kv.extend(rotate(k, *angles), v, pos, valid, mode)
    return attention_of(layer, cfg, rotate(q, *angles), pos, cached), kv


def attention_of(layer, cfg, q, pos, cached):
    """``[B Q D]`` of rotated queries over ``cached``: keys, values and the position of each key."""
    keys, values, key_pos = cached
    return output(layer, attend(q, keys, values, pos, key_pos, cfg.head_dim**-0.5))


def output(layer, mixed):
    """``[B Q D]``: the output projection of ``[B Q H C]``."""
    heads = mixed.reshape(*mixed.shape[:2], -1)
    return linear(heads, layer.o.reshape(layer.o.shape[0], -1), layer.o_bias)


def kv_view(p: Weights, cfg: Config, cache: tuple[DenseKV, ...], kind: str) -> KVView:
    """Keys and values of the last layer; this family has full attention only."""
    del p, cfg
    if kind != "full":
        raise ValueError(f"this target has full-attention layers only, not {kind!r}")
    last = cache[-1]
    return KVView(last.k, last.v, slots_of(last.k))


def min_resume(cfg: Config, high_water: int) -> int:
    """A dense cache can be cut back to any length."""
    del cfg, high_water
    return 1
