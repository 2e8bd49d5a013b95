"""A target that is a table: the next token's logits depend on the position and on the last token alone.

Its exact law is known without a model, a step costs next to nothing, and it keeps no cache, so thousands of
rows can be decoded at once. Family name: ``"specjax.testing.micro"``.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.config import Meta
from specjax.types import ArraySpec, KVView, Mode, Params, Shared, TapSpec, TargetOut


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Frozen settings. Position p uses table ``p % period``; columns from ``used`` on are padding."""

    vocab_size: int
    period: int = 1
    used: int = 0  # 0: all of them
    max_positions: int = 4096
    num_layers: int = 0
    heads: int = 1
    mlp_size: int = 1

    @property
    def hidden_size(self) -> int:
        return self.vocab_size


@struct.dataclass
class Weights:
    """Logits of the token that follows token v at a position."""

    table: Float[Array, "P V V"]


def micro_params(
    vocab: int,
    period: int = 1,
    seed: int = 0,
    spread: float = 1.0,
    *,
    table: np.ndarray | None = None,
    drafter: str | None = None,
    drafter_cfg: Any = None,
    drafter_weights: Any = None,
    eos_ids: tuple[int, ...] = (),
    **config: Any,
) -> Params:
    """Random normal logits with standard deviation ``spread``, or ``table`` [period, vocab, vocab]."""
    if table is None:
        table = spread * np.random.default_rng(seed).standard_normal((period, vocab, vocab))
    cfg = Config(vocab_size=vocab, period=period, **config)
    meta = Meta(
        family="specjax.testing.micro",
        target_cfg=cfg,
        drafter=drafter,
        drafter_cfg=drafter_cfg,
        eos_ids=eos_ids,
        name="micro",
    )
    return Params(Weights(jnp.asarray(table, jnp.float32)), drafter_weights, meta)


def config(hf: Mapping[str, Any]) -> Config:
    """Config from its own fields as a dict."""
    return Config(**hf)


def abstract(cfg: Config) -> Weights:
    """Weight struct of ArraySpecs."""
    shape = (cfg.period, cfg.vocab_size, cfg.vocab_size)
    return Weights(ArraySpec(shape, (None, None, "vocab"), ("table",)))


def init_cache(cfg: Config, rows: int, slots: int, q_max: int, dtype: Any) -> tuple[()]:
    """No cache."""
    del cfg, rows, slots, q_max, dtype
    return ()


def forward(
    p: Weights,
    cfg: Config,
    tokens: Int[Array, "B Q"],
    pos: Int[Array, "B Q"],
    valid: Int[Array, " B"],
    cache: tuple[()],
    taps: TapSpec,
    mode: Mode,
) -> TargetOut:
    """The hidden state is the row of logits itself."""
    del valid, mode
    hidden = p.table[pos % cfg.period, tokens]
    return TargetOut(hidden, dict.fromkeys(taps.taps, hidden), cache)


def commit(cfg: Config, cache: tuple[()], emitted: Int[Array, " B"]) -> tuple[()]:
    """No cache."""
    del cfg, emitted
    return cache


def unembed(p: Weights, cfg: Config, hidden: Float[Array, "*N D"]) -> Float[Array, "*N V"]:
    """The hidden state, -inf in columns of padding."""
    del p
    if not cfg.used:
        return hidden.astype(jnp.float32)
    return jnp.where(jnp.arange(cfg.vocab_size) < cfg.used, hidden.astype(jnp.float32), -jnp.inf)


def shared(p: Weights, cfg: Config) -> Shared:
    """The first table as embedding, the identity as head."""
    return Shared(p.table[0], jnp.eye(cfg.vocab_size, dtype=p.table.dtype))


def kv_view(p: Weights, cfg: Config, cache: tuple[()], kind: str) -> KVView:
    """There are no keys."""
    raise ValueError(f"the table target has no {kind!r} layers")


def min_resume(cfg: Config, high_water: int) -> int:
    """Any length."""
    del cfg, high_water
    return 1
