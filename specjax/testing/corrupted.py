"""Any drafter with its mouth taken over: it runs and its state evolves, but what is proposed is a script.

A drafter with random weights is hardly ever right, so its state sees next to nothing but first rejections.
``CORRUPTED`` runs the real one and replaces its tokens by a told continuation, spoiled on purpose: the
state then goes through every pattern of acceptance, and how many drafts are kept is known beforehand.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool

from specjax import registry
from specjax.testing import drafters
from specjax.testing.told import TOLD, Telling, ToldConfig, telling
from specjax.types import AbsorbIn, Ctx, Params, Proposal, Shared, TapSpec

OWN = "OWN"  # the mode in which the drafter speaks for itself


@dataclasses.dataclass(frozen=True)
class CorruptedConfig:
    """Frozen config: the drafter that runs, its config, and the shape of the script."""

    name: str
    inner: Any
    told: ToldConfig

    @property
    def k(self) -> int:
        return self.inner.k

    @property
    def module(self) -> Any:
        return registry.drafter(self.name)


@struct.dataclass
class Script:
    """Weights: the drafter's own, what to say, and for which texts it speaks for itself."""

    inner: Any
    telling: Telling
    own: Bool[Array, " N"]


@dataclasses.dataclass(frozen=True)
class Corrupted:
    """A drafter in the sense of :class:`specjax.drafters.base.Drafter`."""

    Config = CorruptedConfig  # not a field: the registry reads it to rebuild configs

    def config(self, settings: Mapping[str, Any], target_cfg: Any) -> CorruptedConfig:
        """Config from its own fields as a dict."""
        return CorruptedConfig(**settings)

    def varies(self, cfg: CorruptedConfig) -> bool:
        """Never, so that only one width is compiled."""
        return False

    def NEEDS(self, cfg: CorruptedConfig) -> TapSpec:
        """What the drafter needs."""
        return cfg.module.NEEDS(cfg.inner)

    def abstract(self, cfg: CorruptedConfig) -> Any:
        """Not loadable: weights are made by :func:`corrupted`."""
        raise TypeError("a corrupted drafter is made by testing.corrupted and has no files")

    def init_state(self, cfg: CorruptedConfig, rows: int, slots: int, q_max: int, dtype: Any) -> Any:
        """The drafter's."""
        return cfg.module.init_state(cfg.inner, rows, slots, q_max, dtype)

    def draft(
        self, p: Script, shared: Shared, cfg: CorruptedConfig, k: int, dstate: Any, ctx: Ctx, keys: Any
    ) -> tuple[Proposal, Any]:
        """The script's tokens, or the drafter's own without their probabilities; the drafter's new state."""
        mine, dstate = cfg.module.draft(p.inner, shared, cfg.inner, k, dstate, ctx, keys)
        told, _ = TOLD.draft(p.telling, shared, cfg.told, k, (), ctx, keys)
        which = drafters.follow(p.telling.texts, p.telling.prompts, p.telling.ends, k, ctx)[1]
        own = p.own[which]
        tokens = jnp.where(own[:, None], mine.tokens, told.tokens)
        return Proposal(tokens, jnp.where(own, mine.count, told.count)), dstate

    def absorb(self, p: Script, shared: Shared, cfg: CorruptedConfig, dstate: Any, block: AbsorbIn) -> Any:
        """The drafter's."""
        return cfg.module.absorb(p.inner, shared, cfg.inner, dstate, block)

    def max_k(self, cfg: CorruptedConfig) -> int:
        """The drafter's limit, or what scripts are tried with."""
        limit = getattr(cfg.module, "max_k", None)
        return limit(cfg.inner) if limit else 8

    def min_resume(self, cfg: CorruptedConfig, high_water: int) -> int:
        """The drafter's."""
        return cfg.module.min_resume(cfg.inner, high_water)


CORRUPTED = Corrupted()


def corrupted(
    params: Params,
    known: Iterable[tuple[Sequence[int], Sequence[int]]],
    modes: Sequence[str],
    size: int = 64,
    texts: int = 8,
) -> Params:
    """``params`` with their drafter scripted: per (prompt, continuation) a mode of ``telling``, or ``OWN``."""
    own = np.zeros(texts, bool)
    own[: len(modes)] = [mode == OWN for mode in modes]
    script = telling(known, ["ALWAYS_RIGHT" if mode == OWN else mode for mode in modes], size, texts)
    meta, vocab = params.meta, params.meta.target_cfg.vocab_size
    inner = meta.drafter_cfg
    cfg = CorruptedConfig(str(meta.drafter), inner, ToldConfig(inner.k, vocab, texts, size))
    meta = dataclasses.replace(meta, drafter="specjax.testing:CORRUPTED", drafter_cfg=cfg)
    return Params(params.target, Script(params.drafter, script, jnp.asarray(own)), meta)
