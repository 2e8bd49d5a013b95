"""The Target contract: what a family module must provide.

A target is a *module of functions* (or any object with these attributes), found through
:mod:`specjax.registry`. A family file holds, in this order: config, weight structs with ``abstract``,
``init_cache``, ``forward``, ``unembed``, ``shared``, ``kv_view``.

Two more, where checkpoints hold more than the text model or name it otherwise: ``PREFIXES`` maps beginnings of
tensor names in a file to what :func:`Target.abstract` calls them; ``skipped(cfg)`` maps beginnings of names
(after that) which are not read to the reason. ``TIED = True`` where head and embedding are one array unless the
config says otherwise. ``best(p, cfg, hidden, lse)``: what :func:`specjax.layers.head.best` gives of the logits, where
that can be had without keeping them.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from jaxtyping import Array, Float, Int

from specjax.types import KVView, Mode, Shared, TapSpec, TargetOut


class TargetConfig(Protocol):
    """Fields every family's frozen config has; families add their own."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    heads: int  # query heads of a layer: the rows of its attention scores
    mlp_size: int  # widest feed-forward activation of a position
    max_positions: int


class Target(Protocol):
    """Functions of a target family. All but ``config`` and ``abstract`` are traced."""

    def config(self, hf: Mapping[str, Any]) -> TargetConfig:
        """Frozen config from a Hugging Face ``config.json``; raises on what it does not understand."""
        ...

    def abstract(self, cfg: Any) -> Any:
        """The weight struct with an :class:`~specjax.types.ArraySpec` at every leaf."""
        ...

    def init_cache(self, cfg: Any, rows: int, slots: int, q_max: int, dtype: Any) -> Any:
        """Empty cache for ``rows`` sequences of at most ``slots`` positions, blocks of <= ``q_max``."""
        ...

    def forward(
        self,
        p: Any,
        cfg: Any,
        tokens: Int[Array, "B Q"],
        pos: Int[Array, "B Q"],
        valid: Int[Array, " B"],
        cache: Any,
        taps: TapSpec,
        mode: Mode,
    ) -> TargetOut:
        """Run Q consecutive positions per row.

        ``pos`` is contiguous within a row. Rows of the block at or beyond ``valid`` are padding.
        ``extend`` commits every valid row at once; ``verify`` leaves them undecided until ``commit``.
        """
        ...

    def commit(self, cfg: Any, cache: Any, emitted: Int[Array, " B"]) -> Any:
        """Keep the first ``emitted`` rows of the last verified block (0 for finished rows)."""
        ...

    def unembed(self, p: Any, cfg: Any, hidden: Float[Array, "*N D"]) -> Float[Array, "*N V"]:
        """float32 logits; padded vocabulary columns are -inf."""
        ...

    def shared(self, p: Any, cfg: Any) -> Shared:
        """Embedding and head lent to drafters."""
        ...

    def kv_view(self, p: Any, cfg: Any, cache: Any, kind: str) -> KVView:
        """Keys and values of the last non-shared layer of ``kind`` ("full" or "sliding")."""
        ...

    def min_resume(self, cfg: Any, high_water: int) -> int:
        """Earliest length a cache that has held ``high_water`` positions can be cut back to."""
        ...
