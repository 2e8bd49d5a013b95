"""Settings of a native MTP drafter and whether they fit the target."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

import numpy as np

from specjax import registry
from specjax.drafters.pick import Drafting, check_drafting
from specjax.drafters.vocab import check_vocab
from specjax.targets import deepseek_config, qwen3, qwen3_5_config

#: Families whose checkpoints have such a layer, by the config of the model it belongs to.
FAMILIES = (qwen3.Config, qwen3_5_config.Config, deepseek_config.Config)
_FIELDS = ("k", "drafting", "state", "own_embed", "own_head")
_KNOWN = {"family", "model", "draft_vocab", "eos_ids", *_FIELDS}
#: What a layer reads of the target: its state after the final norm, or the residual stream before it.
Reading = Literal["normed", "raw"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Frozen settings. ``model``: config of the family, of the one layer that drafts; ``vocab_size`` the target's.

    ``draft_ids``: target ids that are drafted, ascending; None: all. ``state``: what the layer reads of the target,
    which has ``layers`` of its own.
    """

    family: str
    model: Any
    vocab_size: int
    k: int = 1
    drafting: Drafting = "probabilistic"
    own_embed: bool = False
    own_head: bool = False
    draft_ids: tuple[int, ...] | None = None
    state: Reading = "normed"
    layers: int = 0

    @property
    def tap(self) -> int | None:
        """The residual stream that is read; None: the state after the final norm."""
        return self.layers if self.state == "raw" else None

    @property
    def head_rows(self) -> int:
        """Ids that target and head both have."""
        return min(self.model.vocab_size, self.vocab_size) if self.own_head else self.vocab_size

    def __post_init__(self):
        check_drafting(self.k, self.drafting)
        if self.state not in get_args(Reading):
            raise ValueError(f"state must be one of {get_args(Reading)}, got {self.state!r}")
        if self.state == "raw" and not self.layers:
            raise ValueError(
                "state='raw' needs the number of the target's layers: load the layer from its files"
            )


def config(settings: Mapping[str, Any], target_cfg: Any) -> Config:
    """Config from settings, checked against the target.

    ``family`` and ``model``: the model in whose checkpoint the layer lies, by name and config. ``k``, ``drafting``.
    ``state``: what the layer reads of the target, "normed" (default) or "raw".
    ``own_embed``, ``own_head``: tables that are not the target's. ``draft_vocab``: how many of the lowest ids, or
    which ids, are drafted; ``eos_ids`` are drafted as well.

    Raises ValueError for another setting and for whatever does not fit, naming both sides.
    """
    if unknown := sorted(set(settings) - _KNOWN):
        raise ValueError(
            f"the MTP drafter has no setting(s) {unknown}; known: draft_vocab, drafting, k, state"
        )
    if not {"family", "model"} <= set(settings):
        raise ValueError("the MTP drafter is part of a target's checkpoint; settings alone are not enough")
    model = settings["model"]
    if not isinstance(model, FAMILIES) or (isinstance(model, qwen3.Config) and model.experts):
        raise ValueError(
            f"no layer for multi-token prediction is known of the family {settings['family']!r}; known: Qwen3.5, "
            "Qwen3.6, DeepSeek-V3, Kimi-K2, and dense layers of Qwen3"
        )
    if model.hidden_size != target_cfg.hidden_size:
        raise ValueError(
            f"the MTP layer is {model.hidden_size} wide, this target {target_cfg.hidden_size}: it belongs to another "
            "model"
        )
    check_vocab("mtp", model.vocab_size, target_cfg.vocab_size)
    given = {key: settings[key] for key in _FIELDS if key in settings}
    out = Config(
        family=settings["family"],
        model=_one_layer(model),
        vocab_size=target_cfg.vocab_size,
        layers=int(target_cfg.num_layers),
        **given,
    )
    ids = _draft_ids(settings.get("draft_vocab"), settings.get("eos_ids", ()), out.head_rows)
    return dataclasses.replace(out, draft_ids=ids)


def _one_layer(model: Any) -> Any:
    """The config of a model that is this one layer: full attention, and experts if the model has any."""
    if isinstance(model, deepseek_config.Config):
        return dataclasses.replace(model, num_layers=1, dense_layers=0, mtp_layers=0)
    if isinstance(model, qwen3.Config):
        return dataclasses.replace(model, num_layers=1)
    return dataclasses.replace(model, num_layers=1, full=(True,))


def _draft_ids(asked: Any, eos_ids: Iterable[int], vocab: int) -> tuple[int, ...] | None:
    """Ids of the draft vocabulary; None when it is the whole."""
    if asked is None:
        return None
    count = isinstance(asked, int | np.integer) and not isinstance(asked, bool)
    if not count and (isinstance(asked, str | Mapping) or not hasattr(asked, "__iter__")):
        raise ValueError(f"draft_vocab must be a number of ids or a list of ids, got {asked!r}")
    ids = {int(i) for i in (range(asked) if count else asked)}
    if not ids:
        raise ValueError("draft_vocab must have at least one id")
    if min(ids) < 0 or max(ids) >= vocab:
        raise ValueError(f"draft_vocab names ids from {min(ids)} to {max(ids)}, the head's are [0, {vocab})")
    ids |= {i for i in eos_ids if 0 <= i < vocab}
    return None if len(ids) == vocab else tuple(sorted(ids))


def adapted(cfg: Config, settings: Mapping[str, Any], eos_ids: Iterable[int]) -> dict[str, Any]:
    """A user's settings as fields of a config that is there: ``draft_vocab`` becomes ``draft_ids``."""
    out = {key: value for key, value in settings.items() if key != "draft_vocab"}
    if "draft_vocab" in settings:
        out["draft_ids"] = _draft_ids(settings["draft_vocab"], eos_ids, cfg.head_rows)
    return out


def from_json(data: Mapping[str, Any], target_cfg: Any) -> Config:
    """Config from a saved one. The family must be a registered one: a file does not choose what is imported."""
    from specjax.config import from_dict

    del target_cfg
    if data["family"] not in registry.TARGETS:
        raise ValueError(f"MTP layer of family {data['family']!r}; known: {', '.join(registry.TARGETS)}")
    fields = {
        **data,
        "model": from_dict(registry.target(data["family"]).Config, data["model"]),
        "draft_ids": None if data.get("draft_ids") is None else tuple(data["draft_ids"]),
    }
    return Config(**fields)


def tiny(target_cfg: Any) -> Config:
    """A Qwen3.5 layer as wide as the target, three drafts of its single layer."""
    hf = {
        "model_type": "qwen3_5_text",
        "vocab_size": target_cfg.vocab_size,
        "hidden_size": target_cfg.hidden_size,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "intermediate_size": 16,
        "max_position_embeddings": target_cfg.max_positions,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 1,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 2,
        "rope_theta": 10000.0,
    }
    model = qwen3_5_config.config(hf)
    return config({"family": "qwen3_5_text", "model": model, "k": 3}, target_cfg)
