"""The Gemma 4 assistant: a few small layers that have no keys and values of their own and read the target's.

A draft is made of the pair (token, hidden state): the anchor and the target's state after its final norm at the
position before it, for the first; then the last draft and what the assistant itself made of its last output. Every
layer attends to the keys and values of the target's last layer of the same kind, full or sliding, as far as they are
committed. Nothing is written anywhere, so all drafts of a round stand at one position and see the same.

The state that is kept is one hidden state per row: prefilling, resuming and rejecting cost nothing.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from specjax.drafters import assistant_model as model
from specjax.drafters.assistant_config import Config, checked, config, tiny
from specjax.drafters.assistant_model import Weights, abstract
from specjax.drafters.pick import greedy, pick, sampling
from specjax.layers.loop import scan_short
from specjax.types import AbsorbIn, Ctx, Proposal, Shared, TapSpec

__all__ = [
    "NEEDS", "Config", "State", "Weights", "absorb", "abstract", "checked", "config", "draft", "init_state",
    "min_resume", "tiny", "varies",
]  # fmt: skip


@struct.dataclass
class State:
    """The target's hidden state at the last position that was absorbed."""

    feedback: Float[Array, "B W"]


def varies(cfg: Config) -> bool:
    """Always k tokens."""
    del cfg
    return False


def NEEDS(cfg: Config) -> TapSpec:
    """The target's state after its final norm, and a view of its keys and values."""
    del cfg
    return TapSpec(hidden=True, kv=True)


def init_state(cfg: Config, rows: int, slots: int, q_max: int, dtype: Any) -> State:
    """Nothing absorbed."""
    del slots, q_max
    return State(jnp.zeros((rows, cfg.target_size), dtype))


def absorb(p: Weights, shared: Shared, cfg: Config, dstate: State, block: AbsorbIn) -> State:
    """The hidden state of position ``keep - 1`` of a block; rows that keep nothing hold on to theirs."""
    del p, shared, cfg
    hidden = jnp.asarray(block.hidden, dstate.feedback.dtype)
    last = jnp.take_along_axis(hidden, jnp.maximum(block.keep - 1, 0)[:, None, None], 1)[:, 0]
    return State(jnp.where(block.keep[:, None] > 0, last, dstate.feedback))


def draft(
    p: Weights, shared: Shared, cfg: Config, k: int, dstate: State, ctx: Ctx, keys: Array | None
) -> tuple[Proposal, State]:
    """``k`` tokens per row in k passes; with probabilistic drafting also the distributions they were drawn from."""
    keys = keys if sampling(cfg.drafting, keys) else None
    seen = model.look(p, cfg, ctx)

    def one(carry, step):
        token, state = carry
        normed = model.run(p, cfg, shared, seen, token, state)
        if greedy(keys, ctx.temperature):
            token, q = model.best(p, cfg, normed), None
        else:
            token, q = pick(model.logits(p, cfg, normed), keys, step, ctx.temperature)
        return (token, model.recycled(p, normed).astype(state.dtype)), (token, q)

    carry = (ctx.anchor, dstate.feedback)
    _, drafted = scan_short(one, carry, jnp.arange(k, dtype=jnp.int32))
    tokens, q = jax.tree.map(lambda x: x.swapaxes(0, 1), drafted)
    count = jnp.full(tokens.shape[:1], k, jnp.int32)
    if q is None or ctx.temperature is None:
        return Proposal(tokens, count), dstate
    return Proposal(tokens, count, q=q, q_ids=model.target_ids(cfg), point=ctx.temperature <= 0), dstate


def min_resume(cfg: Config, high_water: int) -> int:
    """Any length: the position before the anchor is always fed again."""
    del cfg, high_water
    return 1
