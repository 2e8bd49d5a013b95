"""DSpark: DFlash's block, corrected token by token, and cut where the drafter itself doubts.

The backbone, its cache and its layouts are DFlash's. A low-rank head adds to each position's logits what
the token before it says (the drafts of a block are otherwise blind to one another), and a second head
estimates each draft's chance of being accepted. With ``confidence_threshold`` above 0 a proposal ends
before the first draft whose chance is below it. A chance depends on earlier drafts only, so the cut
leaves the output's distribution as it is.

Paper: DSpark, arXiv 2607.05147. Checkpoints: DeepSpec and speculators (``specjax.checkpoints.formats``).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, get_args

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.drafters import dflash, pick
from specjax.drafters.dflash import NEEDS, State, init_state, max_k, min_resume
from specjax.drafters.dflash_config import (
    SETTINGS,
    Config as DFlashConfig,
    check_k,
    check_names,
    checked,
    fields,
    tiny_fields,
)
from specjax.drafters.markov import (
    Confidence,
    Kind,
    Markov,
    Settings,
    confidence,
    confidence_specs,
    markov_specs,
    walk,
)
from specjax.drafters.vocab import check_vocab
from specjax.types import AbsorbIn, Ctx, Proposal, Shared

__all__ = [
    "NEEDS", "Config", "Weights", "absorb", "abstract", "checked", "confident", "config", "draft", "init_state",
    "max_k", "min_resume", "tiny", "varies",
]  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DFlashConfig):
    """Frozen settings: DFlash's, the heads (None or False = absent) and the threshold (0 = no cut)."""

    markov: Settings | None = None
    confidence: bool = False
    confidence_markov: bool = False
    confidence_threshold: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        if self.selector is not None:
            raise ValueError("a candidate selector and a Markov head cannot be combined")
        if self.confidence_markov and self.markov is None:
            raise ValueError(
                "the confidence head reads the Markov head's vectors, but there is no Markov head"
            )
        threshold = self.confidence_threshold
        if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 <= threshold <= 1:
            raise ValueError(f"confidence_threshold must be from 0 (off) to 1, got {threshold!r}")
        if threshold > 0 and not self.confidence:
            raise ValueError(f"confidence_threshold={threshold}, but the drafter has no confidence head")


@struct.dataclass
class Weights:
    """DFlash's weights and the heads'."""

    backbone: dflash.Weights
    markov: Markov | None
    confidence: Confidence | None


#: Settings beyond DFlash's; a user may want to give ``confidence_threshold``.
HEADS = {
    "markov_rank",
    "markov_kind",
    "markov_rows",
    "confidence",
    "confidence_markov",
    "confidence_threshold",
}


def config(settings: Mapping[str, Any], target_cfg: Any) -> Config:
    """Config from the settings a format read, perhaps changed by the user; ValueError as DFlash's."""
    check_names(settings, SETTINGS | HEADS, "DSpark")
    body = {key: value for key, value in settings.items() if key not in HEADS}
    heads = {
        k: settings[k] for k in ("confidence", "confidence_markov", "confidence_threshold") if k in settings
    }
    rank = settings.get("markov_rank")
    if rank:
        kind, rows = settings.get("markov_kind", "vanilla"), int(settings["markov_rows"])
        if kind not in get_args(Kind):
            raise ValueError(f"the kind of Markov head must be one of {get_args(Kind)}, got {kind!r}")
        check_vocab("DSpark", rows, target_cfg.vocab_size)
        heads["markov"] = Settings(int(rank), kind, rows)
    return Config(**fields(body, target_cfg), **heads)


def tiny(target_cfg: Any) -> Config:
    """Two small layers, four rows in layout "shift", four drafts, a vanilla head and a confidence."""
    head = Settings(6, "vanilla", target_cfg.vocab_size)
    return Config(**tiny_fields(target_cfg, "shift"), markov=head, confidence=True, confidence_markov=True)


def varies(cfg: Config) -> bool:
    """Only with a threshold."""
    return cfg.confidence_threshold > 0


def confident(cfg: Config) -> bool:
    """With the head."""
    return cfg.confidence


def abstract(cfg: Config) -> Weights:
    """Weight struct of ArraySpecs."""
    width, head = cfg.body.hidden_size, cfg.draft_vocab or cfg.own_head or cfg.vocab
    inputs = width + (cfg.markov.rank if cfg.markov is not None and cfg.confidence_markov else 0)
    return Weights(
        backbone=dflash.abstract(cfg),
        markov=None if cfg.markov is None else markov_specs(cfg.markov, head, width),
        confidence=confidence_specs(inputs) if cfg.confidence else None,
    )


def absorb(p: Weights, shared: Shared, cfg: Config, dstate: State, block: AbsorbIn) -> State:
    """As DFlash."""
    return dflash.absorb(p.backbone, shared, cfg, dstate, block)


def draft(
    p: Weights, shared: Shared, cfg: Config, k: int, dstate: State, ctx: Ctx, keys: Array | None
) -> tuple[Proposal, State]:
    """Up to ``k`` drafts per row: one pass over the block, then k small steps; q is of the corrected logits."""
    check_k(cfg, k)
    hidden = dflash.drafting_rows(p.backbone, shared, cfg, k, dstate, ctx)
    logits = dflash.unembed(p.backbone, shared, cfg, hidden)
    ids = dflash.target_ids(p.backbone)
    keys = keys if pick.sampling(cfg.drafting, keys) else None
    before = None
    if p.markov is None:
        tokens, q = dflash.independent(logits, ids, keys, ctx.temperature)
    else:
        tokens, q, before = walk(p.markov, cfg.markov, hidden, logits, ctx.anchor, ids, keys, ctx.temperature)
    proposal = dflash.proposal(tokens, q, ids, ctx)
    if p.confidence is None:
        return proposal, dstate
    sure = confidence(p.confidence, hidden, before if cfg.confidence_markov else None)
    count = cut(sure, cfg.confidence_threshold)
    return dataclasses.replace(proposal, count=count, confidence=sure), dstate


def cut(sure: Float[Array, "B K"], threshold: float) -> Int[Array, " B"]:
    """Drafts before the first whose own chance is below the threshold (chances are not multiplied)."""
    return jnp.sum(jnp.cumprod((sure >= threshold).astype(jnp.int32), 1), 1, dtype=jnp.int32)
