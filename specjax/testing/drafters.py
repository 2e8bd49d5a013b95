"""Drafters that are told the right continuation and make something of it: the strongest test of the loop.

The reference is part of the frozen config, as tokens. A row is recognised by its prompt, so the drafters
work in batches, with rows in any order and when a row is refilled with another prompt.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from specjax.types import AbsorbIn, Ctx, Proposal, Shared, TapSpec


@dataclasses.dataclass(frozen=True)
class Script:
    """Frozen config: what each known prompt is followed by.

    ``known``: (prompt, continuation) pairs of token ids. A row whose prompt is not among them gets no
    drafts; of several prompts that fit the longest counts. ``stop`` and ``at``: the id that
    ``STOP_INSIDE`` puts at index ``at`` of every proposal.
    """

    k: int
    vocab: int
    known: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    stop: int = 0
    at: int = 0


def script(
    k: int, vocab: int, known: Iterable[tuple[Sequence[int], Sequence[int]]], stop: int = 0, at: int = 0
) -> Script:
    """Script from any sequences of (prompt, continuation), e.g. the output of plain decoding."""
    ints = lambda ids: tuple(int(i) for i in ids)  # noqa: E731
    return Script(k, vocab, tuple((ints(prompt), ints(rest)) for prompt, rest in known), stop, at)


@dataclasses.dataclass(frozen=True)
class Row:
    """What a spoiler sees, all [B K] but ``length`` and ``anchor`` [B]."""

    right: Int[Array, "B K"]
    count: Int[Array, " B"]
    index: Int[Array, "B K"]  # place in the continuation
    length: Int[Array, " B"]
    anchor: Int[Array, " B"]


Spoil = Callable[[Script, Row], tuple[Array, Array]]  # -> tokens [B K], count [B]


@dataclasses.dataclass(frozen=True)
class Scripted:
    """A drafter in the sense of :class:`specjax.drafters.base.Drafter`: right tokens, then ``spoil``."""

    spoil: Spoil
    variable: bool = False
    Config = Script  # not a field: the registry reads it to rebuild configs

    def config(self, hf: Mapping[str, Any], target_cfg: Any) -> Script:
        """Script from its own fields as a dict."""
        return script(**{"vocab": target_cfg.vocab_size, **hf})

    def varies(self, cfg: Any) -> bool:
        """As declared."""
        return self.variable

    def NEEDS(self, cfg: Script) -> TapSpec:
        """Nothing."""
        return TapSpec()

    def abstract(self, cfg: Script) -> None:
        """No weights."""

    def init_state(self, cfg: Script, rows: int, slots: int, q_max: int, dtype: Any) -> tuple[()]:
        """No state."""
        return ()

    def draft(
        self, p: None, shared: Shared | None, cfg: Script, k: int, dstate: tuple[()], ctx: Ctx, keys: Any
    ) -> tuple[Proposal, tuple[()]]:
        """The spoiled continuation; fewer than k tokens where the reference ends."""
        tokens, count = self.spoil(cfg, continuation(cfg, k, ctx))
        return Proposal(tokens.astype(jnp.int32), count.astype(jnp.int32)), dstate

    def absorb(
        self, p: None, shared: Shared | None, cfg: Script, dstate: tuple[()], block: AbsorbIn
    ) -> tuple[()]:
        """No state."""
        return dstate

    def min_resume(self, cfg: Script, high_water: int) -> int:
        """Any length."""
        return 1


def continuation(cfg: Script, k: int, ctx: Ctx) -> Row:
    """The next ``k`` reference tokens of each row, found by its prompt."""
    table, prompts, ends = (jnp.asarray(x) for x in _table(cfg, k))
    return follow(table, prompts, ends, k, ctx)[0]


def follow(
    texts: Int[Array, "N L"], prompts: Int[Array, " N"], ends: Int[Array, " N"], k: int, ctx: Ctx
) -> tuple[Row, Int[Array, " B"]]:
    """The next ``k`` tokens of each row and the index of the text it follows.

    ``texts`` are prompts with their continuations, ``prompts`` and ``ends`` the lengths of both; the texts
    are padded by at least ``k``.
    """
    size = min(texts.shape[1], ctx.tokens.shape[1])
    inside = np.arange(size) < prompts[:, None]
    same = (ctx.tokens[:, None, :size] == texts[:, :size]) | ~inside
    fits = same.all(-1) & (prompts <= ctx.length[:, None])
    best = jnp.argmax(jnp.where(fits, prompts, 0), axis=1)
    length = ctx.length[:, None]
    at = length + jnp.arange(k, dtype=jnp.int32)
    right = texts[best[:, None], jnp.minimum(at, texts.shape[1] - 1)]
    left = jnp.clip(ends[best] - ctx.length, 0, k)
    count = jnp.where(fits.any(-1), left, 0)
    return Row(right, count, at - prompts[best][:, None], ctx.length, ctx.anchor), best


def _table(cfg: Script, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Prompt + continuation padded to one length, prompt lengths, total lengths."""
    if not cfg.known or any(not prompt for prompt, _ in cfg.known):
        raise ValueError("a script needs at least one prompt, and no empty ones")
    texts = [prompt + rest for prompt, rest in cfg.known]
    table = np.zeros((len(texts), max(map(len, texts)) + k), np.int32)
    for row, text in zip(table, texts, strict=True):
        row[: len(text)] = text
    return (
        table,
        np.array([len(p) for p, _ in cfg.known], np.int32),
        np.array(list(map(len, texts)), np.int32),
    )


def _wrong(cfg: Script, right: Array) -> Array:
    return (right + 1) % cfg.vocab


def _always_right(cfg: Script, row: Row):
    return row.right, row.count


def _always_wrong(cfg: Script, row: Row):
    return _wrong(cfg, row.right), row.count


def _every_third_wrong(cfg: Script, row: Row):
    return jnp.where(row.index % 3 == 2, _wrong(cfg, row.right), row.right), row.count


def _random_count(cfg: Script, row: Row):
    """A count of 0..k that depends on the row's own length and anchor only."""
    mixed = row.length.astype(jnp.uint32) * jnp.uint32(2654435761) + row.anchor.astype(jnp.uint32)
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(2246822519)
    draw = ((mixed >> 13) % jnp.uint32(row.right.shape[1] + 1)).astype(jnp.int32)
    return row.right, jnp.minimum(row.count, draw)


def _stop_inside(cfg: Script, row: Row):
    here = jnp.arange(row.right.shape[1]) == cfg.at
    return jnp.where(here, cfg.stop, row.right), row.count


ALWAYS_RIGHT = Scripted(_always_right)
ALWAYS_WRONG = Scripted(_always_wrong)
EVERY_THIRD_WRONG = Scripted(_every_third_wrong)
RANDOM_COUNT = Scripted(_random_count, variable=True)
STOP_INSIDE = Scripted(_stop_inside)
