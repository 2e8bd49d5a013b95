"""EAGLE-3: one small decoder layer that continues the target's own hidden states.

A row of the drafter takes the pair (feature of position p, token at p + 1) and predicts the token at p + 2; its
place is p. The feature is made of several of the target's residual streams; while drafting, where there are none,
it is the drafter's own last output. Its keys and values lie in its own cache, one slot per position of the
target: what was written there while drafting is overwritten by :func:`absorb`, which has the true features.

``absorb`` stops before the head and keeps the state of the last committed pair; ``draft`` draws the first token
from it and runs the layer once for each further one, k - 1 times.

Paper: EAGLE-3, Li et al., arXiv 2503.01840. The 3.1 variant (norms per tap, recycled state normed): arXiv
2605.09992.
"""

import functools
from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from specjax.core.cache import DenseKV, RingKV
from specjax.drafters import eagle3_model as model, serial
from specjax.drafters.eagle3_config import Config, config, tiny
from specjax.drafters.eagle3_model import Weights, abstract, ready
from specjax.drafters.pick import sampling
from specjax.types import AbsorbIn, Ctx, Proposal, Shared, TapSpec

__all__ = [
    "NEEDS", "Config", "State", "Weights", "absorb", "abstract", "config", "draft", "init_state", "min_resume",
    "ready", "tiny", "varies",
]  # fmt: skip


@struct.dataclass
class State:
    """Caches of the layers, and the output for the last pair that was absorbed."""

    cache: tuple[DenseKV | RingKV, ...]
    feedback: Float[Array, "B D"]


def varies(cfg: Config) -> bool:
    """Always k tokens."""
    del cfg
    return False


def NEEDS(cfg: Config) -> TapSpec:
    """The tapped residual streams, or the target's final state."""
    return TapSpec(cfg.taps, hidden=not cfg.taps)


def init_state(cfg: Config, rows: int, slots: int, q_max: int, dtype: Any) -> State:
    """Nothing absorbed."""
    return State(
        model.create_cache(cfg, rows, slots, q_max, dtype), jnp.zeros((rows, cfg.body.hidden_size), dtype)
    )


def absorb(p: Weights, shared: Shared, cfg: Config, dstate: State, block: AbsorbIn) -> State:
    """Run over the pairs of a block: their keys and values, and the state of pair ``keep - 1``.

    In a verified block the pairs at or beyond ``keep`` are written too, at slots that nobody sees before they are
    written again.
    """
    feature = model.fuse(p, cfg, block)
    embedded = serial.embed(p.embed, shared.embed, block.next_tokens, p.norm.dtype)
    out, cache = model.run(p, cfg, embedded, feature, serial.absorbed(block), dstate.cache)
    return State(cache, serial.kept(block, model.recycled(p, cfg, out), dstate.feedback))


def draft(
    p: Weights, shared: Shared, cfg: Config, k: int, dstate: State, ctx: Ctx, keys: Array | None
) -> tuple[Proposal, State]:
    """``k`` tokens per row; with probabilistic drafting also the distributions they were drawn from."""

    def advance(token, state, pos, cache):
        embedded = serial.embed(p.embed, shared.embed, token[:, None], p.norm.dtype)
        feature = state[:, None].astype(p.norm.dtype)
        out, cache = model.run(p, cfg, embedded, feature, serial.drafted(pos), cache)
        return model.recycled(p, cfg, out).astype(state.dtype), cache

    keys = keys if sampling(cfg.drafting, keys) else None
    table = model.head(p, shared, cfg)
    logits, best = (functools.partial(f, p, cfg, table) for f in (model.scores, model.best))
    ids = model.target_ids(p, cfg)
    proposal, cache = serial.draft(k, dstate.feedback, dstate.cache, logits, advance, ids, ctx, keys, best)
    return proposal, State(cache, dstate.feedback)


def min_resume(cfg: Config, high_water: int) -> int:
    """Any length; with a window, only where it stands."""
    return 1 if all(w is None for w in cfg.body.windows) or cfg.mla is not None else max(1, high_water - 1)
