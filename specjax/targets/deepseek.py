"""DeepSeek-V3 targets and Kimi-K2, K2.5 (the same network): latent attention, experts chosen in groups.

Checkpoint format: Hugging Face ``DeepseekV3ForCausalLM``, and the text part of ``Kimi_K25ForConditionalGeneration``;
unquantised weights only.
"""

import dataclasses
import functools
from typing import Any

from flax import struct
from jaxtyping import Array, Float, Int

from specjax.core.cache import DenseKV
from specjax.layers import latent
from specjax.layers.attention import causal
from specjax.layers.norm import Normed, Rows, rms_norm
from specjax.layers.rope import rope_angles
from specjax.layers.router import route_groups
from specjax.targets.decoder import Weights, best, commit, outer_specs, shared, unembed, walk
from specjax.targets.deepseek_config import Config, config
from specjax.targets.ffn import Dense, Moe, dense_specs, feed_forward, moe_specs
from specjax.targets.llama import min_resume
from specjax.types import ArraySpec, KVView, Mode, TapSpec, TargetOut

__all__ = [
    "LOW_RANK_EPS", "PREFIXES", "Config", "Weights", "abstract", "abstract_layer", "best", "choose_experts",
    "commit", "config", "forward", "heads", "init_cache", "keys_values", "kv_view", "min_resume", "mix", "queries",
    "shared", "skipped", "unembed",
]  # fmt: skip

#: The text part of a multimodal checkpoint; transformers 5.24 writes ``blocks`` where published files say ``layers``.
PREFIXES = {"language_model.model.blocks.": "model.layers.", "language_model.": ""}

#: Of the norms between the low-rank projections, whatever the config says of the others: as these were trained.
LOW_RANK_EPS = 1e-6


def skipped(cfg: Config) -> dict[str, str]:
    """Tensors of a checkpoint that are not read, by the beginning of their names, with the reason."""
    mtp = range(cfg.num_layers, cfg.num_layers + cfg.mtp_layers)
    image = dict.fromkeys(
        ("vision_tower.", "mm_projector.", "model.mm_projector."), "image encoder; text only"
    )
    reason = "multi-token prediction: a drafter's weights, not the target's"
    return image | dict.fromkeys((*(f"model.layers.{i}." for i in mtp), "model.mtp.", "mtp."), reason)


@struct.dataclass
class Layer:
    """Weights of one decoder layer. ``R`` query rank (or D), ``L`` rank of the latent."""

    attn_norm: Float[Array, " D"]
    q_down: Float[Array, "R D"] | None
    q_norm: Float[Array, " R"] | None
    q: Float[Array, "H C R"]  # C: channels without position, then those with
    kv_down: Float[Array, "Lr D"]  # latent, then the channels with position that all key heads share
    kv_norm: Float[Array, " L"]
    kv_up: Float[Array, "H Ckv L"]  # channels of the key without position, then the value
    o: Float[Array, "D H Cv"]
    mlp_norm: Float[Array, " D"]
    mlp: Dense | Moe


def abstract(cfg: Config) -> Weights:
    """Weight struct of ArraySpecs."""
    layers = tuple(abstract_layer(cfg, i, f"model.layers.{i}.") for i in range(cfg.num_layers))
    return Weights(layers=layers, **outer_specs(cfg))


def abstract_layer(cfg: Config, index: int, prefix: str) -> Layer:
    """Specs of one layer under ``prefix`` ("model.layers.3.")."""
    d = cfg.hidden_size
    norm = lambda name: ArraySpec((d,), (None,), (f"{prefix}{name}.weight",), "ones")  # noqa: E731
    dense = index < cfg.dense_layers
    return Layer(
        attn_norm=norm("input_layernorm"),
        **latent.specs(cfg.latent, cfg.heads, d, prefix + "self_attn."),
        mlp_norm=norm("post_attention_layernorm"),
        mlp=dense_specs(d, cfg.dense_size, prefix + "mlp.") if dense else _abstract_moe(cfg, prefix + "mlp."),
    )


def _abstract_moe(cfg: Config, prefix: str) -> Moe:
    bias = ArraySpec(
        (cfg.experts,), (None,), (prefix + "gate.e_score_correction_bias",), "zeros", dtype="float32"
    )
    beside = dense_specs(cfg.hidden_size, cfg.shared_size, prefix + "shared_experts.")
    specs = moe_specs(cfg.hidden_size, cfg.expert_size, cfg.experts, prefix)
    return dataclasses.replace(specs, bias=bias, shared=beside if cfg.shared_size else None)


def init_cache(cfg: Config, rows: int, slots: int, q_max: int, dtype: Any) -> tuple[DenseKV, ...]:
    """The latent and the key channels with position, per layer: nothing per head."""
    del q_max
    return tuple(latent.create_cache(cfg.latent, rows, slots, dtype) for _ in range(cfg.num_layers))


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
    angles = rope_angles(cfg.rope, pos)
    route = functools.partial(choose_experts, cfg)

    def step(_, layer, x, kv):
        q, key, low = heads(layer, cfg, Normed(x, layer.attn_norm, cfg.eps), angles)
        *cached, kv = kv.extend(key, low, pos, valid, mode)
        x = x + mix(layer, cfg, q, pos, cached)
        return x + feed_forward(layer.mlp, Normed(x, layer.mlp_norm, cfg.eps), route), kv

    return walk(p.embed[tokens], p.layers, cache, taps, step, lambda x: rms_norm(x, p.norm, cfg.eps))


def heads(layer: Layer, cfg: Config, x: Rows, angles) -> tuple[latent.Queries, Array, Array]:
    """:func:`queries` and :func:`keys_values` of the same rows."""
    return latent.heads(layer, cfg.latent, LOW_RANK_EPS, x, angles)


def keys_values(layer: Layer, cfg: Config, x: Rows, angles) -> tuple[Array, Array]:
    """What the cache keeps: rotated rope channels of the key, and the normed latent."""
    return latent.keys_values(layer, cfg.latent, LOW_RANK_EPS, x, angles)


def queries(layer: Layer, cfg: Config, x: Rows, angles) -> latent.Queries:
    """What meets the latent, and what meets the rope channels of the key."""
    return latent.queries(layer, cfg.latent, LOW_RANK_EPS, x, angles)


def mix(
    layer: Layer, cfg: Config, q: latent.Queries, pos: Int[Array, "B Q"], cached
) -> Float[Array, "B Q D"]:
    """Attention of queries over ``cached``: what the cache keeps, and the position of each key."""
    *held, key_pos = cached
    return latent.mix(layer, cfg.latent, q, tuple(held), causal(pos, key_pos))


def choose_experts(cfg: Config, rows: Float[Array, "N D"], mlp: Moe):
    """Weights and ids of the experts of each row."""
    return route_groups(
        rows,
        mlp.router,
        mlp.bias,
        cfg.experts_per_token,
        cfg.groups,
        cfg.kept_groups,
        cfg.norm_topk,
        cfg.routed_scale,
    )


def kv_view(p: Weights, cfg: Config, cache: tuple[DenseKV, ...], kind: str) -> KVView:
    """Refused: a latent cache keeps no keys and values of heads."""
    del p, cfg, cache
    raise ValueError(f"this target keeps latents, not keys and values: it lends none to drafters ({kind!r})")
