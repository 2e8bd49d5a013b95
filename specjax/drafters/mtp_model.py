"""The network of an MTP drafter: a decoder layer of the target's own kind behind a projection of (token, hidden
state) pairs. Names below are those of Qwen checkpoints; files that name it otherwise are renamed when read.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.core.cache import DenseKV
from specjax.drafters.mtp_config import Config
from specjax.drafters.serial import Place, row
from specjax.layers import head as heads, latent
from specjax.layers.linear import linear
from specjax.layers.norm import Joined, Normed, Rows
from specjax.layers.rope import rope_angles
from specjax.targets import deepseek, qwen3, qwen3_5
from specjax.targets.ffn import feed_forward
from specjax.types import ArraySpec, Shared


@struct.dataclass
class Weights:
    """All weights. Borrowed tables are None."""

    embed_norm: Float[Array, " D"]
    hidden_norm: Float[Array, " D"]
    fc: Float[Array, "D W"]  # W = 2 D: the embedding, then the hidden state
    layer: Any  # the family's own
    norm: Float[Array, " D"]
    embed: Float[Array, "V D"] | None
    head: Float[Array, "V D"] | None


#: Whose layer it is. Each module has ``abstract_layer``, ``choose_experts``, ``heads``, ``keys_values``, ``queries``
#: and ``mix``.
_FAMILIES: dict[type, Any] = {qwen3.Config: qwen3, qwen3_5.Config: qwen3_5, deepseek.Config: deepseek}


def _family(cfg: Config) -> Any:
    return _FAMILIES[type(cfg.model)]


def _has_latent(cfg: Config) -> bool:
    return _family(cfg) is deepseek


def norms_stored_minus_one(cfg: Config) -> bool:
    """Whether norms multiply by one plus their weights."""
    return _family(cfg) is qwen3_5


def abstract(cfg: Config) -> Weights:
    """Weight struct of ArraySpecs."""
    d, init = cfg.model.hidden_size, "zeros" if norms_stored_minus_one(cfg) else "ones"
    norm = lambda name: ArraySpec((d,), (None,), (f"{name}.weight",), init)  # noqa: E731
    table = lambda name: ArraySpec((cfg.model.vocab_size, d), ("vocab", None), (f"{name}.weight",))  # noqa: E731
    return Weights(
        embed_norm=norm("pre_fc_norm_embedding"),
        hidden_norm=norm("pre_fc_norm_hidden"),
        fc=ArraySpec((d, 2 * d), (None, None), ("fc.weight",)),
        layer=_family(cfg).abstract_layer(cfg.model, 0, "layers.0."),
        norm=norm("norm"),
        embed=table("embed_tokens") if cfg.own_embed else None,
        head=table("lm_head") if cfg.own_head else None,
    )


def create_cache(cfg: Config, rows: int, slots: int, dtype: Any) -> DenseKV:
    """One slot per position: keys and values of the heads, or the latent."""
    if _has_latent(cfg):
        return latent.create_cache(cfg.model.latent, rows, slots, dtype)
    return DenseKV.create(rows, cfg.model.kv_heads, slots, cfg.model.head_dim, dtype)


def through(
    p: Weights,
    cfg: Config,
    embedded: Float[Array, "B Q D"],
    feature: Float[Array, "B Q D"],
    attention: Callable[
        [int, Any, Rows, Float[Array, "B Q D"]],
        tuple[Float[Array, "B N D"], Float[Array, "B N D"]],
    ],
) -> Float[Array, "B N D"]:
    """State (after the final norm) of the rows that ``attention(0, layer, u, x)`` lets go on: it gives their residual
    stream and what is added to it, and knows their keys and values."""
    norm = functools.partial(_normed, cfg)
    x = linear(Joined((norm(embedded, p.embed_norm), norm(feature, p.hidden_norm))), p.fc)
    x, added = attention(0, p.layer, norm(x, p.layer.attn_norm), x)
    x = x + added
    choose = functools.partial(_family(cfg).choose_experts, cfg.model)
    x = x + feed_forward(p.layer.mlp, norm(x, p.layer.mlp_norm), choose)
    return norm(x, p.norm).array()


def run(
    p: Weights,
    cfg: Config,
    embedded: Float[Array, "B Q D"],
    feature: Float[Array, "B Q D"],
    at: Place,
    kv: DenseKV,
) -> tuple[Float[Array, "B D"], DenseKV]:
    """State of row ``at.last`` (after the final norm) and the cache with the whole block written.

    The other rows matter to nothing but the cache: their queries and feed-forward are left out.
    """
    written = []
    family, model, few = _family(cfg), cfg.model, at.pos.shape[1] > 1

    def attention(_, layer, u, x):
        w, pos, angles = _attention(layer), at.pos, rope_angles(model.rope, at.pos)
        q, k, v = (
            (None, *family.keys_values(w, model, u, angles)) if few else family.heads(w, model, u, angles)
        )
        *cached, held = kv.extend(k, v, pos, at.valid, at.mode)
        written.append(held)
        if few:
            u, x, pos = (row(a, at.last) for a in (u, x, pos))
            q = family.queries(w, model, u, rope_angles(model.rope, pos))
        return x, family.mix(w, model, q, pos, cached)

    state = through(p, cfg, embedded, feature, attention)
    return state[:, 0], written[0]


def _normed(cfg: Config, x, weight) -> Normed:
    return Normed(x, weight, cfg.model.eps, offset=norms_stored_minus_one(cfg))


def _attention(layer: Any) -> Any:
    """Its attention's weights: Qwen3.5 keeps them apart from the layer's norms."""
    return getattr(layer, "mixer", layer)


def head(p: Weights, shared: Shared, cfg: Config) -> Float[Array, "Vd D"]:
    """Rows of the output head that are drafted from. A cut one is gathered, unless :func:`ready` has."""
    table = shared.head if p.head is None else p.head
    if cfg.draft_ids is None:
        return table[: cfg.vocab_size]
    return table if len(table) == len(cfg.draft_ids) else table[jnp.asarray(cfg.draft_ids)]


def ready(p: Weights, shared: Shared, cfg: Config) -> Weights:
    """Weights whose head has the rows that are drafted from and no other."""
    return p if cfg.draft_ids is None else dataclasses.replace(p, head=head(p, shared, cfg))


def logits(table: Float[Array, "Vd D"], state: Float[Array, "B D"]) -> Float[Array, "B Vd"]:
    """float32 logits over the draft vocabulary."""
    return linear(state.astype(table.dtype), table, out_dtype=jnp.float32)


def best(table: Float[Array, "Vd D"], state: Float[Array, "B D"]) -> Int[Array, " B"]:
    """The draft id with the largest of the :func:`logits`, which are not kept."""
    return heads.best(state.astype(table.dtype), table, heads.Cap())[1]


def target_ids(cfg: Config) -> Int[Array, " Vd"] | None:
    """Target id of every draft id; None when they are the same and as many."""
    if cfg.draft_ids is not None:
        return jnp.asarray(cfg.draft_ids, jnp.int32)
    return None if cfg.head_rows == cfg.vocab_size else jnp.arange(cfg.head_rows, dtype=jnp.int32)
