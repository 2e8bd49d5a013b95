"""The Drafter contract: what a drafter module must provide.

A drafter proposes tokens and may keep a state of its own. It can only cost speed: whatever it proposes,
the target decides. Found through :mod:`specjax.registry`, or passed to ``load`` as a module.
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

    #: Proposal length varies from round to round: the loop then compiles narrower verify widths.
    VARIABLE: bool
    #: Largest k the drafter can serve, given its config; None = any.

    def config(self, hf: Mapping[str, Any], target_cfg: Any) -> DrafterConfig:
        """Frozen config; checks compatibility with the target here, before anything compiles."""
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
