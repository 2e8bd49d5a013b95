"""Multi-head latent attention (DeepSeek, Kimi): keys and values of all heads come from one small latent per token,
and that latent is what the cache keeps.

The up-projections are moved to the query's side ("absorbed"), so that a step reads ``rank + rope`` numbers per
cached token and never expands them to heads. Method: DeepSeek-V2 (arXiv 2405.04434).
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float

from specjax.core.cache import DenseKV
from specjax.layers.linear import linear, linears, precision_of
from specjax.layers.norm import Normed, Rows, rms_norm
from specjax.layers.rope import rotate
from specjax.types import ArraySpec

Angles = tuple[Float[Array, "B Q P"], Float[Array, "B Q P"]]  # cos and sin, P = rope / 2


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


class Weights(Protocol):
    """Fields of a layer that attends. ``W`` width it reads, ``R`` query rank (or W), ``L`` rank of the latent."""

    q_down: Any  # [R W] or None
    q_norm: Any  # [R] or None
    q: Any  # [H C R], C: nope channels, then rope channels
    kv_down: Any  # [L+rope W], latent, then the shared rope channels of the key
    kv_norm: Any  # [L]
    kv_up: Any  # [H Ckv L], nope channels of the key, then the value
    o: Any  # [D H Cv]


def specs(
    mla: Latent, heads: int, d: int, prefix: str, width: int | None = None
) -> dict[str, ArraySpec | None]:
    """Specs of :class:`Weights` by field name, under ``prefix`` ("layers.0.self_attn."); it reads ``width``
    channels (None: ``d``) and puts out ``d``."""
    w, low = d if width is None else width, mla.q_rank
    spec = lambda name, shape, axes, init="normal": ArraySpec(  # noqa: E731
        shape, axes, (f"{prefix}{name}.weight",), init
    )
    return {
        "q_down": None if low is None else spec("q_a_proj", (low, w), (None, None)),
        "q_norm": None if low is None else spec("q_a_layernorm", (low,), (None,), "ones"),
        "q": spec(
            "q_proj" if low is None else "q_b_proj",
            (heads, mla.nope + mla.rope, low or w),
            ("heads", None, None),
        ),
        "kv_down": spec("kv_a_proj_with_mqa", (mla.rank + mla.rope, w), (None, None)),
        "kv_norm": spec("kv_a_layernorm", (mla.rank,), (None,), "ones"),
        "kv_up": spec("kv_b_proj", (heads, mla.nope + mla.value, mla.rank), ("heads", None, None)),
        "o": spec("o_proj", (d, heads, mla.value), (None, "heads", None)),
    }


def create_cache(mla: Latent, rows: int, slots: int, dtype: Any) -> DenseKV:
    """Rope channels of the key in ``k``, the latent in ``v``, one head each."""
    return DenseKV.create(rows, 1, slots, mla.rope, dtype, value_dim=mla.rank)


Queries = tuple[Float[Array, "B Q H L"], Float[Array, "B Q H R"]]


def keys_values(
    w: Any, mla: Latent, eps: float, x: Rows, angles: Angles
) -> tuple[Float[Array, "B Q 1 R"], Float[Array, "B Q 1 L"]]:
    """Rotated rope channels of the key and the normed latent. ``eps``: of the norms of low rank."""
    return _keys_values(w, mla, eps, linear(x, w.kv_down), angles)


def queries(w: Any, mla: Latent, eps: float, x: Rows, angles: Angles) -> Queries:
    """What meets the latent, and what meets the rope channels of the key."""
    return _queries(w, mla, eps, linear(x, w.q if w.q_down is None else w.q_down), angles)


def heads(
    w: Any, mla: Latent, eps: float, x: Rows, angles: Angles
) -> tuple[Queries, Float[Array, "B Q 1 R"], Float[Array, "B Q 1 L"]]:
    """:func:`queries` and :func:`keys_values` of the same rows."""
    first, both = linears(x, (w.q if w.q_down is None else w.q_down, w.kv_down))
    return _queries(w, mla, eps, first, angles), *_keys_values(w, mla, eps, both, angles)


def _keys_values(w, mla: Latent, eps: float, both, angles: Angles):
    low = rms_norm(both[..., : mla.rank], w.kv_norm, eps)
    return rotate(_halves(both[..., None, mla.rank :]), *angles), low[:, :, None]


def _queries(w, mla: Latent, eps: float, first, angles: Angles) -> Queries:
    q = first if w.q_down is None else linear(Normed(first, w.q_norm, eps), w.q)
    near, far = q[..., : mla.nope], rotate(_halves(q[..., mla.nope :]), *angles)
    near = jnp.einsum("bqhc,hcl->bqhl", near, w.kv_up[:, : mla.nope], precision=precision_of(q.dtype))
    return near, far


def mix(
    w: Any,
    mla: Latent,
    asked: Queries,
    cached: tuple[Float[Array, "B 1 S R"], Float[Array, "B 1 S L"]],
    visible: Bool[Array, "B Q S"],
) -> Float[Array, "B Q D"]:
    """Attention of :func:`queries` over what :func:`keys_values` put into the cache."""
    (near, far), (keys, low) = asked, cached
    out = attend_latent(near, far, low[:, 0], keys[:, 0], visible, mla.scale)
    return output(w, mla, out.astype(near.dtype))


def output(w: Any, mla: Latent, mixed: Float[Array, "B Q H L"]) -> Float[Array, "B Q D"]:
    """The output projection of mixtures of latents."""
    exact = precision_of(mixed.dtype)
    out = jnp.einsum("bqhl,hcl->bqhc", mixed, w.kv_up[:, mla.nope :], precision=exact)
    return linear(out.reshape(*out.shape[:2], -1), w.o.reshape(w.o.shape[0], -1))


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
