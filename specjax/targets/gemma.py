"""What Gemma 3 and Gemma 4 share: layers of two kinds, a window or all positions, each with its own cache; an
embedding that is scaled on the way in and is the head on the way out; names in checkpoints.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.core.cache import DenseKV, RingKV
from specjax.layers.head import Best, Cap, best as best_token
from specjax.layers.linear import linear
from specjax.layers.rope import RopeConfig, rope_config
from specjax.targets.decoder import slots_of
from specjax.types import ArraySpec, KVView, Shared

FULL, SLIDING = "full_attention", "sliding_attention"

#: Head and embedding are one array unless a config says otherwise.
TIED = True

#: Where files keep the text model beside other parts: beginnings of tensor names -> ours.
PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
#: Parts of multimodal checkpoints that text does not pass through.
SKIPPED = {
    "vision_tower.": "image encoder",
    "model.vision_tower.": "image encoder",
    "multi_modal_projector.": "image encoder's way into the text model",
    "model.multi_modal_projector.": "image encoder's way into the text model",
    "model.vision_embedder.": "image patches' way into the text model",
    "model.embed_vision.": "image features' way into the text model",
    "model.audio_tower.": "audio encoder",
    "model.embed_audio.": "audio features' way into the text model",
}

#: Settings that both families have and a file may leave out.
DEFAULTS: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
}
KNOWN = {
    *DEFAULTS, "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "sliding_window",
    "layer_types", "final_logit_softcapping", "cache_implementation",
}  # fmt: skip
FIXED = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "hidden_act": ("gelu_pytorch_tanh", None),
    "attention_bias": (False, None),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """Attention of the layers of one kind. ``window`` None: all positions."""

    kv_heads: int
    head_dim: int
    rope: RopeConfig
    window: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Base:
    """Frozen settings that both families have."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    heads: int
    max_positions: int
    eps: float
    sliding: Kind
    full: Kind
    full_layers: tuple[int, ...]
    softcap: float | None
    tied: bool

    def kind(self, layer: int) -> Kind:
        """Attention of a layer."""
        return self.full if layer in self.full_layers else self.sliding

    @property
    def embed_scale(self) -> float:
        """What embeddings are multiplied with, after rounding to their type."""
        return self.hidden_size**0.5


def base_config(text: Mapping[str, Any], full_layers: tuple[int, ...], sliding: Kind, full: Kind) -> dict:
    """Fields of :class:`Base` from checked settings of the text model, defaults filled in."""
    softcap = text.get("final_logit_softcapping")
    if not sliding.window:
        raise ValueError(f"{text.get('model_type')}: the config has no sliding_window")
    for kind in (sliding, full):
        if int(text["num_attention_heads"]) % kind.kv_heads:
            raise ValueError(
                f"{text.get('model_type')}: {text['num_attention_heads']} query heads for {kind.kv_heads} key heads"
            )
    return {
        "vocab_size": int(text["vocab_size"]),
        "hidden_size": int(text["hidden_size"]),
        "num_layers": int(text["num_hidden_layers"]),
        "heads": int(text["num_attention_heads"]),
        "max_positions": int(text["max_position_embeddings"]),
        "eps": float(text["rms_norm_eps"]),
        "sliding": sliding,
        "full": full,
        "full_layers": full_layers,
        "softcap": float(softcap) if softcap else None,
        "tied": bool(text.get("tie_word_embeddings", TIED)),
    }


def full_layers(text: Mapping[str, Any], pattern: int) -> tuple[int, ...]:
    """Layers that attend to all positions: those the config lists, else every ``pattern``-th."""
    layers, types = int(text["num_hidden_layers"]), text.get("layer_types")
    if types is None:
        return tuple(i for i in range(layers) if (i + 1) % pattern == 0)
    unknown = sorted(set(types) - {FULL, SLIDING})
    if unknown or len(types) != layers:
        raise ValueError(
            f"{text.get('model_type')}: layer_types has {len(types)} entries for {layers} layers, of types "
            f"{sorted(set(types))}; supported: {FULL}, {SLIDING}, one per layer"
        )
    return tuple(i for i, kind in enumerate(types) if kind == FULL)


def kind_rope(
    text: Mapping[str, Any], kind: str, head_dim: int, flat: Mapping[str, Any], default: Mapping[str, Any]
) -> RopeConfig:
    """Rope of one kind of layer from ``rope_parameters``, which has an entry per kind, or the older ``flat`` keys.

    ``default`` holds where both are silent. Raises ValueError when both speak and disagree.
    """
    nested = text.get("rope_parameters") or {}
    if set(nested) - {FULL, SLIDING}:
        raise ValueError(
            f"{text.get('model_type')}: rope_parameters must have one entry per type of layer ({FULL}, {SLIDING}), "
            f"got {sorted(nested)}"
        )
    flat = {key: value for key, value in flat.items() if value is not None}
    given = dict(nested.get(kind) or ({} if flat else default))
    if "rope_theta" not in given and "rope_theta" not in flat:
        given["rope_theta"] = default["rope_theta"]
    more = {"rope_parameters": given, "max_position_embeddings": text["max_position_embeddings"]}
    return rope_config(flat | more, head_dim)


def norm_specs(names: Mapping[str, tuple[str, int]], prefix: str, init: Any) -> dict[str, ArraySpec]:
    """Specs of norm weights: field -> (name in the checkpoint, size)."""
    return {
        field: ArraySpec((size,), (None,), (f"{prefix}{name}.weight",), init)
        for field, (name, size) in names.items()
    }


def mlp_specs(cfg: Base, size: int, prefix: str) -> dict[str, ArraySpec]:
    """Specs of a gated feed-forward block."""
    d, name = cfg.hidden_size, lambda part: (f"{prefix}mlp.{part}_proj.weight",)
    return {
        "gate": ArraySpec((size, d), ("mlp", None), name("gate")),
        "up": ArraySpec((size, d), ("mlp", None), name("up")),
        "down": ArraySpec((d, size), (None, "mlp"), name("down")),
    }


def head_specs(cfg: Base, kind: Kind, prefix: str, parts: str) -> dict[str, ArraySpec | None]:
    """Specs of a layer's projections; those of q, k, v, o not among ``parts`` are None."""
    d, h, g, c = cfg.hidden_size, cfg.heads, kind.kv_heads, kind.head_dim
    name = lambda part: (f"{prefix}self_attn.{part}_proj.weight",)  # noqa: E731
    every = {
        "q": ArraySpec((h, c, d), ("heads", None, None), name("q")),
        "k": ArraySpec((g, c, d), ("kv_heads", None, None), name("k")),
        "v": ArraySpec((g, c, d), ("kv_heads", None, None), name("v")),
        "o": ArraySpec((d, h, c), (None, "heads", None), name("o")),
    }
    return {part: spec if part in parts else None for part, spec in every.items()}


def embed(table: Float[Array, "V D"], tokens: Int[Array, "B Q"], scale: float) -> Float[Array, "B Q D"]:
    """Rows of a table times ``scale``, which is rounded to the table's type first (25.298 -> 25.25 in bfloat16)."""
    return table[tokens] * jnp.asarray(scale, table.dtype)


def output(mixed: Float[Array, "B Q H C"], o: Float[Array, "D H C"]) -> Float[Array, "B Q D"]:
    """The output projection of attention."""
    return linear(mixed.reshape(*mixed.shape[:2], -1), o.reshape(o.shape[0], -1))


def unembed(p: Any, cfg: Any, hidden: Float[Array, "*N D"]) -> Float[Array, "*N V"]:
    """float32 logits, soft-capped where the config says so."""
    logits = linear(hidden, p.embed if p.head is None else p.head, out_dtype=jnp.float32)
    return logits if cfg.softcap is None else cfg.softcap * jnp.tanh(logits / cfg.softcap)


def best(p: Any, cfg: Any, hidden: Float[Array, "*N D"], lse: bool = False) -> Best:
    """Largest logit of every row, its id and the logsumexp, if asked for (:func:`specjax.layers.head.best`)."""
    return best_token(hidden, p.embed if p.head is None else p.head, Cap(softcap=cfg.softcap), lse)


def shared(p: Any, cfg: Any) -> Shared:
    """Embedding (before scaling) and head lent to drafters."""
    head = p.embed if p.head is None else p.head
    return Shared(p.embed, head, embed_scale=cfg.embed_scale, softcap=cfg.softcap)


def new_cache(kind: Kind, rows: int, slots: int, q_max: int, dtype: Any) -> DenseKV | RingKV:
    """Empty cache of one layer: a ring for a window, else a slot per position."""
    if kind.window is None:
        return DenseKV.create(rows, kind.kv_heads, slots, kind.head_dim, dtype)
    return RingKV.create(rows, kind.kv_heads, kind.window, q_max, kind.head_dim, dtype)


def last_of(cfg: Any, cached: int, kind: str) -> int:
    """Index of the last layer of a kind ("full" or "sliding") among the ``cached`` first ones."""
    if kind not in ("full", "sliding"):
        raise ValueError(f"kinds of layers are 'full' and 'sliding', not {kind!r}")
    found = [i for i in range(cached) if (i in cfg.full_layers) == (kind == "full")]
    if not found:
        raise ValueError(f"this target has no {kind} layer with keys and values of its own")
    return found[-1]


def view(kv: DenseKV | RingKV) -> KVView:
    """Keys, values and their positions; entries that were rejected are among them, at positions to come."""
    return KVView(kv.k, kv.v, kv.pos if isinstance(kv, RingKV) else slots_of(kv.k))


def min_resume(cfg: Any, high_water: int) -> int:
    """Until a ring is full nothing was overwritten; then it goes back as far as it is longer than its window,
    which is the widest block and at least one position."""
    if len(cfg.full_layers) == cfg.num_layers or high_water <= cfg.sliding.window + 1:
        return 1
    return high_water - 1
