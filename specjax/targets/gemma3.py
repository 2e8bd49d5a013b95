"""Gemma 3 text models: norms before and after each block, five layers with a window to one that sees all.

Checkpoint format: Hugging Face ``Gemma3ForCausalLM``, and the text part of ``Gemma3ForConditionalGeneration``.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from flax import struct
from jaxtyping import Array, Float, Int

from specjax.core.cache import DenseKV, RingKV
from specjax.layers.attention import attend
from specjax.layers.linear import linears
from specjax.layers.mlp import geglu
from specjax.layers.norm import Normed, rms_norm_offset
from specjax.layers.rope import rope_angles, rotate
from specjax.targets import gemma
from specjax.targets.decoder import Weights, commit, outer_specs, walk
from specjax.targets.gemma import PREFIXES, TIED, Kind, best, min_resume, shared, unembed
from specjax.targets.hf import check_config, text_part
from specjax.types import ArraySpec, KVView, Mode, TapSpec, TargetOut

__all__ = [
    "PREFIXES", "TIED", "Config", "Weights", "abstract", "best", "commit", "config", "forward", "init_cache",
    "kv_view", "min_resume", "shared", "skipped", "unembed",
]  # fmt: skip

_DEFAULTS = gemma.DEFAULTS | {
    "vocab_size": 262208,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}
_KNOWN = gemma.KNOWN | {*_DEFAULTS, "_sliding_window_pattern", "rope_local_base_freq"}
_FIXED = gemma.FIXED | {
    "attn_logit_softcapping": (None,),
    "use_bidirectional_attention": (False, None),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(gemma.Base):
    """Frozen settings of a Gemma 3 target. ``scale`` multiplies attention scores."""

    mlp_size: int
    scale: float


def config(hf: Mapping[str, Any]) -> Config:
    """Config from ``config.json`` of a gemma3_text or gemma3 checkpoint."""
    text = text_part(hf)
    check_config(text, _KNOWN, _FIXED)
    text = _DEFAULTS | text
    full = gemma.full_layers(text, int(text["sliding_window_pattern"]))
    return Config(
        **gemma.base_config(text, full, _kind(text, gemma.SLIDING), _kind(text, gemma.FULL)),
        mlp_size=int(text["intermediate_size"]),
        scale=float(text["query_pre_attn_scalar"]) ** -0.5,
    )


def _kind(text: Mapping[str, Any], name: str) -> Kind:
    """Scaling, where there is any, is that of the full layers."""
    head_dim, full = int(text["head_dim"]), name == gemma.FULL
    theta = {"rope_theta": text.get("rope_theta" if full else "rope_local_base_freq")}
    scaling = {"rope_scaling": text.get("rope_scaling")} if full else {}
    return Kind(
        kv_heads=int(text["num_key_value_heads"]),
        head_dim=head_dim,
        rope=gemma.kind_rope(text, name, head_dim, theta | scaling, {"rope_theta": 1e6 if full else 1e4}),
        window=None if full else int(text["sliding_window"] or 0),
    )


@struct.dataclass
class Layer:
    """Weights of one decoder layer. Norm weights are stored minus one."""

    attn_norm: Float[Array, " D"]
    q: Float[Array, "H C D"]
    k: Float[Array, "G C D"]
    v: Float[Array, "G C D"]
    o: Float[Array, "D H C"]
    q_norm: Float[Array, " C"]
    k_norm: Float[Array, " C"]
    post_attn_norm: Float[Array, " D"]
    mlp_norm: Float[Array, " D"]
    gate: Float[Array, "F D"]
    up: Float[Array, "F D"]
    down: Float[Array, "D F"]
    post_mlp_norm: Float[Array, " D"]


def abstract(cfg: Config) -> Weights:
    """Weight struct of ArraySpecs."""
    layers = tuple(_abstract_layer(cfg, cfg.kind(i), f"model.layers.{i}.") for i in range(cfg.num_layers))
    return Weights(layers=layers, **outer_specs(cfg, "zeros"))


def _abstract_layer(cfg: Config, kind: Kind, prefix: str) -> Layer:
    d, c = cfg.hidden_size, kind.head_dim
    names = {
        "attn_norm": ("input_layernorm", d),
        "q_norm": ("self_attn.q_norm", c),
        "k_norm": ("self_attn.k_norm", c),
        "post_attn_norm": ("post_attention_layernorm", d),
        "mlp_norm": ("pre_feedforward_layernorm", d),
        "post_mlp_norm": ("post_feedforward_layernorm", d),
    }
    specs: dict[str, ArraySpec | None] = {
        **gemma.norm_specs(names, prefix, "zeros"),
        **gemma.mlp_specs(cfg, cfg.mlp_size, prefix),
        **gemma.head_specs(cfg, kind, prefix, "qkvo"),
    }
    return Layer(**specs)


def skipped(cfg: Config) -> Mapping[str, str]:
    """Beginnings of tensor names that are not read, and why."""
    del cfg
    return gemma.SKIPPED


def init_cache(cfg: Config, rows: int, slots: int, q_max: int, dtype: Any) -> tuple[DenseKV | RingKV, ...]:
    """A ring for every layer with a window, a dense cache for the others."""
    return tuple(gemma.new_cache(cfg.kind(i), rows, slots, q_max, dtype) for i in range(cfg.num_layers))


def forward(
    p: Weights,
    cfg: Config,
    tokens: Int[Array, "B Q"],
    pos: Int[Array, "B Q"],
    valid: Int[Array, " B"],
    cache: tuple[DenseKV | RingKV, ...],
    taps: TapSpec,
    mode: Mode,
) -> TargetOut:
    """One pass over Q contiguous positions per row. Tap 0 is the scaled embedding."""
    x = gemma.embed(p.embed, tokens, cfg.embed_scale)
    angles = {kind: rope_angles(kind.rope, pos) for kind in (cfg.sliding, cfg.full)}

    def step(i, layer, x, kv):
        kind = cfg.kind(i)
        mixed, kv = _attention(layer, cfg, kind, x, angles[kind], pos, valid, kv, mode)
        x = x + rms_norm_offset(mixed, layer.post_attn_norm, cfg.eps)
        normed = Normed(x, layer.mlp_norm, cfg.eps, offset=True)
        fed = geglu(normed, layer.gate, layer.up, layer.down)
        return x + rms_norm_offset(fed, layer.post_mlp_norm, cfg.eps), kv

    return walk(x, p.layers, cache, taps, step, lambda x: rms_norm_offset(x, p.norm, cfg.eps))


def _attention(layer, cfg, kind, x, angles, pos, valid, kv, mode):
    x = Normed(x, layer.attn_norm, cfg.eps, offset=True)
    q, k, v = linears(x, (layer.q, layer.k, layer.v))
    q = rotate(rms_norm_offset(q, layer.q_norm, cfg.eps), *angles)
    k = rotate(rms_norm_offset(k, layer.k_norm, cfg.eps), *angles)
    keys, values, key_pos, kv = kv.extend(k, v, pos, valid, mode)
    out = attend(q, keys, values, pos, key_pos, cfg.scale, kind.window)
    return gemma.output(out, layer.o), kv


def kv_view(p: Weights, cfg: Config, cache: tuple[DenseKV | RingKV, ...], kind: str) -> KVView:
    """Keys, values and positions of the last layer of ``kind`` ("full" or "sliding")."""
    del p
    return gemma.view(cache[gemma.last_of(cfg, cfg.num_layers, kind)])
