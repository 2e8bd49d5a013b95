"""Native multi-token prediction (MTP): the layer that some models carry in their own checkpoint to draft for
themselves.

A row of the layer takes the pair (the target's hidden state after its final norm at position p, token at p + 1)
and predicts the token at p + 2; its place is p. For the tokens it drafts itself its own normed output takes the
place of the target's state, so one layer drafts as far ahead as wanted. Its keys and values lie in its own cache,
one slot per position: what was written there while drafting is overwritten by :func:`absorb`, which has the
target's states. Embedding and output head are the target's.

Papers: DeepSeek-V3 (arXiv 2412.19437); Gloeckle et al., Better & Faster Large Language Models via Multi-token
Prediction (arXiv 2404.19737). A head cut to frequent tokens: FR-Spec (arXiv 2502.14856).
"""

import functools
from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from specjax.core.cache import DenseKV
from specjax.drafters import mtp_model as model, serial
from specjax.drafters.mtp_config import Config, adapted, config, from_json, tiny
from specjax.drafters.mtp_model import Weights, abstract, ready
from specjax.drafters.pick import sampling
from specjax.types import AbsorbIn, Ctx, Proposal, Shared, TapSpec

__all__ = [
    "INSIDE", "NEEDS", "Config", "State", "Weights", "absorb", "abstract", "adapted", "config", "draft", "from_json",
    "init_state", "min_resume", "ready", "tiny", "varies",
]  # fmt: skip

#: The weights are part of the target's own files.
INSIDE = True


@struct.dataclass
class State:
    """Cache of the layer, and its normed output for the last pair that was absorbed."""

    cache: DenseKV
    feedback: Float[Array, "B D"]


def varies(cfg: Config) -> bool:
    """Always k tokens."""
    del cfg
    return False


def NEEDS(cfg: Config) -> TapSpec:
    """The target's state after its final norm, or the residual stream before that norm."""
    return TapSpec(hidden=True) if cfg.tap is None else TapSpec((cfg.tap,))


def init_state(cfg: Config, rows: int, slots: int, q_max: int, dtype: Any) -> State:
    """Nothing absorbed."""
    del q_max
    return State(model.create_cache(cfg, rows, slots, dtype), jnp.zeros((rows, cfg.model.hidden_size), dtype))


def absorb(p: Weights, shared: Shared, cfg: Config, dstate: State, block: AbsorbIn) -> State:
    """Run over the pairs of a block: their keys and values, and the state of pair ``keep - 1``.

    In a verified block the pairs at or beyond ``keep`` are written too, at slots that nobody sees before they are
    written again.
    """
    embedded = serial.embed(p.embed, shared.embed, block.next_tokens, p.norm.dtype)
    feature = jnp.asarray(block.hidden if cfg.tap is None else block.taps[cfg.tap], p.norm.dtype)
    out, cache = model.run(p, cfg, embedded, feature, serial.absorbed(block), dstate.cache)
    return State(cache, serial.kept(block, out, dstate.feedback))


def draft(
    p: Weights, shared: Shared, cfg: Config, k: int, dstate: State, ctx: Ctx, keys: Array | None
) -> tuple[Proposal, State]:
    """``k`` tokens per row; with probabilistic drafting also the distributions they were drawn from."""

    def advance(token, state, pos, cache):
        embedded = serial.embed(p.embed, shared.embed, token[:, None], p.norm.dtype)
        feature = state[:, None].astype(p.norm.dtype)
        out, cache = model.run(p, cfg, embedded, feature, serial.drafted(pos), cache)
        return out.astype(state.dtype), cache

    keys = keys if sampling(cfg.drafting, keys) else None
    table = model.head(p, shared, cfg)
    logits, best = (functools.partial(f, table) for f in (model.logits, model.best))
    ids = model.target_ids(cfg)
    proposal, cache = serial.draft(k, dstate.feedback, dstate.cache, logits, advance, ids, ctx, keys, best)
    return proposal, State(cache, dstate.feedback)


def min_resume(cfg: Config, high_water: int) -> int:
    """Any length."""
    del cfg, high_water
    return 1
