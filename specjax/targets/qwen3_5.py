"""Qwen3.5 and Qwen3.6 targets, dense and mixture of experts: three layers of gated delta rule, then one of gated
attention, and so on.

Checkpoint format: Hugging Face ``Qwen3_5ForCausalLM``, ``Qwen3_5MoeForCausalLM`` and the text part of their
``ForConditionalGeneration``. Norms but the one inside the delta rule are stored minus one.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.core.cache import DenseKV
from specjax.core.recurrent import Recurrent
from specjax.layers import delta
from specjax.layers.attention import attend
from specjax.layers.linear import linear, linears
from specjax.layers.moe import route
from specjax.layers.norm import Normed, Rows, rms_norm, rms_norm_offset
from specjax.layers.rope import rope_angles, rotate
from specjax.targets.decoder import Weights, best, commit, outer_specs, shared, slots_of, unembed, walk
from specjax.targets.ffn import Dense, Moe, dense_specs, feed_forward, moe_specs
from specjax.targets.qwen3_5_config import Config, config
from specjax.types import ArraySpec, KVView, Mode, TapSpec, TargetOut

__all__ = [
    "PREFIXES", "Config", "Weights", "abstract", "abstract_layer", "best", "choose_experts", "commit", "config",
    "forward", "heads", "init_cache", "keys_values", "kv_view", "min_resume", "mix", "output", "queries", "shared",
    "skipped", "unembed",
]  # fmt: skip

#: The text part of a multimodal checkpoint.
PREFIXES = {"model.language_model.": "model."}


def skipped(cfg: Config) -> dict[str, str]:
    """Tensors of a checkpoint that are not read, by the beginning of their names, with the reason."""
    del cfg
    return {
        "model.visual.": "image encoder; text only",
        "mtp.": "multi-token prediction: a drafter's weights, not the target's",
    }


@struct.dataclass
class Attention:
    """Weights of gated attention. Each query head is followed by the gate of its output."""

    q: Float[Array, "H CC D"]  # CC = 2 C
    k: Float[Array, "G C D"]
    v: Float[Array, "G C D"]
    o: Float[Array, "D H C"]
    q_norm: Float[Array, " C"]
    k_norm: Float[Array, " C"]


@struct.dataclass
class Delta:
    """Weights of the gated delta rule. ``N`` convolved channels: queries, keys, values; ``Z`` of the output."""

    qkv: Float[Array, "N D"]
    z: Float[Array, "H Cv D"]
    a: Float[Array, "H D"]
    b: Float[Array, "H D"]
    conv: Float[Array, "N J"]
    a_log: Float[Array, " H"]  # float32 always
    dt_bias: Float[Array, " H"]  # float32 always
    norm: Float[Array, " Cv"]
    o: Float[Array, "D H Cv"]


@struct.dataclass
class Layer:
    """Weights of one decoder layer."""

    attn_norm: Float[Array, " D"]
    mixer: Attention | Delta
    mlp_norm: Float[Array, " D"]
    mlp: Dense | Moe


def abstract(cfg: Config) -> Weights:
    """Weight struct of ArraySpecs."""
    layers = tuple(abstract_layer(cfg, i, f"model.layers.{i}.") for i in range(cfg.num_layers))
    return Weights(layers=layers, **outer_specs(cfg, "zeros"))


def _norm(name: str, size: int) -> ArraySpec:
    return ArraySpec((size,), (None,), (name + ".weight",), "zeros")


def abstract_layer(cfg: Config, index: int, prefix: str) -> Layer:
    """Specs of one layer under ``prefix`` ("model.layers.3.")."""
    return Layer(
        attn_norm=_norm(prefix + "input_layernorm", cfg.hidden_size),
        mixer=(
            _abstract_attention(cfg, prefix + "self_attn.")
            if cfg.full[index]
            else _abstract_delta(cfg, prefix + "linear_attn.")
        ),
        mlp_norm=_norm(prefix + "post_attention_layernorm", cfg.hidden_size),
        mlp=_abstract_moe(cfg, prefix + "mlp.")
        if cfg.experts
        else dense_specs(cfg.hidden_size, cfg.mlp_size, prefix + "mlp."),
    )


def _abstract_attention(cfg: Config, prefix: str) -> Attention:
    d, h, g, c = cfg.hidden_size, cfg.heads, cfg.kv_heads, cfg.head_dim
    spec = lambda name, shape, axes: ArraySpec(shape, axes, (f"{prefix}{name}_proj.weight",))  # noqa: E731
    return Attention(
        q=spec("q", (h, 2 * c, d), ("heads", None, None)),
        k=spec("k", (g, c, d), ("kv_heads", None, None)),
        v=spec("v", (g, c, d), ("kv_heads", None, None)),
        o=spec("o", (d, h, c), (None, "heads", None)),
        q_norm=_norm(prefix + "q_norm", c),
        k_norm=_norm(prefix + "k_norm", c),
    )


def _abstract_delta(cfg: Config, prefix: str) -> Delta:
    d, h, c = cfg.hidden_size, cfg.value_heads, cfg.value_size
    spec = lambda name, *shape, **more: ArraySpec(shape, (None,) * len(shape), (prefix + name,), **more)  # noqa: E731
    return Delta(
        qkv=spec("in_proj_qkv.weight", cfg.channels, d),
        z=spec("in_proj_z.weight", h, c, d),
        a=spec("in_proj_a.weight", h, d),
        b=spec("in_proj_b.weight", h, d),
        conv=spec("conv1d.weight", cfg.channels, cfg.conv_taps),
        a_log=spec("A_log", h, init="zeros", dtype="float32"),
        dt_bias=spec("dt_bias", h, init="zeros", dtype="float32"),
        norm=spec("norm.weight", c, init="ones"),
        o=spec("out_proj.weight", d, h, c),
    )


def _abstract_moe(cfg: Config, prefix: str) -> Moe:
    d = cfg.hidden_size
    return dataclasses.replace(
        moe_specs(d, cfg.expert_size, cfg.experts, prefix),
        shared=dense_specs(d, cfg.shared_size, prefix + "shared_expert."),
        shared_gate=ArraySpec((1, d), (None, None), (prefix + "shared_expert_gate.weight",)),
    )


@struct.dataclass
class Memory:
    """What the delta rule keeps of the past."""

    matrix: Float[Array, "B H Ck Cv"]  # float32 always
    columns: Float[Array, "B _ N"]  # the last positions' channels before the convolution


@struct.dataclass
class Inputs:
    """What a block feeds to it."""

    columns: Float[Array, "B Q N"]
    decay: Float[Array, "B Q H"]
    beta: Float[Array, "B Q H"]


Cache = tuple[DenseKV | Recurrent, ...]


def init_cache(cfg: Config, rows: int, slots: int, q_max: int, dtype: Any) -> Cache:
    """A dense cache for each layer of attention, a recurrent state for each of the others."""
    dense = lambda: DenseKV.create(rows, cfg.kv_heads, slots, cfg.head_dim, dtype)  # noqa: E731
    return tuple(dense() if full else _empty(cfg, rows, q_max, dtype) for full in cfg.full)


def _empty(cfg: Config, rows: int, q_max: int, dtype: Any) -> Recurrent:
    h, wide = cfg.value_heads, jnp.float32
    matrix = jnp.zeros((rows, h, cfg.key_size, cfg.value_size), wide)
    memory = Memory(matrix, jnp.zeros((rows, cfg.conv_taps - 1, cfg.channels), dtype))
    columns = jnp.zeros((rows, q_max, cfg.channels), dtype)
    tape = Inputs(columns, jnp.zeros((rows, q_max, h), wide), jnp.zeros((rows, q_max, h), wide))
    return Recurrent.create(rows, memory, tape)


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
    """One pass over Q contiguous positions per row."""
    angles = rope_angles(cfg.rope, pos)
    choose = functools.partial(choose_experts, cfg)

    def step(i, layer, x, held):
        normed = Normed(x, layer.attn_norm, cfg.eps, offset=True)
        if cfg.full[i]:
            mixed, held = _attention(layer.mixer, cfg, normed, pos, valid, held, angles, mode)
        else:
            mixed, held = _delta(layer.mixer, cfg, normed.array(), valid, held, mode)
        x = x + mixed
        return x + feed_forward(layer.mlp, Normed(x, layer.mlp_norm, cfg.eps, offset=True), choose), held

    return walk(p.embed[tokens], p.layers, cache, taps, step, lambda x: rms_norm_offset(x, p.norm, cfg.eps))


def choose_experts(cfg: Config, rows: Float[Array, "N D"], mlp: Moe):
    """Weights and ids of the experts of each row."""
    return route(rows, mlp.router, cfg.experts_per_token, True)


def _attention(w: Attention, cfg: Config, x: Rows, pos, valid, kv: DenseKV, angles, mode: Mode):
    q, k, v = heads(w, cfg, x, angles)
    *cached, kv = kv.extend(k, v, pos, valid, mode)
    return mix(w, cfg, q, pos, cached), kv


#: Rotated queries, and what their outputs are gated by.
Queries = tuple[Float[Array, "B Q H C"], Float[Array, "B Q H C"]]


def heads(
    w: Attention, cfg: Config, x: Rows, angles
) -> tuple[Queries, Float[Array, "B Q G C"], Float[Array, "B Q G C"]]:
    """:func:`queries` and :func:`keys_values` of the same rows."""
    q, k, v = linears(x, (w.q, w.k, w.v))
    return _queries(w, cfg, q, angles), _key(w, cfg, k, angles), v


def keys_values(
    w: Attention, cfg: Config, x: Rows, angles
) -> tuple[Float[Array, "B Q G C"], Float[Array, "B Q G C"]]:
    """Rotated keys, and values."""
    k, v = linears(x, (w.k, w.v))
    return _key(w, cfg, k, angles), v


def queries(w: Attention, cfg: Config, x: Rows, angles) -> Queries:
    """Rotated queries, and what their outputs are gated by."""
    return _queries(w, cfg, linear(x, w.q), angles)


def _key(w: Attention, cfg: Config, k, angles):
    return rotate(rms_norm_offset(k, w.k_norm, cfg.eps), *angles)


def _queries(w: Attention, cfg: Config, both, angles) -> Queries:
    q, gate = jnp.split(both, 2, -1)
    return rotate(rms_norm_offset(q, w.q_norm, cfg.eps), *angles), gate


def mix(w: Attention, cfg: Config, asked: Queries, pos: Int[Array, "B Q"], cached) -> Float[Array, "B Q D"]:
    """Gated attention of :func:`queries` over ``cached``: keys, values and the position of each key."""
    (q, gate), (keys, values, key_pos) = asked, cached
    return output(w, attend(q, keys, values, pos, key_pos, cfg.head_dim**-0.5), gate)


def output(
    w: Attention, mixed: Float[Array, "B Q H C"], gate: Float[Array, "B Q H C"]
) -> Float[Array, "B Q D"]:
    """The output projection of what attention mixes, gated."""
    return _output(mixed * jax.nn.sigmoid(gate), w.o)


def _delta(w: Delta, cfg: Config, x, valid, memory: Recurrent, mode: Mode):
    wide = lambda weight: linear(x, weight, out_dtype=jnp.float32)  # noqa: E731
    decay = -jnp.exp(w.a_log) * jax.nn.softplus(wide(w.a) + w.dt_bias)
    inputs = Inputs(_rounded(linear(x, w.qkv)), decay, jax.nn.sigmoid(wide(w.b)))
    out, memory = memory.extend(inputs, valid, mode, functools.partial(_recur, w, cfg))
    out = rms_norm(out.astype(x.dtype), w.norm, cfg.eps).astype(jnp.float32)
    out = (out * jax.nn.silu(linear(x, w.z).astype(jnp.float32))).astype(x.dtype)
    return _output(out, w.o), memory


def _rounded(x):
    """Values of ``x``'s type and no others: a compiler may leave a rounding out between two operations, but the
    tape is rounded, and a replay must read what the block read."""
    kind = jnp.finfo(x.dtype)
    return jax.lax.reduce_precision(x, kind.nexp, kind.nmant)


def _recur(w: Delta, cfg: Config, memory: Memory, inputs: Inputs, valid, mode: Mode):
    """The one routine for decoding, verification and replay; in prefill the same in chunks."""
    mixed = delta.convolve(memory.columns, inputs.columns, w.conv)
    block = delta.block(mixed, inputs.decay, inputs.beta, valid, cfg.key_heads, cfg.key_size)
    run = delta.chunk_delta if mode == "extend" else delta.scan_delta
    out, matrix = run(memory.matrix, block)
    return out, Memory(matrix, delta.last_columns(memory.columns, inputs.columns, valid))


def _output(heads: Float[Array, "B Q H C"], o: Float[Array, "D H C"]) -> Float[Array, "B Q D"]:
    return linear(rearrange(heads, "b q h c -> b q (h c)"), rearrange(o, "d h c -> d (h c)"))


def kv_view(p: Weights, cfg: Config, cache: Cache, kind: str) -> KVView:
    """Keys and values of the last layer of attention; there are no sliding windows."""
    del p, cfg
    dense = [held for held in cache if isinstance(held, DenseKV)]
    if kind != "full" or not dense:
        raise ValueError(f"this target has no {kind!r} attention layer to lend keys and values of")
    return KVView(dense[-1].k, dense[-1].v, slots_of(dense[-1].k))


def min_resume(cfg: Config, high_water: int) -> int:
    """A recurrent state can be cut back only to where it stands."""
    return 1 if all(cfg.full) else Recurrent.min_resume(high_water)
