"""Multi-head latent attention for drafter layers (DeepSeek, Kimi): keys and values of all heads come from one
small latent per token, and that latent is what the cache keeps.

The up-projections are moved to the query's side ("absorbed"), so that a step reads ``rank + rope`` numbers per
cached token and never expands them to heads. Method: DeepSeek-V2 (arXiv 2405.04434).
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax.core.cache import DenseKV
from specjax.drafters.body import Body
from specjax.layers.attention import causal
from specjax.layers.linear import linear, precision_of
from specjax.layers.norm import rms_norm
from specjax.layers.rope import rope_angles, rope_config, rotate
from specjax.types import ArraySpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent:
    """Frozen sizes of latent attention. ``q_rank`` None: queries are projected in one step."""

    q_rank: int | None
    rank: int  # of the latent that keys and values come from
    nope: int  # channels of a query or key head without position
    rope: int  # channels with position; keys share them between heads
    value: int  # channels of a value head
    scale: float  # of the scores


def latent(hf: Mapping[str, Any]) -> Latent:
    """Sizes from the keys of DeepSeek-style configs; KeyError for a missing one."""
    nope, rope = int(hf["qk_nope_head_dim"]), int(hf["qk_rope_head_dim"])
    q_rank = hf.get("q_lora_rank")
    return Latent(
        q_rank=None if q_rank is None else int(q_rank),
        rank=int(hf["kv_lora_rank"]),
        nope=nope,
        rope=rope,
        value=int(hf["v_head_dim"]),
        scale=(nope + rope) ** -0.5 * _yarn_scale(hf) ** 2,
    )


def _yarn_scale(hf: Mapping[str, Any]) -> float:
    """What YaRN with ``mscale_all_dim`` multiplies queries and keys by."""
    p = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    kind, strength = p.get("rope_type", p.get("type")), float(p.get("mscale_all_dim") or 0.0)
    if kind != "yarn" or not strength or float(p["factor"]) <= 1:
        return 1.0
    return 0.1 * strength * math.log(float(p["factor"])) + 1.0


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
    d, h, f = cfg.hidden_size, cfg.heads, cfg.mlp_size
    w = d if width is None else width
    spec = lambda name, shape, axes, init="normal": ArraySpec(  # noqa: E731
        shape, axes, (f"{prefix}{name}.weight",), init
    )
    low = mla.q_rank
    query = "self_attn.q_proj" if low is None else "self_attn.q_b_proj"
    return Layer(
        attn_norm=spec("input_layernorm", (d,), (None,), "ones"),
        q_down=None if low is None else spec("self_attn.q_a_proj", (low, w), (None, None)),
        q_norm=None if low is None else spec("self_attn.q_a_layernorm", (low,), (None,), "ones"),
        q=spec(query, (h, mla.nope + mla.rope, low or w), ("heads", None, None)),
        kv_down=spec("self_attn.kv_a_proj_with_mqa", (mla.rank + mla.rope, w), (None, None)),
        kv_norm=spec("self_attn.kv_a_layernorm", (mla.rank,), (None,), "ones"),
        kv_up=spec("self_attn.kv_b_proj", (h, mla.nope + mla.value, mla.rank), ("heads", None, None)),
        o=spec("self_attn.o_proj", (d, h, mla.value), (None, "heads", None)),
        mlp_norm=spec("post_attention_layernorm", (d,), (None,), "ones"),
        gate=spec("mlp.gate_proj", (f, d), ("mlp", None)),
        up=spec("mlp.up_proj", (f, d), ("mlp", None)),
        down=spec("mlp.down_proj", (d, f), (None, "mlp")),
    )


def create_cache(mla: Latent, rows: int, slots: int, dtype: Any) -> DenseKV:
    """Rope channels of the key in ``k``, the latent in ``v``, one head each."""
    return DenseKV.create(rows, 1, slots, mla.rope, dtype, value_dim=mla.rank)


def keys_values(
    layer: Layer, cfg: Body, mla: Latent, x: Float[Array, "B Q W"], pos: Int[Array, "B Q"]
) -> tuple[Float[Array, "B Q 1 R"], Float[Array, "B Q 1 L"]]:
    """Rotated rope channels of the key and the normed latent."""
    both = linear(x, layer.kv_down)
    low = rms_norm(both[..., : mla.rank], layer.kv_norm, cfg.eps)
    key = rotate(_halves(both[..., None, mla.rank :]), *rope_angles(cfg.rope, pos))
    return key, low[:, :, None]


def mix(
    layer: Layer,
    cfg: Body,
    mla: Latent,
    x: Float[Array, "B Q W"],
    pos: Int[Array, "B Q"],
    cached: tuple[Float[Array, "B 1 S R"], Float[Array, "B 1 S L"], Int[Array, "B S"]],
    window: int | None,
) -> Float[Array, "B Q D"]:
    """Attention of the rows ``x`` at positions ``pos`` over what :func:`keys_values` put into the cache."""
    keys, low, key_pos = cached
    if layer.q_down is not None:
        x = rms_norm(linear(x, layer.q_down), layer.q_norm, cfg.eps)
    q = linear(x, layer.q)
    near, far = q[..., : mla.nope], rotate(_halves(q[..., mla.nope :]), *rope_angles(cfg.rope, pos))
    key_up, value_up = layer.kv_up[:, : mla.nope], layer.kv_up[:, mla.nope :]
    exact = precision_of(x.dtype)
    near = jnp.einsum("bqhc,hcl->bqhl", near, key_up, precision=exact)
    out = attend_latent(near, far, low[:, 0], keys[:, 0], causal(pos, key_pos, window), mla.scale)
    out = jnp.einsum("bqhl,hcl->bqhc", out.astype(x.dtype), value_up, precision=exact)
    return linear(out.reshape(*out.shape[:2], -1), layer.o.reshape(layer.o.shape[0], -1))


def attend_latent(
    near: Float[Array, "B Q H L"],
    far: Float[Array, "B Q H R"],
    low: Float[Array, "B S L"],
    keys: Float[Array, "B S R"],
    visible: Bool[Array, "B Q S"],
    scale: float,
) -> Float[Array, "B Q H L"]:
    """Mixture of latents, weights in float32. Garbage that no query sees may be NaN; a query that sees nothing
    gives zeros."""
    options: dict[str, Any] = {
        "precision": precision_of(low.dtype),
        "preferred_element_type": jnp.float32,
    }
    near, far = near.astype(low.dtype), far.astype(low.dtype)
    seen = visible.any(1)[..., None]
    scores = jnp.einsum("bqhl,bsl->bhqs", near, low, **options)
    scores = (scores + jnp.einsum("bqhr,bsr->bhqs", far, keys, **options)) * scale
    scores = jnp.where(visible[:, None], scores, -jnp.inf)
    weights = jnp.exp(scores - jnp.maximum(jnp.max(scores, -1, keepdims=True), -1e30))
    weights = weights / jnp.maximum(jnp.sum(weights, -1, keepdims=True), 1e-30)
    return jnp.einsum("bhqs,bsl->bqhl", weights.astype(low.dtype), jnp.where(seen, low, 0), **options)


def _halves(x: jax.Array) -> jax.Array:
    """Channels of interleaved pairs (0, 1), (2, 3) ... put as two halves, which is how :func:`rotate` pairs them.
    Scores do not depend on the order of channels, as long as queries and keys share it."""
    return rearrange(x, "... (r pair) -> ... (pair r)", pair=2)
