"""The Drafter contract: what a drafter module must provide.

A drafter proposes tokens and may keep a state of its own. It can only cost speed: whatever it proposes,
the target decides. Found through :mod:`specjax.registry`, or passed to ``load`` as a module.

Optional functions: ``default`` (see below); ``max_k(cfg)``, the most drafts a round can have, for drafters with
a limit; ``from_json(data, target_cfg)`` when the config cannot be rebuilt field by field; ``checked(cfg, target_cfg)``,
which gives a config back that fits the target and refuses another; ``confident(cfg)``, whether proposals carry a
confidence: per draft the chance that it is kept if those before it are, made without looking at the draft itself;
``adapted(cfg, settings, eos_ids)``, a user's settings as fields of a config, where they are not called alike.
``INSIDE = True`` says that the weights are part of the target's own files, so that the method's name is enough to ask
for it.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from jaxtyping import Array

from specjax.types import AbsorbIn, Ctx, Proposal, Shared, TapSpec


class DrafterConfig(Protocol):
    """Fields every drafter's frozen config has."""

    k: int  # default number of drafted tokens per round


class Drafter(Protocol):
    """Functions of a drafter. ``config``, ``NEEDS`` and ``abstract`` run on the host."""

    #: The frozen config class, which a saved checkpoint rebuilds from JSON.
    Config: type

    def config(self, settings: Mapping[str, Any], target_cfg: Any) -> DrafterConfig:
        """Frozen config; checks compatibility with the target here, before anything compiles.

        ``settings`` come from :mod:`specjax.checkpoints.formats` (drafters with weights), from a speculative
        config with vLLM's keys (ours without weights), or are the user's ``drafter_config`` (somebody else's).
        """
        ...

    def default(self, platform: str) -> DrafterConfig:
        """Settings when none are given, for a jax backend name. Only drafters without weights have this."""
        ...

    def tiny(self, target_cfg: Any) -> DrafterConfig:
        """A small config for the given target: what tests and examples run with random weights."""
        ...

    def varies(self, cfg: Any) -> bool:
        """Whether the number of proposals changes from round to round: the loop then compiles narrower
        verifications beside the widest."""
        ...

    def NEEDS(self, cfg: Any) -> TapSpec:
        """What the target must expose."""
        ...

    def abstract(self, cfg: Any) -> Any:
        """Weight struct of ArraySpec leaves, or None for a drafter without weights."""
        ...

    def init_state(self, cfg: Any, rows: int, slots: int, q_max: int, dtype: Any) -> Any:
        """Empty state; ``()`` for a drafter that keeps none."""
        ...

    def draft(
        self, p: Any, shared: Shared, cfg: Any, k: int, dstate: Any, ctx: Ctx, keys: Array | None
    ) -> tuple[Proposal, Any]:
        """Propose up to ``k`` tokens per row. ``keys`` is a typed key array [B], None when greedy."""
        ...

    def absorb(self, p: Any, shared: Shared, cfg: Any, dstate: Any, block: AbsorbIn) -> Any:
        """Take in target features of committed positions: the one place they enter a drafter.

        Called once per prefill chunk and once per round. ``keep = 0`` must change nothing.
        """
        ...

    def min_resume(self, cfg: Any, high_water: int) -> int:
        """Earliest length the state can be cut back to (1 when any)."""
        ...
