"""Qwen3 targets, dense and mixture of experts: Llama's layout plus a norm on every query and key head.

Checkpoint format: Hugging Face ``Qwen3ForCausalLM`` and ``Qwen3MoeForCausalLM``; experts one by one or
fused (``experts.gate_up_proj [E 2F D]``, gate rows first, and ``experts.down_proj [E D F]``).
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from flax import struct
from jaxtyping import Array, Float, Int

from specjax.core.cache import DenseKV
from specjax.layers.linear import linear, linears
from specjax.layers.moe import route
from specjax.layers.norm import Rows, rms_norm
from specjax.layers.rope import rotate
from specjax.targets import llama
from specjax.targets.decoder import Weights, best, commit, shared, unembed
from specjax.targets.ffn import Dense, Moe, dense_specs, feed_forward, moe_specs
from specjax.targets.hf import check_config
from specjax.targets.llama import init_cache, kv_view, min_resume, output
from specjax.types import ArraySpec, Mode, TapSpec, TargetOut

__all__ = [
    "Config", "Weights", "abstract", "abstract_layer", "best", "choose_experts", "commit", "config", "forward",
    "heads", "init_cache", "keys_values", "kv_view", "min_resume", "mix", "output", "queries", "shared", "unembed",
]  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(llama.Config):
    """Frozen settings of a Qwen3 target. ``moe_layers`` lists the layers that have experts."""

    experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    norm_topk: bool = False
    moe_layers: tuple[int, ...] = ()


def config(hf: Mapping[str, Any]) -> Config:
    """Config from ``config.json`` of a qwen3 or qwen3_moe checkpoint."""
    check_config(hf, llama.KNOWN | _MOE_KEYS, llama.FIXED)
    common = llama.common_config(hf)
    if hf.get("model_type") != "qwen3_moe":
        return Config(**common)
    step, dense = int(hf.get("decoder_sparse_step", 1)), set(hf.get("mlp_only_layers") or ())
    out = Config(
        **common,
        experts=int(hf["num_experts"] if "num_experts" in hf else hf["num_local_experts"]),
        experts_per_token=int(hf["num_experts_per_tok"]),
        expert_size=int(hf["moe_intermediate_size"]),
        norm_topk=bool(hf.get("norm_topk_prob", False)),
        moe_layers=tuple(
            i for i in range(common["num_layers"]) if i not in dense and step and (i + 1) % step == 0
        ),
    )
    if not 0 < out.experts_per_token <= out.experts:
        raise ValueError(f"qwen3_moe: {out.experts_per_token} experts per token out of {out.experts}")
    return out


_MOE_KEYS = {
    "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
    "decoder_sparse_step", "mlp_only_layers",
}  # fmt: skip


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
    q_norm: Float[Array, " C"]
    k_norm: Float[Array, " C"]
    mlp_norm: Float[Array, " D"]
    mlp: Dense | Moe


def abstract(cfg: Config) -> Weights:
    """Weight struct of ArraySpecs."""
    layers = tuple(abstract_layer(cfg, i, f"model.layers.{i}.") for i in range(cfg.num_layers))
    return dataclasses.replace(llama.abstract(cfg), layers=layers)


def abstract_layer(cfg: Config, index: int, prefix: str) -> Layer:
    """Specs of one layer under ``prefix`` ("model.layers.3.")."""
    norm = lambda name: ArraySpec((cfg.head_dim,), (None,), (f"{prefix}self_attn.{name}.weight",), "ones")  # noqa: E731
    mlp, width = prefix + "mlp.", cfg.hidden_size
    return Layer(
        **llama.attention_specs(cfg, prefix),
        q_norm=norm("q_norm"),
        k_norm=norm("k_norm"),
        mlp=(
            moe_specs(width, cfg.expert_size, cfg.experts, mlp)
            if index in cfg.moe_layers
            else dense_specs(width, cfg.mlp_size, mlp)
        ),
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
    return llama.run_layers(p, cfg, tokens, pos, valid, cache, taps, mode, _project, _feed_forward)


def _project(layer, cfg, x):
    q, k, v = llama.project(layer, cfg, x)
    return rms_norm(q, layer.q_norm, cfg.eps), rms_norm(k, layer.k_norm, cfg.eps), v


def _feed_forward(layer, cfg, x):
    return feed_forward(layer.mlp, x, functools.partial(choose_experts, cfg))


def choose_experts(cfg: Config, rows: Float[Array, "N D"], mlp: Moe):
    """Weights and ids of the experts of each row."""
    return route(rows, mlp.router, cfg.experts_per_token, cfg.norm_topk)


def heads(
    layer: Layer, cfg: Config, x: Rows, angles
) -> tuple[Float[Array, "B Q H C"], Float[Array, "B Q G C"], Float[Array, "B Q G C"]]:
    """:func:`queries` and :func:`keys_values` of the same rows."""
    q, k, v = _project(layer, cfg, x)
    return rotate(q, *angles), rotate(k, *angles), v


def keys_values(
    layer: Layer, cfg: Config, x: Rows, angles
) -> tuple[Float[Array, "B Q G C"], Float[Array, "B Q G C"]]:
    """Rotated keys, and values."""
    k, v = linears(x, (layer.k, layer.v), (layer.k_bias, layer.v_bias))
    return rotate(rms_norm(k, layer.k_norm, cfg.eps), *angles), v


def queries(layer: Layer, cfg: Config, x: Rows, angles) -> Float[Array, "B Q H C"]:
    """Rotated queries."""
    q = rms_norm(linear(x, layer.q, layer.q_bias), layer.q_norm, cfg.eps)
    return rotate(q, *angles)


def mix(
    layer: Layer, cfg: Config, q: Float[Array, "B Q H C"], pos: Int[Array, "B Q"], cached
) -> Float[Array, "B Q D"]:
    """Attention of rotated queries over ``cached``: keys, values and the position of each key."""
    return llama.attention_of(layer, cfg, q, pos, cached)
