"""A scripted drafter whose script is its weights: one compiled program serves every misbehaviour.

``TOLD`` does what the drafters in capitals do, chosen per prompt. ``TOLD_VARIABLE`` also declares a varying
number of drafts, so that narrower widths are compiled. ``WITNESS`` keeps a state: it writes down everything
it absorbs and goes silent for good when that is not exactly what precedes the anchor.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax.testing import drafters
from specjax.types import AbsorbIn, ArraySpec, Ctx, Proposal, Shared, TapSpec

MODES = {
    "ALWAYS_RIGHT": drafters.ALWAYS_RIGHT,
    "ALWAYS_WRONG": drafters.ALWAYS_WRONG,
    "EVERY_THIRD_WRONG": drafters.EVERY_THIRD_WRONG,
    "RANDOM_COUNT": drafters.RANDOM_COUNT,
    "STOP_INSIDE": drafters.STOP_INSIDE,
}


@dataclasses.dataclass(frozen=True)
class ToldConfig:
    """Frozen config: drafts per round, vocabulary, number of texts and their longest length."""

    k: int
    vocab: int
    texts: int
    size: int


@struct.dataclass
class Telling:
    """What each known prompt is followed by, and what to make of it."""

    texts: Int[Array, "N L"]  # prompt + continuation
    prompts: Int[Array, " N"]  # length of the prompt; one that is longer than any row fits none
    ends: Int[Array, " N"]  # length of both
    mode: Int[Array, " N"]  # index into MODES
    stop: Int[Array, " N"]  # the id STOP_INSIDE puts at index ``at`` of every proposal
    at: Int[Array, " N"]


@struct.dataclass
class Notes:
    """State of ``WITNESS``: what was absorbed at each position, and whether all of it was in order."""

    tokens: Int[Array, "B S"]
    following: Int[Array, "B S"]
    feature: Float[Array, "B S"]  # sum of the hidden state
    tap: Float[Array, "B S"]  # sum of the embedding
    count: Int[Array, " B"]
    torn: Bool[Array, " B"]  # a block began beyond ``count``


def telling(
    known: Iterable[tuple[Sequence[int], Sequence[int]]],
    modes: str | Sequence[str],
    size: int,
    texts: int,
    stop: int = 0,
    at: int = 0,
) -> Telling:
    """Weights from (prompt, continuation) pairs, padded to ``texts`` texts of ``size`` tokens.

    ``modes``: a key of ``MODES`` for all prompts, or one for each.
    """
    pairs = list(known)
    names = [modes] * len(pairs) if isinstance(modes, str) else list(modes)
    table, lengths = np.zeros((texts, size), np.int32), np.full((2, texts), size, np.int32)
    mode = np.zeros(texts, np.int32)
    for i, ((prompt, rest), name) in enumerate(zip(pairs, names, strict=True)):
        table[i, : len(prompt) + len(rest)] = [*prompt, *rest]
        lengths[:, i] = len(prompt), len(prompt) + len(rest)
        mode[i] = list(MODES).index(name)
    same = lambda value: jnp.full((texts,), value, jnp.int32)  # noqa: E731
    arrays = [jnp.asarray(x) for x in (table, lengths[0], lengths[1], mode)]
    return Telling(arrays[0], arrays[1], arrays[2], arrays[3], same(stop), same(at))


@dataclasses.dataclass(frozen=True)
class _Spoiling:
    """What the spoilers read of a script, with one value per row."""

    vocab: int
    stop: Int[Array, "B 1"]
    at: Int[Array, "B 1"]


@dataclasses.dataclass(frozen=True)
class Told:
    """A drafter in the sense of :class:`specjax.drafters.base.Drafter`."""

    variable: bool = False
    witness: bool = False
    Config = ToldConfig  # not a field: the registry reads it to rebuild configs

    def config(self, hf: Mapping[str, Any], target_cfg: Any) -> ToldConfig:
        """Config from its own fields as a dict."""
        return ToldConfig(**{"vocab": target_cfg.vocab_size, **hf})

    def varies(self, cfg: Any) -> bool:
        """As declared."""
        return self.variable

    def NEEDS(self, cfg: ToldConfig) -> TapSpec:
        """The hidden state and the embedding for ``WITNESS``, else nothing."""
        return TapSpec(taps=(0,), hidden=True) if self.witness else TapSpec()

    def abstract(self, cfg: ToldConfig) -> Telling:
        """Zeros of the right shapes."""
        one = ArraySpec((cfg.texts,), (None,), init="zeros")
        return Telling(ArraySpec((cfg.texts, cfg.size), (None, None), init="zeros"), *([one] * 5))

    def init_state(self, cfg: ToldConfig, rows: int, slots: int, q_max: int, dtype: Any) -> Any:
        """Empty notes."""
        if not self.witness:
            return ()
        ints = [jnp.zeros((rows, slots), jnp.int32) for _ in range(2)]
        floats = [jnp.zeros((rows, slots), jnp.float32) for _ in range(2)]
        return Notes(
            ints[0], ints[1], floats[0], floats[1], jnp.zeros((rows,), jnp.int32), jnp.zeros((rows,), bool)
        )

    def draft(
        self, p: Telling, shared: Shared, cfg: ToldConfig, k: int, dstate: Any, ctx: Ctx, keys: Any
    ) -> tuple[Proposal, Any]:
        """The continuation, spoiled as the row's text wants it."""
        row, which = drafters.follow(p.texts, p.prompts, p.ends, k, ctx)
        cfg_of_row = _Spoiling(cfg.vocab, p.stop[which][:, None], p.at[which][:, None])
        spoiled = [mode.spoil(cfg_of_row, row) for mode in MODES.values()]
        mode = p.mode[which]
        tokens = jnp.stack([t for t, _ in spoiled])[mode, jnp.arange(mode.shape[0])]
        count = jnp.stack([c for _, c in spoiled])[mode, jnp.arange(mode.shape[0])]
        if self.witness:
            count = jnp.where(in_order(dstate, ctx.tokens, ctx.length), count, 0)
        return Proposal(tokens.astype(jnp.int32), count.astype(jnp.int32)), dstate

    def absorb(self, p: Telling, shared: Shared, cfg: ToldConfig, dstate: Any, block: AbsorbIn) -> Any:
        """Write down what is kept."""
        if not self.witness:
            return dstate
        q, size = block.tokens.shape[1], dstate.tokens.shape[1]
        kept = jnp.arange(q) < block.keep[:, None]
        rows, index = jnp.arange(kept.shape[0])[:, None], jnp.where(kept, block.pos, size)
        put = lambda old, new: old.at[rows, index].set(new.astype(old.dtype), mode="drop")  # noqa: E731
        begin, any_kept = block.pos[:, 0], block.keep > 0
        return Notes(
            put(dstate.tokens, block.tokens),
            put(dstate.following, block.next_tokens),
            put(dstate.feature, jnp.sum(block.hidden, -1)),
            put(dstate.tap, jnp.sum(block.taps[0], -1)),
            jnp.where(any_kept, begin + block.keep, dstate.count),
            dstate.torn | (any_kept & (begin > dstate.count)),
        )

    def min_resume(self, cfg: ToldConfig, high_water: int) -> int:
        """Any length."""
        return 1


def in_order(notes: Notes, tokens: Int[Array, "B T"], length: Int[Array, " B"]) -> Bool[Array, " B"]:
    """Whether exactly the positions before the anchor were absorbed, each with its token and successor."""
    size = tokens.shape[1]
    before = jnp.arange(size) < length[:, None] - 1
    after = jnp.roll(tokens, -1, 1)
    same = (notes.tokens[:, :size] == tokens) & (notes.following[:, :size] == after)
    return (same | ~before).all(1) & (notes.count == length - 1) & ~notes.torn


TOLD = Told()
TOLD_VARIABLE = Told(variable=True)
WITNESS = Told(witness=True)
