"""Caches of packed rows: a target runs several documents per row in one pass, as if each stood alone.

A family asks its caches what a block attends to (:meth:`specjax.core.cache.DenseKV.extend`). The ones here answer
with the row's own keys and with their positions as *each query* sees them: -1 where a key belongs to another document
or to padding. Positions start anew with each document, so rotations, windows and causality follow from them as in
decoding, and no family knows of packing.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax import registry
from specjax.core.cache import DenseKV, RingKV, ValueKV, laid_out
from specjax.types import Mode, Pair

#: Caches that :func:`caches` replaces: what they hold is seen by position alone.
ATTENTION = (DenseKV, RingKV, ValueKV)


@struct.dataclass
class PackedKV(DenseKV):
    """Keys and values of packed rows, one slot per token; ``k`` and ``v`` are None before the pass.

    ``doc`` and ``pos`` are those of :class:`specjax.train.types.Batch`. Stands for a ring, too.
    """

    doc: Int[Array, "R T"]
    pos: Int[Array, "R T"]

    def extend(
        self,
        k: Float[Array, "R T G C"],
        v: Float[Array, "R T G Cv"],
        pos: Int[Array, "R T"],
        valid: Int[Array, " R"],
        mode: Mode,
    ):
        """The rows themselves, and the position of every key for every query ``[R T T]``."""
        del pos, valid, mode
        keys, values = laid_out(k, v, k.dtype)
        return keys, values, seen_at(self.doc, self.pos), dataclasses.replace(self, k=keys, v=values)


@struct.dataclass
class PackedValues(ValueKV):
    """:class:`~specjax.core.cache.ValueKV` of packed rows; ``v`` is None before the pass."""

    doc: Int[Array, "R T"]
    pos: Int[Array, "R T"]

    def extend(
        self,
        keys_of: Callable,
        v: Float[Array, "R T G C"],
        pos: Int[Array, "R T"],
        valid: Int[Array, " R"],
        mode: Mode,
    ):
        """Like :meth:`PackedKV.extend`, with keys made of the values."""
        del pos, valid, mode
        cache = dataclasses.replace(self, v=v.swapaxes(1, 2))
        return *cache.read(keys_of), seen_at(self.doc, self.pos), cache

    def positions(self) -> Int[Array, "R T"]:
        """Position of each slot within its document."""
        return self.pos


def seen_at(doc: Int[Array, "R T"], pos: Int[Array, "R T"]) -> Int[Array, "R T T"]:
    """Position of key s as query t sees it: -1 unless both are of one document."""
    same = (doc[:, :, None] == doc[:, None, :]) & (doc[:, None, :] >= 0)
    return jnp.where(same, pos[:, None, :], -1)


def caches(pair: Pair, doc: Int[Array, "R T"], pos: Int[Array, "R T"], dtype: Any) -> Any:
    """The cache a target is given for one pass over packed rows. ``dtype``: of the activations.

    Recurrent states, and caches of kinds unknown here, are the target's own, empty ones: they see a row from its
    beginning whatever ``doc`` says, so rows must hold one document each (:func:`packable`).
    """

    def replaced(part: Any) -> Any:
        if isinstance(part, ValueKV):
            return PackedValues(None, doc, pos)
        return PackedKV(None, None, doc, pos) if isinstance(part, ATTENTION) else part

    rows, slots = doc.shape
    return jax.tree.map(replaced, _own(pair, rows, slots, dtype), is_leaf=_by_position)


@functools.cache
def packable(pair: Pair) -> bool:
    """Whether several documents can stand in a row: all that the target keeps is seen by position."""
    shapes = jax.eval_shape(lambda: _own(pair, 1, 2, jnp.float32))
    return all(map(_by_position, jax.tree.leaves(shapes, is_leaf=_by_position)))


def _own(pair: Pair, rows: int, slots: int, dtype: Any) -> Any:
    return registry.target(pair.family).init_cache(pair.target_cfg, rows, slots, 1, dtype)


def _by_position(part: Any) -> bool:
    return isinstance(part, ATTENTION)
