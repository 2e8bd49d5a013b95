"""A drafter that costs nothing, to time verification alone: its drafts follow from the last token.

The first token of a row says how many different tokens its verified block has: experts that a block hits depend on it.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from specjax.types import Proposal, TapSpec


@dataclasses.dataclass(frozen=True)
class Config:
    """``k`` drafts of ``vocab`` tokens."""

    k: int
    vocab: int


def config(settings: Any, target_cfg: Any) -> Config:
    """From ``{"k": ...}``."""
    return Config(int(settings["k"]), int(target_cfg.vocab_size))


def tiny(target_cfg: Any) -> Config:
    """Three drafts."""
    return Config(3, int(target_cfg.vocab_size))


def varies(cfg: Any) -> bool:
    """Always k."""
    return False


def NEEDS(cfg: Any) -> TapSpec:
    """Nothing."""
    return TapSpec()


def abstract(cfg: Any) -> None:
    """No weights."""


def init_state(cfg: Any, rows: int, slots: int, q_max: int, dtype: Any) -> tuple[()]:
    """None."""
    return ()


def draft(p: Any, shared: Any, cfg: Any, k: int, dstate: Any, ctx: Any, keys: Any) -> tuple[Proposal, Any]:
    """``k`` tokens; as many different ones, the anchor among them, as the row's first token says."""
    other = jnp.arange(1, k + 1) % jnp.maximum(ctx.tokens[:, :1], 1)
    tokens = (ctx.anchor[:, None] + other * 7919) % cfg.vocab
    return Proposal(tokens.astype(jnp.int32), jnp.full(ctx.length.shape, k, jnp.int32)), dstate


def absorb(p: Any, shared: Any, cfg: Any, dstate: Any, block: Any) -> Any:
    """Nothing to take in."""
    return dstate


def min_resume(cfg: Any, high_water: int) -> int:
    """Anywhere."""
    return 1
