"""Gated delta rule: linear attention over a matrix state that forgets and corrects itself.

Per value head, with key ``k``, value ``v``, decay ``g <= 0`` and write strength ``beta``::

    S <- exp(g) S;  S <- S + k (beta (v - S^T k))^T;  out = S^T q

``scan_delta`` does that position by position (decoding and verification). ``chunk_delta`` does many positions
at once (prefill): within a chunk the corrections are the solution of a triangular system, and only the state
passes from chunk to chunk. Both are float32 throughout.

Method: Gated Delta Networks (arXiv 2412.06464), chunks after arXiv 2406.06484.
"""

import jax
import jax.numpy as jnp
from einops import rearrange, repeat
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax.layers.loop import scan_into

CHUNK = 64
_EXACT = jax.lax.Precision.HIGHEST


@struct.dataclass
class Block:
    """What one block feeds to the recurrence. A position with everything 0 changes no bit of the state."""

    q: Float[Array, "B Q H Ck"]
    k: Float[Array, "B Q H Ck"]
    v: Float[Array, "B Q H Cv"]
    decay: Float[Array, "B Q H"]  # logarithm
    beta: Float[Array, "B Q H"]


def block(
    mixed: Float[Array, "B Q N"],
    decay: Float[Array, "B Q H"],
    beta: Float[Array, "B Q H"],
    valid: Int[Array, " B"],
    key_heads: int,
    key_size: int,
) -> Block:
    """Heads out of convolved channels ``[q k v]``, normed and scaled; each key head serves ``H / key_heads``
    value heads. Positions at or beyond ``valid`` are 0, whatever they hold."""
    exists = jnp.arange(mixed.shape[1]) < valid[:, None]
    value_heads, width = decay.shape[-1], key_heads * key_size
    heads = lambda x: repeat(  # noqa: E731
        x, "b q (h c) -> b q (h g) c", h=key_heads, g=value_heads // key_heads
    )
    q, k, v = jnp.split(jnp.where(exists[..., None], mixed.astype(jnp.float32), 0), (width, 2 * width), -1)
    return Block(
        q=_unit(heads(q)) * key_size**-0.5,
        k=_unit(heads(k)),
        v=rearrange(v, "b q (h c) -> b q h c", h=value_heads),
        decay=_where(exists, decay),
        beta=_where(exists, beta),
    )


def _unit(x):
    return x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)


def _where(exists: Bool[Array, "B Q"], x):
    return jnp.where(exists[..., None], x.astype(jnp.float32), 0)


def scan_delta(
    state: Float[Array, "B H Ck Cv"], x: Block
) -> tuple[Float[Array, "B Q H Cv"], Float[Array, "B H Ck Cv"]]:
    """Outputs and the state after the block, one position after the other."""

    def step(state, at: Block):
        state = state * jnp.exp(at.decay)[..., None, None]
        read = jnp.einsum("bhkv,bhk->bhv", state, at.k, precision=_EXACT)
        state = state + at.k[..., None] * (at.beta[..., None] * (at.v - read))[..., None, :]
        return state, jnp.einsum("bhkv,bhk->bhv", state, at.q, precision=_EXACT)

    by_position = jax.tree.map(lambda a: a.swapaxes(0, 1), x)
    state, out = jax.lax.scan(step, state, by_position)
    return out.swapaxes(0, 1), state


def chunk_delta(
    state: Float[Array, "B H Ck Cv"], x: Block, size: int = CHUNK
) -> tuple[Float[Array, "B Q H Cv"], Float[Array, "B H Ck Cv"]]:
    """As :func:`scan_delta` up to rounding, in chunks of ``size`` positions."""
    width = x.beta.shape[1]
    size = min(size, width)
    pad = -width % size
    x = jax.tree.map(lambda a: jnp.pad(a, [(0, 0), (0, pad)] + [(0, 0)] * (a.ndim - 2)), x)
    q, k, v = (rearrange(a, "b (n s) h c -> n b h s c", s=size) for a in (x.q, x.k, x.v))
    decay, beta = (rearrange(a, "b (n s) h -> n b h s", s=size) for a in (x.decay, x.beta))
    total = jnp.cumsum(decay, -1)  # log of everything forgotten since the chunk began
    between = jnp.exp(_lower(total[..., :, None] - total[..., None, :], -jnp.inf))
    system = beta[..., None] * between * _dot(k, k, "nbhsc,nbhtc->nbhst")
    # what the chunk alone writes, and the part of it that depends on the state it begins with
    right = beta[..., None] * jnp.concatenate([v, k * jnp.exp(total)[..., None]], -1)
    solved = jax.lax.linalg.triangular_solve(system, right, left_side=True, lower=True, unit_diagonal=True)
    parts = (
        solved[..., : v.shape[-1]],
        solved[..., v.shape[-1] :],
        between * _dot(q, k, "nbhsc,nbhtc->nbhst"),
        q * jnp.exp(total)[..., None],
        k * jnp.exp(total[..., -1:] - total)[..., None],
        jnp.exp(total[..., -1]),
    )
    state, out = scan_into(_chunk, state, parts, parts[0])
    return rearrange(out, "n b h s c -> b (n s) h c")[:, :width], state


def _chunk(state, parts):
    """One chunk: corrections against the state it begins with, outputs, state after it."""
    written, seen, scores, q, k, kept = parts
    written = written - _dot(seen, state, "bhsk,bhkv->bhsv")
    out = _dot(q, state, "bhsk,bhkv->bhsv") + _dot(scores, written, "bhst,bhtv->bhsv")
    return state * kept[..., None, None] + _dot(k, written, "bhsk,bhsv->bhkv"), out


def _lower(x, other):
    """The lower triangle with the diagonal; ``other`` above it (before any exp, which could overflow there)."""
    size = x.shape[-1]
    return jnp.where(jnp.tril(jnp.ones((size, size), bool)), x, other)


def _dot(a, b, letters: str):
    return jnp.einsum(letters, a, b, precision=_EXACT)


def convolve(
    past: Float[Array, "B J N"], x: Float[Array, "B Q N"], kernel: Float[Array, "N _"]
) -> Float[Array, "B Q N"]:
    """Causal convolution per channel of ``J + 1`` taps, then SiLU, in float32; ``past``: the J columns before."""
    taps, width = kernel.shape[1], x.shape[1]
    columns = jnp.concatenate([past, x], 1).astype(jnp.float32)
    parts = (columns[:, j : j + width] * kernel[:, j].astype(jnp.float32) for j in range(taps))
    return jax.nn.silu(sum(parts, jnp.zeros(())))


def last_columns(
    past: Float[Array, "B J N"], x: Float[Array, "B Q N"], valid: Int[Array, " B"]
) -> Float[Array, "B J N"]:
    """The J columns before position ``valid`` of the block."""
    columns = jnp.concatenate([past, x], 1)
    index = valid[:, None] + jnp.arange(past.shape[1])
    return jnp.take_along_axis(columns, index[..., None], 1)
