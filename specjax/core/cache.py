"""Key/value caches whose rollback is bookkeeping: shapes never depend on what was accepted.

Layout ``[B G S C]`` everywhere. A cache is written at positions; which entries are *visible* follows
from the position mask alone, so rejecting a draft costs nothing.

Every cache kind offers, as a method or through its family module,

``extend(k, v, pos, valid, mode)`` -> ``(keys, values, key_pos, cache)``: what the block attends to (the
past and the block itself), the position of each key (:class:`Filled`, or an array in which negative is
invisible; :func:`positions` gives the array for both), and the cache with the block written.
``commit(emitted)``: keep the first ``emitted`` positions of the last verified block.
``min_resume(high_water)``: the earliest length the cache can be cut back to, on the host.

A recurrent state fits the same contract with a tape: :mod:`specjax.core.recurrent`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.types import Mode


@struct.dataclass
class Filled:
    """Where keys of a dense buffer stand: slot s holds position s, and nothing at or beyond ``end`` is visible."""

    end: Int[Array, " B"]
    slots: int = struct.field(pytree_node=False)

    @property
    def positions(self) -> Int[Array, "B S"]:
        """Position of each slot, -1 where nothing is visible."""
        slot = jnp.arange(self.slots, dtype=self.end.dtype)
        return jnp.where(slot < self.end[:, None], slot, -1)


def positions(key_pos: Filled | Int[Array, "..."]) -> Int[Array, "..."]:
    """Positions of keys as an array."""
    return key_pos.positions if isinstance(key_pos, Filled) else key_pos


@struct.dataclass
class DenseKV:
    """One slot per position. Slots beyond a row's committed length hold garbage nobody sees.

    Values may have another size than keys (latent attention keeps two unlike parts).
    """

    k: Float[Array, "B G S C"]
    v: Float[Array, "B G S Cv"]

    @classmethod
    def create(
        cls, rows: int, heads: int, slots: int, head_dim: int, dtype, value_dim: int | None = None
    ) -> "DenseKV":
        wide = head_dim if value_dim is None else value_dim
        return cls(
            jnp.zeros((rows, heads, slots, head_dim), dtype), jnp.zeros((rows, heads, slots, wide), dtype)
        )

    def extend(
        self,
        k: Float[Array, "B Q G C"],
        v: Float[Array, "B Q G Cv"],
        pos: Int[Array, "B Q"],
        valid: Int[Array, " B"],
        mode: Mode,
    ):
        """Write the block at its positions; attend to the buffer up to its last valid row."""
        k, v = laid_out(k, v, self.k.dtype)
        write = _write_verified if mode == "verify" else _write_valid
        cache = DenseKV(write(self.k, k, pos[:, 0], valid), write(self.v, v, pos[:, 0], valid))
        return cache.k, cache.v, _filled(self.k, pos, valid), cache

    def commit(self, emitted: Int[Array, " B"]) -> "DenseKV":
        return self

    @staticmethod
    def min_resume(high_water: int) -> int:
        return 1


@struct.dataclass
class ValueKV:
    """Dense cache of values alone, for layers whose keys follow from values and positions.

    Values are kept as they came; what :class:`DenseKV` marks when it writes is worked out when this is read.
    """

    v: Float[Array, "B G S C"]

    @classmethod
    def create(cls, rows: int, heads: int, slots: int, head_dim: int, dtype) -> "ValueKV":
        return cls(jnp.zeros((rows, heads, slots, head_dim), dtype))

    def extend(
        self,
        keys_of: Callable,
        v: Float[Array, "B Q G C"],
        pos: Int[Array, "B Q"],
        valid: Int[Array, " B"],
        mode: Mode,
    ):
        """Like :meth:`DenseKV.extend`; ``keys_of`` makes keys ``[B G S C]`` of the values in the slots 0 to S."""
        write = _write_verified if mode == "verify" else _write_valid
        block = v.swapaxes(1, 2).astype(self.v.dtype)
        cache = ValueKV(write(self.v, block, pos[:, 0], valid))
        return *cache.read(keys_of), _filled(self.v, pos, valid), cache

    def read(self, keys_of: Callable):
        """Keys and values of every slot."""
        finite = jnp.isfinite(self.v)
        values = jnp.where(finite, self.v, 0)
        return jnp.where(finite.all(-1, keepdims=True), keys_of(values), jnp.nan), values

    def positions(self) -> Int[Array, "_ S"]:
        """Position of each slot, for all rows or per row."""
        return jnp.arange(self.v.shape[2])[None]

    def commit(self, emitted: Int[Array, " B"]) -> "ValueKV":
        return self

    @staticmethod
    def min_resume(high_water: int) -> int:
        return 1


def _filled(buffer, pos, valid):
    """Slots up to the block's last valid row: padding must not see garbage."""
    return Filled(pos[:, 0] + valid, buffer.shape[2])


def laid_out(
    k: Float[Array, "B Q G C"], v: Float[Array, "B Q G Cv"], dtype
) -> tuple[Float[Array, "B G Q C"], Float[Array, "B G Q Cv"]]:
    """The block in the cache's layout and type. A value that is not finite becomes 0 and its key NaN: what
    sees it turns NaN as before, while 0 * NaN cannot reach the rows before a rejected draft."""
    return marked(k.swapaxes(1, 2), v.swapaxes(1, 2), dtype)


def marked(k: Float[Array, "*N C"], v: Float[Array, "*N Cv"], dtype) -> tuple[Array, Array]:
    """As :func:`laid_out`, in the layout they come in."""
    k, v = k.astype(dtype), v.astype(dtype)
    finite = jnp.isfinite(v)
    return jnp.where(finite.all(-1, keepdims=True), k, jnp.nan), jnp.where(finite, v, 0)


def _write_valid(buffer, block, start, valid):
    """Gather form: rows at or beyond ``valid`` and positions outside the buffer are never written."""
    offset = jnp.arange(buffer.shape[2]) - start[:, None]  # [B S]
    inside = (offset >= 0) & (offset < valid[:, None])
    index = jnp.clip(offset, 0, block.shape[2] - 1)[:, None, :, None]
    return jnp.where(inside[:, None, :, None], jnp.take_along_axis(block, index, axis=2), buffer)


def _write_verified(buffer, block, start, valid):
    """A contiguous slice per row, in place inside a loop; slots = max_len + q_max keep it in bounds."""
    del valid
    if buffer.shape[0] == 1:
        return jax.lax.dynamic_update_slice(buffer, block, (0, 0, start[0], 0))
    return jax.vmap(lambda b, x, s: jax.lax.dynamic_update_slice(b, x, (0, s, 0)))(buffer, block, start)


@struct.dataclass
class RingKV:
    """Sliding-window cache of ``window + q_max`` slots; the stored position of a slot is authoritative.

    A rejected entry carries a position the next block begins at or before, and is masked by that. With
    ``window + q_max`` slots a draft only ever overwrites positions no later query can see.
    """

    k: Float[Array, "B G S C"]
    v: Float[Array, "B G S C"]
    pos: Int[Array, "B S"]  # -1 = empty

    @classmethod
    def create(cls, rows: int, heads: int, window: int, q_max: int, head_dim: int, dtype) -> "RingKV":
        shape = (rows, heads, window + q_max, head_dim)
        empty = jnp.full((rows, window + q_max), -1, jnp.int32)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), empty)

    def extend(
        self,
        k: Float[Array, "B Q G C"],
        v: Float[Array, "B Q G C"],
        pos: Int[Array, "B Q"],
        valid: Int[Array, " B"],
        mode: Mode,
    ):
        """In prefill, attend to the old ring and the block side by side, then write the block's last valid rows.

        A verified block takes slots that hold nothing any of its rows can see, so it is written first and the ring
        alone is read: its size is not needed a second time, and where a key lies does not depend on the block.
        """
        k, v = laid_out(k, v, self.k.dtype)
        if mode == "verify":
            ring = self._put(k, v, pos, valid)
            return ring.k, ring.v, ring.pos, ring
        stale = self.pos >= pos[:, :1]  # rejected entries about to be replaced by this block
        in_block = jnp.arange(pos.shape[1]) < valid[:, None]
        key_pos = jnp.concatenate([jnp.where(stale, -1, self.pos), jnp.where(in_block, pos, -1)], 1)
        keys, values = jnp.concatenate([self.k, k], 2), jnp.concatenate([self.v, v], 2)
        return keys, values, key_pos, self._write(k, v, pos[:, 0], valid)

    def _put(self, k, v, pos, valid):
        """The ring with a block of at most its width written in place."""
        rows, slots = jnp.arange(pos.shape[0])[:, None], self.pos.shape[1]
        slot = jnp.where(
            jnp.arange(pos.shape[1]) < valid[:, None], pos % slots, slots
        )  # beyond the last: nowhere
        at = lambda x: x.at[rows, :, slot]  # noqa: E731
        put = lambda x, block: at(x).set(block.swapaxes(1, 2), mode="drop", unique_indices=True)  # noqa: E731
        return RingKV(put(self.k, k), put(self.v, v), self.pos.at[rows, slot].set(pos, mode="drop"))

    def _write(self, k, v, start, valid):
        slots = self.pos.shape[1]
        first = (jnp.arange(slots) - start[:, None]) % slots  # smallest block row that maps to the slot
        last = first + slots * ((valid[:, None] - 1 - first) // slots)
        written = first < valid[:, None]
        index = jnp.clip(last, 0, k.shape[2] - 1)
        pick = lambda block, old: jnp.where(  # noqa: E731
            written[:, None, :, None], jnp.take_along_axis(block, index[:, None, :, None], 2), old
        )
        pos = jnp.where(written, start[:, None] + last, self.pos).astype(self.pos.dtype)
        return RingKV(pick(k, self.k), pick(v, self.v), pos)

    def commit(self, emitted: Int[Array, " B"]) -> "RingKV":
        return self

    def min_resume(self, high_water: int, window: int) -> int:
        return max(1, high_water - (self.pos.shape[1] - window))
