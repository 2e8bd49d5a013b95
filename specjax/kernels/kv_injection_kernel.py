"""The Pallas-Triton kernels of KV injection.

Few tokens are a matter of reading weights: the first kernel streams the rows of all layers' key and value weights at
once, in parts along the columns so that programs fill the chip, and leaves float32 sums. The last kernel adds the
parts, norms, turns and writes into the caches in place. With many tokens the products are XLA's and the last kernel
follows.

Weights and caches stay one array per layer: a program branches to the arrays of its layer. A head is held as two halves
whose channels are rotated with each other, since values in registers can be neither cut nor joined.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from specjax.kernels.configs import LEAST, Injection, Projection
from specjax.kernels.kv_injection_op import Heads, Projections
from specjax.kernels.sizes import divisor, power
from specjax.layers.linear import linear
from specjax.layers.rope import inverse_frequencies


@dataclasses.dataclass(frozen=True)
class Case:
    """What decides whether and how the kernels are built."""

    batch: int
    block: int
    width: int
    layers: int
    kv_heads: int
    size: int
    slots: int
    dtype: Any
    own_values: bool
    k_bias: bool
    v_bias: bool
    k_norm: bool
    heads: Heads

    @property
    def tokens(self) -> int:
        return self.batch * self.block

    @property
    def out(self) -> int:
        """Rows of a weight."""
        return self.kv_heads * self.size

    @property
    def kinds(self) -> int:
        """Weights of a layer: keys and values, or keys alone."""
        return 1 + self.own_values


def launch(x, layers, caches, pos, keep, *, case: Case, tiles: Injection, interpret: bool = False):
    """The caches with the block written."""
    x = x.reshape(case.tokens, case.width)
    weights = [
        w.reshape(case.out, case.width) for p in layers for w in ((p.k, p.v) if case.own_values else (p.k,))
    ]
    tile = tiles.project(case.tokens)
    if tile is None:
        sums = [linear(x, w) for w in weights]
    else:
        sums = [launch_project(x, weights, case=case, tile=tile, interpret=interpret)]
    return launch_finish(sums, layers, caches, pos, keep, case=case, tiles=tiles, interpret=interpret)


def fit(tile: Projection, case: Case) -> Projection:
    """The tile with sizes halved until they divide the weights'."""
    parts = divisor(case.width // LEAST, tile.parts)
    return dataclasses.replace(
        tile, rows=divisor(case.out, tile.rows), depth=divisor(case.width // parts, tile.depth), parts=parts
    )


def launch_project(x, weights, *, case: Case, tile: Projection, interpret: bool = False):
    """Products in parts: float32 [layers * kinds, parts, tokens, out]."""
    tile, tokens = fit(tile, case), min(64, power(case.tokens, LEAST))
    shape = (len(weights), tile.parts, case.tokens, case.out)
    return pl.pallas_call(
        lambda x_ref, *refs: _project(x_ref, refs[:-1], refs[-1], case=case, tile=tile, tokens=tokens),
        grid=(case.out // tile.rows, len(weights) * tile.parts, -(-case.tokens // tokens)),
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="kv_injection_project",
    )(x, *weights)


def _project(x_ref, weights, out_ref, *, case: Case, tile: Projection, tokens: int):
    row, job, part = (
        pl.program_id(0) * tile.rows,
        pl.program_id(1) // tile.parts,
        pl.program_id(1) % tile.parts,
    )
    first, depth = pl.program_id(2) * tokens, case.width // tile.parts
    token = first + jax.lax.broadcasted_iota(jnp.int32, (tokens, tile.depth), 0)

    def products(weight_ref):
        def step(i, total):
            at = pl.ds(part * depth + i * tile.depth, tile.depth)
            x = triton.load(x_ref.at[pl.ds(first, tokens), at], mask=token < case.tokens, other=0)
            return total + triton.dot(x, weight_ref[pl.ds(row, tile.rows), at], trans_b=True).astype(
                jnp.float32
            )

        zero = jnp.zeros((tokens, tile.rows), jnp.float32)
        total = jax.lax.fori_loop(0, depth // tile.depth, step, zero)
        shape = total.shape
        # padding points past the end: the interpreter would write it back where it points
        at = jnp.minimum(first + jax.lax.broadcasted_iota(jnp.int32, shape, 0), case.tokens)
        column = row + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        triton.store(out_ref.at[job, part, at, column], total, mask=at < case.tokens)

    for i, ref in enumerate(weights):
        pl.when(job == i)(functools.partial(products, ref))


def launch_finish(sums, layers, caches, pos, keep, *, case: Case, tiles: Injection, interpret: bool = False):
    """Bias, norm, rope and the write. ``sums``: one array of parts, or one product per weight."""
    half, tokens = power(case.size // 2), min(tiles.tokens, power(case.tokens))
    frequencies = np.zeros(half, np.float32)
    found = inverse_frequencies(case.heads.rope)
    frequencies[: found.size] = found
    some = [v.reshape(-1) for p in layers for v in _vectors(p)]
    arrays = [
        *sums,
        jnp.asarray(frequencies),
        pos.reshape(-1).astype(jnp.int32),
        keep.astype(jnp.int32),
        *some,
    ]
    flat = [c for pair in caches for c in pair]
    shapes = [jax.ShapeDtypeStruct(c.shape, c.dtype) for c in flat]

    def body(*refs):
        ours, outs = refs[: len(arrays)], refs[-len(flat) :]
        given, rest = ours[: len(sums)], ours[len(sums) :]
        at = pl.program_id(0) * tokens, pl.program_id(1)
        chosen = pl.program_id(2)
        for i in range(case.layers):
            vectors = iter(rest[3 + i * len(some) // case.layers :])
            layer = [next(vectors) if on else None for on in (case.k_bias, case.v_bias, case.k_norm)]
            run = functools.partial(_finish, given, rest[:3], layer, outs[2 * i : 2 * i + 2], i, at)
            pl.when(chosen == i)(functools.partial(run, case=case, tokens=tokens))

    out = pl.pallas_call(
        body,
        grid=(-(-case.tokens // tokens), case.kv_heads, case.layers),
        out_shape=shapes,
        input_output_aliases={len(arrays) + i: i for i in range(len(flat))},
        compiler_params=triton.CompilerParams(num_warps=tiles.warps, num_stages=1),
        interpret=interpret,
        name="kv_injection",
    )(*arrays, *flat)
    return tuple((out[i], out[i + 1]) for i in range(0, len(out), 2))


def _vectors(p: Projections) -> list:
    return [v for v in (p.k_bias, p.v_bias, p.k_norm) if v is not None]


def _finish(sums, facts, vectors, outs, layer: int, at, *, case: Case, tokens: int):
    (frequency_ref, pos_ref, keep_ref), (k_bias, v_bias, k_norm) = facts, vectors
    first, head = at
    token = first + jnp.arange(tokens, dtype=jnp.int32)
    there = token < case.tokens
    pair, turned = jnp.arange(power(case.size // 2), dtype=jnp.int32), case.heads.rope.dims // 2
    known = pair < case.size // 2
    # the channels of a pair; those that do not turn are paired as they come
    if case.heads.rope.pair == case.size // 2:
        channels = pair, pair + case.size // 2
    else:
        turns = pair < turned
        channels = (
            jnp.where(turns, pair, pair + turned),
            jnp.where(turns, pair + turned, pair + case.size // 2),
        )
    ok = there[:, None] & known[None, :]

    def raw(kind: int, channel, bias_ref):
        column = jnp.broadcast_to((head * case.size + jnp.where(known, channel, 0))[None, :], ok.shape)
        at = jnp.broadcast_to(jnp.where(there, token, 0)[:, None], ok.shape)
        job = layer * case.kinds + kind
        if len(sums) == 1 and sums[0].ndim == 4:
            parts = [
                triton.load(sums[0].at[job, p, at, column], mask=ok, other=0) for p in range(sums[0].shape[1])
            ]
        else:
            parts = [triton.load(sums[job].at[at, column], mask=ok, other=0)]
        total = sum(part.astype(jnp.float32) for part in parts)
        return total if bias_ref is None else total + _vector(bias_ref, head * case.size + channel, known)

    def normed(halves, weight_ref):
        low, high = halves
        mean = (jnp.sum(low * low, axis=1) + jnp.sum(high * high, axis=1)) / case.size
        factor = jax.lax.rsqrt(mean + case.heads.eps)[:, None]
        if weight_ref is None:
            return low * factor, high * factor
        return tuple(
            h * factor * _vector(weight_ref, c, known) for h, c in zip(halves, channels, strict=True)
        )

    keys = tuple(raw(0, c, k_bias) for c in channels)
    values = tuple(raw(1, c, v_bias) for c in channels) if case.own_values else keys
    keys = keys if k_norm is None else normed(keys, k_norm)
    values = normed(values, None) if case.heads.value_norm else values
    pos = triton.load(pos_ref.at[token], mask=there, other=-1)
    keys = _turned(keys, pos, _vector(frequency_ref, pair, known), pair < turned, case)
    keys, values = _finite(keys, values, outs[1].dtype)

    row = jnp.where(there, token // case.block, 0)
    kept = there & (token % case.block < triton.load(keep_ref.at[row], mask=there, other=0))
    slot = jnp.where(kept & (pos >= 0) & (pos < case.slots), pos, case.slots)
    spread = lambda x: jnp.broadcast_to(x[:, None], ok.shape)  # noqa: E731
    for ref, halves in zip(outs, (keys, values), strict=True):
        for channel, x in zip(channels, halves, strict=True):
            column = jnp.broadcast_to(jnp.where(known, channel, case.size)[None, :], ok.shape)
            at = ref.at[spread(row), head, spread(slot), column]
            triton.store(at, x.astype(ref.dtype), mask=ok & spread(slot < case.slots))


def _vector(ref, at, known):
    return triton.load(ref.at[jnp.where(known, at, 0)], mask=known, other=0).astype(jnp.float32)[None, :]


def _turned(halves, pos, frequency, turns, case: Case):
    low, high = halves
    angle = pos.astype(jnp.float32)[:, None] * frequency
    factor = case.heads.rope.attention_factor
    cos = jnp.where(turns[None, :], jnp.cos(angle) * factor, 1.0)
    sin = jnp.where(turns[None, :], jnp.sin(angle) * factor, 0.0)
    return low * cos - high * sin, high * cos + low * sin


def _finite(keys, values, dtype):
    """Values that the cache's type cannot hold become 0, and their keys NaN."""
    most = float(jnp.finfo(dtype).max)
    fine = tuple((v >= -most) & (v <= most) for v in values)
    count = lambda ok: jnp.sum(ok.astype(jnp.int32), axis=1)  # noqa: E731
    whole = (count(fine[0]) + count(fine[1]) == 2 * fine[0].shape[1])[:, None]
    keys = tuple(jnp.where(whole, k, jnp.nan) for k in keys)
    return keys, tuple(jnp.where(ok, v, 0.0) for ok, v in zip(fine, values, strict=True))
