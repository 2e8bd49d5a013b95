"""Settings of a Gemma 4 assistant and whether they fit each other and the target."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specjax.drafters.pick import Drafting, check_drafting
from specjax.drafters.vocab import check_vocab
from specjax.layers.rope import RopeConfig, inverse_frequencies
from specjax.targets import gemma, gemma4_config
from specjax.targets.gemma import FULL, SLIDING, Kind

DEFAULT_K = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Frozen settings.

    ``body``: the assistant's own layers, as the config of a Gemma 4 model without keys and values; its
    ``vocab_size`` is that of the head. ``vocab_size``, ``target_size``: the target's. ``position_offset`` 1: all
    drafts of a round stand at the position of the anchor, as in transformers; 0: at the one before, as in vLLM.
    ``centroids`` 0: the head scores every token; else the tokens of the ``top_centroids`` best clusters.
    ``softcap`` of the draft logits; None: none.
    """

    body: gemma4_config.Config
    target_size: int
    vocab_size: int
    k: int = DEFAULT_K
    drafting: Drafting = "probabilistic"
    position_offset: int = 1
    centroids: int = 0
    top_centroids: int = 0
    softcap: float | None = None

    def __post_init__(self):
        check_drafting(self.k, self.drafting)
        if isinstance(self.position_offset, bool) or self.position_offset not in (0, 1):
            raise ValueError(f"position_offset must be 0 or 1, got {self.position_offset!r}")
        if self.centroids and not 0 < self.top_centroids <= self.centroids:
            raise ValueError(f"{self.top_centroids} of {self.centroids} clusters cannot be looked at")
        if self.centroids and self.body.vocab_size % self.centroids:
            raise ValueError(
                f"{self.body.vocab_size} tokens do not make {self.centroids} clusters of one size"
            )
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap must be above 0, or None for none; got {self.softcap!r}")

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of the target's layers that are read: "sliding", "full" or both."""
        layers = range(self.body.num_layers)
        return tuple(sorted({"full" if i in self.body.full_layers else "sliding" for i in layers}))

    def window(self, kind: Kind) -> int | None:
        """How far back from its own position a layer of a kind looks, its position included.

        transformers counts the window from the last position of the text and takes the one at its far end as
        well; seen from one position later that is two more.
        """
        return None if kind.window is None else kind.window + 2 * self.position_offset


_OPTIONAL = {"k", "drafting", "position_offset", "centroids", "top_centroids", "softcap"}
_REQUIRED = {"text", "backbone_hidden_size"}


def config(settings: Mapping[str, Any], target_cfg: Any) -> Config:
    """Config from settings, checked against the target.

    ``text``: the assistant's layers as a Gemma 4 ``text_config``. ``backbone_hidden_size``: width of the target it
    was made for. The rest are fields of :class:`Config`.

    Raises ValueError for an unknown setting and for whatever does not fit, naming both sides.
    """
    given = {key: value for key, value in settings.items() if value is not None}
    if unknown := sorted(set(settings) - _OPTIONAL - _REQUIRED):
        raise ValueError(f"the assistant has no setting(s) {unknown}; known: {sorted(_OPTIONAL)}")
    if missing := sorted(_REQUIRED - set(given)):
        raise ValueError(
            f"the assistant is loaded from a folder with its weights; settings alone lack {missing}"
        )
    body = _body(given["text"])
    size, made_for = int(target_cfg.hidden_size), int(given["backbone_hidden_size"])
    if made_for != size:
        raise ValueError(
            f"the assistant was made for a target of width {made_for} (backbone_hidden_size), this one is {size} wide"
        )
    check_vocab("assistant", body.vocab_size, int(target_cfg.vocab_size))
    return checked(
        Config(
            body=body,
            target_size=size,
            vocab_size=int(target_cfg.vocab_size),
            **{key: given[key] for key in _OPTIONAL & set(given)},
        ),
        target_cfg,
    )


#: Settings of a Gemma 4 model that an assistant cannot have.
_NOT = {
    "hidden_size_per_layer_input": (0, None),
    "vocab_size_per_layer_input": (0, None),
    "enable_moe_block": (False, None),
    "use_double_wide_mlp": (False, None),
}


def _body(text: Mapping[str, Any]) -> gemma4_config.Config:
    """Config of the layers; none of them has keys and values of its own."""
    for key, values in _NOT.items():
        if text.get(key) not in values:
            raise ValueError(f"the assistant's text_config has {key}={text[key]!r}; supported: {values[0]!r}")
    layers, shared = int(text["num_hidden_layers"]), text.get("num_kv_shared_layers") or 0
    if shared not in (0, layers):
        raise ValueError(
            f"all {layers} layers of an assistant read the target's keys and values, but num_kv_shared_layers is "
            f"{shared}"
        )
    plain = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
    known = {key: value for key, value in text.items() if key != "vocab_size_per_layer_input"}
    return dataclasses.replace(gemma4_config.config({**known, **plain}), shared_layers=layers)


def lent(target_cfg: Any) -> dict[str, Kind]:
    """What kinds of layers a target can lend keys and values of, and how these look.

    ValueError for a target that keeps none.
    """
    if isinstance(target_cfg, gemma.Base):
        own = [target_cfg.kind(i) for i in range(getattr(target_cfg, "cached", target_cfg.num_layers))]
        kinds = {"sliding": target_cfg.sliding, "full": target_cfg.full}
        return {name: kind for name, kind in kinds.items() if kind in own}
    if all(hasattr(target_cfg, name) for name in ("kv_heads", "head_dim", "rope")):
        return {
            "full": Kind(kv_heads=target_cfg.kv_heads, head_dim=target_cfg.head_dim, rope=target_cfg.rope)
        }
    raise ValueError("this target keeps no keys and values of heads, which an assistant reads")


def checked(cfg: Config, target_cfg: Any) -> Config:
    """The config itself; ValueError where a kind of layer does not fit what the target lends."""
    there, types = lent(target_cfg), {"full": FULL, "sliding": SLIDING}
    if missing := [types[name] for name in cfg.kinds if name not in there]:
        raise ValueError(f"the assistant has layers of type {missing}, and the target keeps keys of none")
    for name in cfg.kinds:
        mine, long = getattr(cfg.body, name), types[name]
        theirs = there[name]
        for field in ("kv_heads", "head_dim"):
            if getattr(mine, field) != getattr(theirs, field):
                raise ValueError(
                    f"{long}: the assistant reads keys with {field}={getattr(mine, field)}, the target's have "
                    f"{getattr(theirs, field)}"
                )
        if not _turns_alike(mine.rope, theirs.rope):
            raise ValueError(
                f"{long}: rope of the assistant is {mine.rope}, the target's keys have {theirs.rope}"
            )
        if theirs.window is not None and (mine.window or math.inf) > theirs.window:
            raise ValueError(
                f"{long}: the assistant looks back {mine.window} positions, the target keeps {theirs.window}"
            )
    return cfg


def _turns_alike(a: RopeConfig, b: RopeConfig) -> bool:
    same = (a.pair, a.attention_factor) == (b.pair, b.attention_factor)
    return same and np.array_equal(inverse_frequencies(a), inverse_frequencies(b))


def tiny(target_cfg: Any) -> Config:
    """One layer per kind that the target has, half as wide as the target."""
    kinds = lent(target_cfg)
    types = tuple(name for name in ("sliding", "full") if name in kinds)
    heads = 2 * math.lcm(*(kind.kv_heads for kind in kinds.values()))
    return shaped(target_cfg, types, max(1, int(target_cfg.hidden_size) // 2), heads, 16)


def shaped(
    target_cfg: Any, types: Sequence[str], width: int, heads: int, mlp_size: int, **fields: Any
) -> Config:
    """Config for a target, of layers of ``types`` ("sliding", "full") that fit what it lends. ``width``, ``heads`` of
    queries and ``mlp_size`` are free; ``fields`` are others of :class:`Config`."""
    kinds = lent(target_cfg)
    full = kinds.get("full") or kinds["sliding"]
    sliding = kinds.get("sliding") or dataclasses.replace(full, window=1)
    vocab = int(target_cfg.vocab_size)
    body = gemma4_config.Config(
        vocab_size=vocab,
        hidden_size=width,
        num_layers=len(types),
        heads=heads,
        max_positions=int(target_cfg.max_positions),
        eps=1e-6,
        sliding=sliding,
        full=full,
        full_layers=tuple(i for i, name in enumerate(types) if name == "full"),
        softcap=None,
        tied=True,
        dense_size=mlp_size,
        double_wide=False,
        shared_layers=len(types),
        keys_from_values=False,
        experts=0,
        experts_per_token=0,
        expert_size=0,
        per_layer_size=0,
    )
    target_size = int(target_cfg.hidden_size)
    return checked(Config(body=body, target_size=target_size, vocab_size=vocab, **fields), target_cfg)
