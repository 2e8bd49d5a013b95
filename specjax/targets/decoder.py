"""What decoders have around their layers, whatever the layers are: embedding, last norm and head, the walk through
the layers with its taps, and the functions of the contract that follow from these.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.layers.head import Best, Cap, best as best_token
from specjax.layers.linear import linear
from specjax.types import ArraySpec, Shared, TapSpec, TargetOut


@struct.dataclass
class Weights:
    """All weights of a model; ``head`` is None when tied to ``embed``. ``layers`` hold the family's own structs."""

    embed: Float[Array, "V D"]
    layers: tuple[Any, ...]
    norm: Float[Array, " D"]
    head: Float[Array, "V D"] | None


def outer_specs(cfg: Any, norm_init: Literal["ones", "zeros"] = "ones") -> dict[str, ArraySpec | None]:
    """Specs of embedding, last norm and head by field name, for a config with ``vocab_size``, ``hidden_size`` and
    ``tied``. ``norm_init``: "zeros" where norms are stored minus one."""
    table = ((cfg.vocab_size, cfg.hidden_size), ("vocab", None))
    return {
        "embed": ArraySpec(*table, ("model.embed_tokens.weight",)),
        "norm": ArraySpec((cfg.hidden_size,), (None,), ("model.norm.weight",), norm_init),
        "head": None if cfg.tied else ArraySpec(*table, ("lm_head.weight",)),
    }


def walk(
    x: Float[Array, "B Q D"],
    layers: Sequence[Any],
    cache: Sequence[Any],
    taps: TapSpec,
    step: Callable[[int, Any, Array, Any], tuple[Array, Any]],
    norm: Callable[[Array], Array],
) -> TargetOut:
    """Run ``step(index, layer, x, kv) -> x, kv`` over the layers; keep the residual streams that are tapped."""
    kept, held = {}, []
    for i, (layer, kv) in enumerate(zip(layers, cache, strict=True)):
        if i in taps.taps:
            kept[i] = x
        x, kv = step(i, layer, x, kv)
        held.append(kv)
    if len(held) in taps.taps:
        kept[len(held)] = x
    return TargetOut(norm(x), kept, tuple(held))


def unembed(p: Any, cfg: Any, hidden: Float[Array, "*N D"]) -> Float[Array, "*N V"]:
    """float32 logits."""
    del cfg
    return linear(hidden, p.embed if p.head is None else p.head, out_dtype=jnp.float32)


def best(p: Any, cfg: Any, hidden: Float[Array, "*N D"], lse: bool = False) -> Best:
    """Largest logit of every row, its id and the logsumexp, if asked for (:func:`specjax.layers.head.best`)."""
    del cfg
    return best_token(hidden, p.embed if p.head is None else p.head, Cap(), lse)


def shared(p: Any, cfg: Any) -> Shared:
    """Embedding and head lent to drafters."""
    del cfg
    return Shared(p.embed, p.embed if p.head is None else p.head)


def commit(cfg: Any, cache: tuple[Any, ...], emitted: Int[Array, " B"]) -> tuple[Any, ...]:
    """Each layer's cache is told how many positions of the last block count."""
    del cfg
    return tuple(held.commit(emitted) for held in cache)


def slots_of(buffer: Float[Array, "B G S C"]) -> Int[Array, "B S"]:
    """Positions of a buffer with one slot each."""
    return jnp.broadcast_to(jnp.arange(buffer.shape[2]), (buffer.shape[0], buffer.shape[2]))
