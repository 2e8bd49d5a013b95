"""Recurrent state whose rollback is bookkeeping: a committed state and a tape of what was fed since.

A recurrence cannot be run backwards, so a verified block does not touch the state: its inputs are written on
the *tape*, and ``commit`` only notes how many of them count. The next forward pass, of either mode, feeds
those to the recurrence first. Against a snapshot of the state per position a tape takes a few kilobytes per
position instead of megabytes, and shapes never depend on what was accepted.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int

from specjax.types import Mode, tree_bytes

#: ``run(state, inputs, valid, mode) -> (out, state)``: feed inputs ``[B Q ...]``, of which the first ``valid``
#: exist. The others must leave the state's bits alone even where they are NaN.
Run = Callable[[Any, Any, Int[Array, " B"], Mode], tuple[Any, Any]]


@struct.dataclass
class Recurrent:
    """``state``: after everything committed but the pending rows. Every leaf has axis 0 = B."""

    state: Any
    tape: Any  # inputs of the last verified block, leaves [B q_max ...] however wide the block was
    pending: Int[Array, " B"]  # rows of the tape that were committed and are not in the state yet

    @classmethod
    def create(cls, rows: int, state: Any, tape: Any) -> "Recurrent":
        """With nothing pending; ``state`` and ``tape`` are those of an empty sequence."""
        return cls(state, tape, jnp.zeros((rows,), jnp.int32))

    def extend(self, inputs: Any, valid: Int[Array, " B"], mode: Mode, run: Run) -> tuple[Any, "Recurrent"]:
        """What ``run`` puts out for a block, and the cache with the block committed or on the tape.

        Pending rows are replayed by the routine that verifies, so the state is the one that the verification
        of these rows went through: to the bit on a CPU, and within a float32 rounding where the compiler makes
        different code of different widths.
        """
        _, state = run(self.state, self.tape, self.pending, "verify")
        out, after = run(state, inputs, valid, mode)
        none = jnp.zeros_like(self.pending)
        if mode == "extend":
            return out, Recurrent(after, self.tape, none)
        return out, Recurrent(state, jax.tree.map(_record, self.tape, inputs), none)

    def commit(self, emitted: Int[Array, " B"]) -> "Recurrent":
        """Keep the first ``emitted`` rows of the last verified block."""
        return Recurrent(self.state, self.tape, emitted.astype(jnp.int32))

    @staticmethod
    def min_resume(high_water: int) -> int:
        """It can be cut back only to where it stands."""
        return high_water


class Held(NamedTuple):
    """Bytes of the recurrent states of a cache, of their tapes, and of what the tapes are in place of: a copy of the
    state after every position of a block of the tape's width."""

    state: int
    tape: int
    snapshots: int


def held(cache: Any) -> Held:
    """Of all recurrent layers of a cache (arrays or shapes), all rows together; zeros without any."""
    leaves = jax.tree.leaves(cache, is_leaf=lambda x: isinstance(x, Recurrent))
    layers = [layer for layer in leaves if isinstance(layer, Recurrent)]
    states = [tree_bytes(layer.state) for layer in layers]
    widths = [jax.tree.leaves(layer.tape)[0].shape[1] for layer in layers]
    copies = sum(size * width for size, width in zip(states, widths, strict=True))
    return Held(sum(states), tree_bytes([layer.tape for layer in layers]), copies)


def _record(tape, block):
    """The block at the front of the tape: a tape of the block's width could not be carried by a loop."""
    return jax.lax.dynamic_update_slice(tape, block.astype(tape.dtype), (0,) * tape.ndim)
