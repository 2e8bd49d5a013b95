"""What shape a drafter has unless told otherwise: that of the target's own layers."""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from specjax.targets import gemma


def transformer(target_cfg: Any, layers: int) -> dict[str, Any]:
    """Keys of ``layers`` layers like the target's, as Hugging Face spells them. Rope has the target's base frequency
    and no scaling: positions of a drafter are relative and its reach is what it is trained on."""
    heads, kv_heads, head_dim = attention(target_cfg)
    return {
        "hidden_size": int(target_cfg.hidden_size),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": int(target_cfg.mlp_size),
        "rms_norm_eps": float(getattr(target_cfg, "eps", 1e-6)),
        "rope_theta": full_attention(target_cfg).rope.theta,
        "vocab_size": int(target_cfg.vocab_size),
    }


def attention(target_cfg: Any) -> tuple[int, int, int]:
    """(query heads, key/value heads, channels of a head) of the target's full attention, or what is usual for a target
    that has none: heads of 64 or 128 channels that fill its width, four sharing keys where that goes up."""
    kind = full_attention(target_cfg)
    if hasattr(kind, "kv_heads") and hasattr(kind, "head_dim"):
        return int(target_cfg.heads), int(kind.kv_heads), int(kind.head_dim)
    width = int(target_cfg.hidden_size)
    head_dim = next((c for c in (128, 64, 32, 16, 8) if width % c == 0 and width // c >= 4), width)
    heads = width // head_dim
    return heads, heads // 4 if heads % 4 == 0 else heads, head_dim


def full_attention(target_cfg: Any) -> Any:
    """Where a target's config says what its full attention is like: with Gemma's, in a part of its own."""
    return target_cfg.full if isinstance(target_cfg, gemma.Base) else target_cfg


#: Keys of latent attention's sizes; ``q_lora_rank`` is None where queries are made in one step.
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def latent_keys(target_cfg: Any) -> dict[str, Any]:
    """Sizes of the target's latent attention; none of one that has none."""
    sizes = getattr(target_cfg, "latent", None)
    if sizes is None:
        return {}
    found = (sizes.q_rank, sizes.rank, sizes.nope, sizes.rope, sizes.value)
    return dict(zip(LATENT, found, strict=True))


def spread_taps(layers: int) -> tuple[int, ...]:
    """Residual streams after 2, L/2 and L - 3 of L layers, as published EAGLE-3 drafters have them; of a target too
    shallow for these, what is left when they are brought into range."""
    return tuple(sorted({min(max(j, 0), layers) for j in (2, layers // 2, layers - 3)}))


def draft_size(asked: Any, vocab: int) -> int:
    """How many tokens a draft vocabulary has that is given as a number or as ids. ValueError for one of none, for
    more than there are, and for ids outside the target's."""
    if isinstance(asked, int | np.integer) and not isinstance(asked, bool):
        if not 0 < asked <= vocab:
            raise ValueError(f"draft_vocab must be from 1 to the target's {vocab} tokens, got {asked}")
        return int(asked)
    if isinstance(asked, str | bool) or not isinstance(asked, Iterable):
        raise ValueError(f"draft_vocab must be a number of tokens or a list of ids, got {asked!r}")
    return len(vocabulary(asked, None, vocab))


def vocabulary(ids: Iterable[int] | None, count: int | None, vocab: int) -> np.ndarray:
    """Ids of a draft vocabulary, ascending; None: the lowest. ValueError unless they are ``count`` different ones of
    the target's (None: any number)."""
    found = np.unique(np.asarray(list(range(count or 0) if ids is None else ids), np.int64))
    if not len(found) or found[0] < 0 or found[-1] >= vocab:
        span = f"ids from {found[0]} to {found[-1]}" if len(found) else "no ids"
        raise ValueError(f"the draft vocabulary has {span}, the target's are [0, {vocab})")
    if count is not None and len(found) != count:
        raise ValueError(f"the draft vocabulary has {len(found)} different ids, the drafter's config {count}")
    return found


def rows_of(table: Float[Array, "V D"], ids: np.ndarray) -> Float[Array, "N D"]:
    """float32 copy of a table's rows; ids beyond its end take the last."""
    return jnp.asarray(table, jnp.float32)[jnp.asarray(np.minimum(ids, table.shape[0] - 1))]
