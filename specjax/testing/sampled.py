"""Drafters with a known law, drawn from or arg-max, and the target as its own drafter."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specjax import registry
from specjax.types import AbsorbIn, Ctx, Proposal, Shared, TapSpec


class _Stateless:
    """The parts of the contract that a drafter without state and needs shares."""

    def varies(self, cfg: Any) -> bool:
        """Always k tokens."""
        return False

    def NEEDS(self, cfg: Any) -> TapSpec:
        """Nothing."""
        return TapSpec()

    def init_state(self, cfg: Any, rows: int, slots: int, q_max: int, dtype: Any) -> tuple[()]:
        """No state."""
        return ()

    def absorb(
        self, p: Any, shared: Shared | None, cfg: Any, dstate: tuple[()], block: AbsorbIn
    ) -> tuple[()]:
        """No state."""
        return dstate

    def min_resume(self, cfg: Any, high_water: int) -> int:
        """Any length."""
        return 1


@dataclasses.dataclass(frozen=True)
class Bigram:
    """Frozen config: ``table[previous token]`` are the probabilities of the next one.

    ``ids``: the target id of each column, for a draft vocabulary of its own; empty means the same ids.
    """

    k: int
    table: tuple[tuple[float, ...], ...]
    ids: tuple[int, ...] = ()


def bigram(k: int, vocab: int, seed: int = 0, spread: float = 1.0, ids: tuple[int, ...] = ()) -> Bigram:
    """Random table: softmax of normal logits with standard deviation ``spread``, 0 being uniform."""
    rng = np.random.default_rng(seed)
    weight = np.exp(spread * rng.standard_normal((vocab, len(ids) or vocab)))
    table = weight / weight.sum(1, keepdims=True)
    return Bigram(k, tuple(tuple(map(float, row)) for row in table), ids)


def bigram_law(cfg: Bigram) -> Float[Array, "V Vq"]:
    """The float32 probabilities that are both drawn from and reported."""
    table = jnp.asarray(np.array(cfg.table, np.float32))
    return table / jnp.sum(table, 1, keepdims=True)


@dataclasses.dataclass(frozen=True)
class BigramDrafter(_Stateless):
    """Drafts each token from the bigram table, given the one before it. All arg-max when decoding is greedy.

    ``kind``: "sampled" draws and reports q. "point" takes the arg-max and reports nothing. "mixed" is a
    point where the anchor is even, and says which rows are. "liar" takes the arg-max and reports q all the
    same, which a test must notice.
    """

    kind: Literal["sampled", "point", "mixed", "liar"] = "sampled"
    Config = Bigram  # not a field: the registry reads it to rebuild configs

    def config(self, hf: Mapping[str, Any], target_cfg: Any) -> Bigram:
        """Arguments of :func:`bigram` as a dict."""
        return bigram(**{"vocab": target_cfg.vocab_size, **hf})

    def abstract(self, cfg: Bigram) -> None:
        """No weights: the table is part of the config."""

    def draft(
        self,
        p: None,
        shared: Shared | None,
        cfg: Bigram,
        k: int,
        dstate: tuple[()],
        ctx: Ctx,
        keys: Array | None,
    ) -> tuple[Proposal, tuple[()]]:
        """k drafts per row. ``q`` is [B K V], or [B K Vq] with ``ids``."""
        law = bigram_law(cfg)
        ids = jnp.asarray(cfg.ids, jnp.int32) if cfg.ids else None
        point = self._point(ctx)
        last, tokens, q = ctx.anchor, [], []
        for i in range(k):
            q.append(law[last])
            best = jnp.argmax(q[-1], -1).astype(jnp.int32)
            drawn = best if keys is None else _draw(q[-1], keys, i)
            column = jnp.where(point | (self.kind == "liar"), best, drawn)
            last = column if ids is None else ids[column]
            tokens.append(last)
        rows = ctx.length.shape[0]
        drafts = jnp.stack(tokens, 1) if k else jnp.zeros((rows, 0), jnp.int32)
        count = jnp.full((rows,), k, jnp.int32)
        if keys is None or k == 0 or self.kind == "point":
            return Proposal(drafts, count), dstate
        return Proposal(drafts, count, jnp.stack(q, 1), ids, point), dstate

    def _point(self, ctx: Ctx) -> Bool[Array, " B"]:
        every = jnp.full(ctx.anchor.shape, self.kind == "point")
        return ctx.anchor % 2 == 0 if self.kind == "mixed" else every


def _draw(probs: Float[Array, "B Vq"], keys: Array, i: int) -> Int[Array, " B"]:
    step = jax.vmap(lambda key: jax.random.fold_in(key, i))(keys)
    return jax.vmap(jax.random.categorical)(step, jnp.log(probs)).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class SelfConfig:
    """Frozen config of the target as its own drafter."""

    k: int
    family: str
    target_cfg: Any


class SelfDrafter(_Stateless):
    """Greedy continuation by the target itself, recomputed from the row's tokens in every round.

    Its weights are the target's. Far too slow for use, and right by construction: every draft must be
    accepted in greedy decoding.
    """

    Config = SelfConfig

    def config(self, hf: Mapping[str, Any], target_cfg: Any) -> SelfConfig:
        """``{"k": ..., "family": ...}``."""
        return SelfConfig(target_cfg=target_cfg, **hf)

    def abstract(self, cfg: SelfConfig) -> Any:
        """The target's weight struct."""
        return registry.target(cfg.family).abstract(cfg.target_cfg)

    def draft(
        self,
        p: Any,
        shared: Shared | None,
        cfg: SelfConfig,
        k: int,
        dstate: tuple[()],
        ctx: Ctx,
        keys: Array | None,
    ) -> tuple[Proposal, tuple[()]]:
        """k arg-max tokens per row."""
        rows, size = ctx.tokens.shape
        target = registry.target(cfg.family)
        cache = target.init_cache(cfg.target_cfg, rows, size + k, max(size, 1), jnp.float32)

        def run(tokens, pos, valid, cache, pick):
            out = target.forward(p, cfg.target_cfg, tokens, pos, valid, cache, TapSpec(), "extend")
            hidden = jnp.take_along_axis(out.hidden, pick[:, None, None], 1)
            best = jnp.argmax(target.unembed(p, cfg.target_cfg, hidden)[:, 0], -1)
            return best.astype(jnp.int32), out.cache

        pos = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (rows, size))
        token, cache = run(ctx.tokens, pos, ctx.length, cache, ctx.length - 1)
        drafts, one = [token], jnp.ones((rows,), jnp.int32)
        for i in range(k - 1):
            token, cache = run(token[:, None], ctx.length[:, None] + i, one, cache, one - 1)
            drafts.append(token)
        tokens = jnp.stack(drafts, 1)[:, :k]
        return Proposal(tokens, jnp.full((rows,), k, jnp.int32)), dstate


SAMPLED = BigramDrafter()
POINT = BigramDrafter("point")
MIXED = BigramDrafter("mixed")
LIAR = BigramDrafter("liar")
SELF = SelfDrafter()
