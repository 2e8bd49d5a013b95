"""Pytrees and contracts of training.

Letters beside those of :mod:`specjax.types`: ``R`` packed rows, ``T`` tokens per row, ``N`` loss rows (any of a
batch's positions that a loss is computed for), ``A`` anchors.

A *document* is one prompt with its response. Rows hold several documents one after the other; no document sees
another one, and positions start anew with each.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Protocol

import jax
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax.types import KVView, Shared, Taps, TapSpec

Source = Literal["online", "offline", "hybrid"]
Optimizer = Literal["adamw", "muon"]

#: Terms of a loss by name, with their coefficients. Their meaning: :mod:`specjax.train.terms`.
Terms = tuple[tuple[str, float], ...]


@struct.dataclass
class Batch:
    """Packed rows of token ids.

    ``doc``: index of the document within its row, -1 = padding (behind the last document). ``pos``: position within
    the document, 0 in padding. ``trained``: the token is part of an answer, so predicting it is trained. Tokens of
    padding are 0.
    """

    tokens: Int[Array, "R T"]
    doc: Int[Array, "R T"]
    pos: Int[Array, "R T"]
    trained: Bool[Array, "R T"]


@struct.dataclass
class Features:
    """What the target makes of a batch: the same values as in decoding, never differentiated.

    ``hidden``: after the final norm; the teacher's distributions are the target's head over it, and some drafters
    read it. ``taps``: residual streams by index. ``kv``: keys and values by kind of layer ("full", "sliding"), of
    the layers :meth:`specjax.targets.base.Target.kv_view` lends, in row order; None unless asked for.
    """

    hidden: Float[Array, "R T D"]
    taps: Taps
    kv: dict[str, KVView] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a drafter is trained. Frozen and hashable: it selects the compiled step and is saved with every checkpoint.

    ``rows`` packed rows of ``length`` tokens make one step's batch, in ``accumulate`` parts. ``steps``:
    steps of the ``optimizer`` ("muon": matrices by Muon, the rest by AdamW). The learning rate warms up
    linearly over the share ``warmup`` of them and falls to 0 on a cosine. ``terms``: what the loss is made
    of. ``decay``: weight of draft position i is ``decay ** i`` (serial drafters; block drafters use
    ``exp(-i / gamma)``, given by ``gamma``). ``unroll``: draft steps trained in sequence (serial drafters).
    ``anchors``: blocks per row (block drafters). ``dpace``: smoothing of D-PACE, which then sets their
    positions' weights in place of ``gamma``; None: off. ``answers``: at most so many of a row's trained
    positions begin a round, chosen anew in every step (serial drafters); None: all. ``dtype``: of
    activations and of the weights' copy (:func:`specjax.train.train` takes the machine's own unless told);
    masters and optimiser are float32.
    """

    method: str
    steps: int = 2000
    rows: int = 32
    length: int = 512
    accumulate: int = 1
    optimizer: Optimizer = "adamw"
    learning_rate: float = 1e-3
    warmup: float = 0.04
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    clip: float = 1.0
    terms: Terms = (("ce", 1.0),)
    decay: float = 0.8
    gamma: float = 4.0
    unroll: int = 7
    anchors: int = 64
    dpace: float | None = None
    answers: int | None = None
    chunks: int = 2
    dtype: str = "bfloat16"
    source: Source = "hybrid"
    seed: int = 0


def by_muon(changes: Mapping[str, Any], adamw: float) -> dict[str, Any]:
    """Optimizer and learning rate of a method that is trained by Muon unless ``changes`` ask for AdamW; ``adamw``: the
    learning rate then."""
    asked = changes.get("optimizer", "muon")
    return {"optimizer": asked, "learning_rate": adamw if asked == "adamw" else 3e-3}


#: Sums over a batch: ``name -> (sum, weight)``; the metric is their quotient, also over several batches.
Metrics = dict[str, tuple[Float[Array, ""], Float[Array, ""]]]


class Method(Protocol):
    """How one kind of drafter is trained: a module of functions beside the drafter's own.

    ``cfg`` and ``p`` are the drafter's config and weight struct, the very ones that decode (``p`` in the recipe's
    dtype, cast from float32 masters by the trainer). ``shared`` is what the target lends.
    """

    def recipe(self, **changes: Any) -> Recipe:
        """The recipe this method is trained with unless told otherwise."""

    def config(self, settings: Mapping[str, Any], target_cfg: Any) -> Any:
        """A drafter config to train for a target: its usual shape, changed by ``settings``. ValueError for one that is
        not understood, naming those that are."""

    def init(self, cfg: Any, target: Any, shared: Shared, key: jax.Array) -> Any:
        """Initial weights, float32. ``target``: the target's weights. A method whose draft vocabulary is a table in the
        weights takes its ids as ``vocabulary`` (keyword, optional)."""

    def frozen(self, cfg: Any) -> tuple[str, ...]:
        """Fields of the weight struct that are not trained (tables copied from the target): "head", or "backbone.head"
        within another struct."""

    def needs(self, cfg: Any) -> TapSpec:
        """What is read of the target, ``hidden`` included whenever the loss has a teacher."""

    def loss(
        self,
        p: Any,
        shared: Shared,
        cfg: Any,
        recipe: Recipe,
        batch: Batch,
        features: Features,
        key: jax.Array,
    ) -> tuple[Float[Array, ""], Metrics]:
        """Loss of a batch, and metrics: at least ``loss`` and, per draft position i, ``accuracy_i``."""

    def matches(
        self, p: Any, shared: Shared, cfg: Any, batch: Batch, features: Features, k: int
    ) -> Bool[Array, "R T k"]:
        """Entry ``[r, t, i]``: with token t as the anchor, and the drafts before it right, draft i is token
        ``t + 1 + i``, greedily and in the very arithmetic of decoding. False across a document's end, in padding,
        and where token ``t + 1`` is not trained."""
