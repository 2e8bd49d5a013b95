"""Cases of every kernel with a float64 oracle: small ones for any device, and shapes of real models to time."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.kernels import dispatch
from specjax.kernels.block_attention_op import View, attend_block
from specjax.kernels.kv_injection_op import Heads, Projections, inject
from specjax.layers import moe
from specjax.layers.linear import Settings, product
from specjax.layers.norm import Normed
from specjax.layers.rope import RopeConfig, inverse_frequencies


@dataclasses.dataclass(frozen=True)
class Case:
    """``arrays()``: inputs. ``apply(want)``: a function of them, by an implementation. ``judge(arrays)``: a function of
    results, their relative error against float64, which is computed once. ``chain(arrays, result)``: inputs with which
    the next call gives the same but has to wait for this one. ``reads(arrays)``: bytes that a call must read.
    ``clean(arrays)``: what the reference is given instead, which may read what nobody sees. ``calls``: in one program
    that is timed."""

    op: str
    name: str
    arrays: Callable[[], tuple]
    apply: Callable[[str], Callable]
    judge: Callable[[tuple], Callable[[Any], float]]
    chain: Callable[[tuple, Any], tuple]
    reads: Callable[[tuple], int]
    clean: Callable[[tuple], tuple] = lambda arrays: arrays
    calls: int = 4


def small() -> list[Case]:
    """One or two of every kernel, seconds on any device."""
    from specjax.kernels import check_heads  # which has its cases from here

    drafted, window = View(0.2, False), View(0.2, True, window=20, softcap=5.0)
    shape = {"heads": 4, "groups": 2, "size": 16, "slots": 70}
    return [
        attention("drafted block", drafted, lengths=(0, 37, 70), rows=5, **shape),
        attention(
            "verified block, window, soft cap", window, lengths=(0, 37, 67), rows=3, own=False, **shape
        ),
        injection("two layers", lengths=(0, 5, 16), keep=(0, 2, 4), width=32, size=16, slots=20),
        experts("experts", 5),
        experts("grouped_experts", 70),
        products("norm and gated pair", 3, (48, 48), 96, gated=True),
        packed("two documents", length=24, documents=2),
        *check_heads.small(),
    ]


def real() -> list[Case]:
    """Shapes of published models, ragged."""
    from specjax.kernels import check_heads

    drafted, verified = View(128**-0.5, False), View(128**-0.5, True)
    ragged = (4000, 900, 2500, 0)
    wide = {"heads": 32, "groups": 8, "slots": 4096, "lengths": ragged}
    model = {"width": 4096, "layers": 5, "groups": 8, "slots": 512}
    found = [
        attention("drafted block of 16, head size 128", drafted, rows=16, **wide),
        attention("verified block of 8, head size 128", verified, rows=8, own=False, **wide),
        attention("verified block of 17, window", View(128**-0.5, True, 1024), rows=17, own=False, **wide),
        attention("drafted block of 8, head size 64", View(0.125, False), rows=8, size=64, **wide),
        attention(
            "verified block of 4, head size 256", View(0.0625, True), rows=4, size=256, own=False,
            heads=16, groups=4, slots=4096, lengths=ragged,
        ),
        attention(
            "verified block of 8, head size 512", View(1.0, True, softcap=50.0), rows=8, size=512, own=False,
            heads=32, groups=4, slots=4096, lengths=ragged,
        ),
    ]  # fmt: skip
    for tokens in (1, 8, 64, 256):
        pos, keep = tuple(range(0, tokens, 8)), (min(tokens, 8),) * (-(-tokens // 8))
        found.append(injection(f"{tokens} tokens", lengths=pos, keep=keep, block=min(tokens, 8), **model))
    many = {"count": 128, "per_token": 8, "width": 2048, "size": 768}
    found += [experts("experts", tokens, **many) for tokens in (1, 8, 32)]
    found += [
        experts("grouped_experts", 512, **many),
        products("norm and gated pair of an 8B model, 8 rows", 8, (12288, 12288), 4096, gated=True),
        products("queries, keys and values, 1 row", 1, (4096, 1024, 1024), 4096),
        products("head of 151936 tokens, 8 rows", 8, (151936,), 4096),
        packed("four documents, 2048 tokens", length=2048, documents=4, heads=32, groups=8, size=128),
        *check_heads.real(),
    ]
    return found


#: Numbers that are drawn; larger arrays repeat them, the number being a prime out of step with every row.
_DRAWN = 2**22 - 3


@functools.lru_cache(maxsize=8)
def _drawn(seed: int, size: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size, np.float32)


def random(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    """Normal numbers in bfloat16. On the host: nothing is compiled for them."""
    values = _drawn(seed, min(math.prod(shape), _DRAWN)) * np.float32(scale)
    return np.resize(values.astype(jnp.bfloat16), shape)


def wide(x) -> np.ndarray:
    """In float64."""
    x = np.asarray(x)
    if x.dtype == jnp.bfloat16:  # half of a float32; by these bits far faster than by its type
        x = (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float64)


def times(x: np.ndarray, w) -> np.ndarray:
    """``x w^T`` in float64 for weights [out in] of any size, a part of them at a time."""
    w, step = np.asarray(w), max(1, 2**26 // w.shape[-1])
    return np.hstack([x @ wide(w[i : i + step]).T for i in range(0, len(w), step)])


def distance(got: np.ndarray, want: np.ndarray) -> float:
    """Norm of the difference over the norm of what is wanted."""
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def against(oracle: Callable[[tuple], np.ndarray]) -> Callable[[tuple], Callable[[Any], float]]:
    """``judge`` of a case whose result is one array."""

    def judge(arrays):
        want = oracle(arrays)
        return lambda got: distance(wide(got), want)

    return judge


# Attention of a block over a ragged cache.


def attention(
    name: str, view: View, lengths: tuple[int, ...], rows: int, own: bool = True, heads: int = 8, groups: int = 2,
    size: int = 128, slots: int = 300,
) -> Case:  # fmt: skip
    """Rows of the batch with ``lengths`` cached positions; a verified block (``own=False``) is cached too."""

    def arrays():
        batch = len(lengths)
        start = jnp.asarray(lengths, jnp.int32)
        end = start if own else jnp.asarray(np.add(lengths, rows), jnp.int32)
        hidden = (np.arange(slots) >= np.asarray(end)[:, None])[:, None, :, None]
        nothing = np.array(np.nan, jnp.bfloat16)
        k, v = (jnp.asarray(np.where(hidden, nothing, random(i, batch, groups, slots, size))) for i in (1, 2))
        block = tuple(jnp.asarray(random(i, batch, rows, groups, size)) for i in (3, 4)) if own else None
        return jnp.asarray(random(0, batch, rows, heads, size)), k, v, start, end, block

    return Case(
        "block_attention",
        name,
        arrays,
        lambda want: lambda *a: attend_block(*a, view=view, implementation=want),
        against(lambda arrays: _attention(arrays, view)),
        _after,
        lambda arrays: int(2 * 2 * groups * size * _visible(view, arrays)[0].any(1).sum()),
        lambda arrays: (*arrays[:2], jnp.nan_to_num(arrays[2]), *arrays[3:]),
    )


def _visible(view: View, arrays) -> tuple[np.ndarray, np.ndarray]:
    """What rows see: cached slots [B N S], and rows of their own block [N N]."""
    q, k, _, start, end, _ = arrays
    row, slot = np.arange(q.shape[1]), np.arange(k.shape[2])
    back = np.asarray(start)[:, None, None] + row[:, None] - slot  # how far a slot lies behind a row
    ahead = row[:, None] - row
    past, own = np.ones(back.shape, bool), np.ones(ahead.shape, bool)
    past &= slot < np.asarray(end)[:, None, None]
    if view.causal:
        past, own = past & (back >= 0), own & (ahead >= 0)
    if view.window is not None:
        past, own = past & (back < view.window), own & (np.abs(ahead) < view.window)
    return past, own


def _attention(arrays, view: View) -> np.ndarray:
    q, k, v, _, _, block = arrays
    batch, (past, own) = q.shape[0], _visible(view, arrays)
    share, out = q.shape[2] // k.shape[1], np.zeros(q.shape)
    q, k, v = wide(q), wide(k), wide(v)
    mine = None if block is None else tuple(wide(x) for x in block)
    for b in range(batch):
        used = past[b].any(0)
        for g in range(k.shape[1]):
            keys, values, seen = k[b, g, used], v[b, g, used], past[b][:, used]
            if mine is not None:
                keys, values = np.vstack([keys, mine[0][b, :, g]]), np.vstack([values, mine[1][b, :, g]])
                seen = np.hstack([seen, own])
            for h in range(g * share, (g + 1) * share):
                out[b, :, h] = _softmax(q[b, :, h] @ keys.T * view.scale, seen, view.softcap) @ values
    return out


def _softmax(scores, seen, softcap) -> np.ndarray:
    scores = softcap * np.tanh(scores / softcap) if softcap else scores
    scores = np.where(seen, scores, -np.inf)
    top = scores.max(-1, keepdims=True, initial=-np.inf)
    weights = np.where(seen, np.exp(scores - np.where(np.isfinite(top), top, 0)), 0)
    return weights / np.maximum(weights.sum(-1, keepdims=True), 1e-300)


# Injection of features into the caches of a drafter's layers.


def injection(
    name: str, lengths: tuple[int, ...], keep: tuple[int, ...], block: int = 4, width: int = 256, layers: int = 2,
    groups: int = 2, size: int = 128, slots: int = 40,
) -> Case:  # fmt: skip
    """Blocks behind ``lengths`` positions, of which ``keep`` are written; caches hold not-a-number before."""
    heads = Heads(RopeConfig(size, 1e6), 1e-6)

    def arrays():
        batch = len(lengths)
        weight = lambda i: jnp.asarray(random(i, groups, size, width))  # noqa: E731
        norm = lambda i: jnp.asarray(random(i, size))  # noqa: E731
        many = range(0, 3 * layers, 3)
        projections = tuple(Projections(weight(i), weight(i + 1), None, None, norm(i + 2)) for i in many)
        empty = jnp.asarray(np.full((batch, groups, slots, size), np.nan, jnp.bfloat16))
        pos = jnp.asarray(np.add.outer(lengths, np.arange(block)), jnp.int32)
        x = jnp.asarray(random(99, batch, block, width, scale=width**-0.5))
        return x, projections, ((empty, empty),) * layers, pos, jnp.asarray(keep, jnp.int32)

    def chain(arrays, result):
        return (arrays[0], arrays[1], result, *arrays[3:])  # the caches, which the next call writes again

    return Case(
        "kv_injection",
        name,
        arrays,
        lambda want: lambda *a: inject(*a, heads=heads, implementation=want),
        lambda arrays: _injection_judge(arrays, heads),
        chain,
        lambda arrays: 2 * 2 * layers * groups * size * width,
        calls=8,  # the first one has to copy the caches
    )


def _injection_judge(arrays, heads: Heads) -> Callable[[Any], float]:
    """Infinite if anything but the kept positions was written."""
    x, layers, caches, pos, keep = arrays
    x, pos, keep = wide(x), np.asarray(pos), np.asarray(keep)
    rows, steps = np.nonzero(np.arange(pos.shape[1]) < keep[:, None])
    at, wanted = pos[rows, steps], []
    for p in layers:
        k, v = (times(x[rows, steps], np.asarray(w).reshape(-1, x.shape[-1])) for w in (p.k, p.v))
        k, v = (y.reshape(len(rows), *p.k.shape[:2]) for y in (k, v))
        k = k / np.sqrt((k**2).mean(-1, keepdims=True) + heads.eps) * wide(p.k_norm)
        wanted += [_turned(k, at, heads.rope), v]
    written = np.zeros((pos.shape[0], caches[0][0].shape[2]), bool)
    written[rows, at] = True

    def judge(got) -> float:
        mine = []
        for cache in (np.asarray(cache).swapaxes(1, 2) for pair in got for cache in pair):
            if not np.isnan(cache[~written]).all():
                return float("inf")
            mine.append(wide(cache[rows, at]))
        return distance(np.concatenate(mine), np.concatenate(wanted))

    return judge


def _turned(k: np.ndarray, at: np.ndarray, rope: RopeConfig) -> np.ndarray:
    angle = (at[:, None] * np.asarray(inverse_frequencies(rope), np.float64))[:, None]
    a, b = np.split(k, 2, -1)
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)


# Mixtures of experts.


def experts(
    op: str, tokens: int, count: int = 16, per_token: int = 2, width: int = 64, size: int = 32
) -> Case:  # fmt: skip
    """Tokens that choose among all experts but the last, whose weights are not-a-number."""

    def arrays():
        order = np.argsort(random(7, tokens, count - 1).astype(np.float32), -1)
        x, ids = jnp.asarray(random(0, tokens, width)), jnp.asarray(order[:, :per_token], jnp.int32)
        shapes = ((size, width), (size, width), (width, size))
        return x, ids, *(_poisoned(i + 1, count, *shape) for i, shape in enumerate(shapes))

    def apply(want):
        def one(x, ids, gate, up, down):
            facts = (x, ids, gate, jax.nn.silu)
            run = dispatch.implementation(op, facts, moe._tiled, want)
            return run(x, ids, gate, up, down, jax.nn.silu)

        return one

    return Case(
        op,
        f"{tokens} tokens",
        arrays,
        apply,
        against(lambda arrays: _experts(*arrays)),
        _after,
        lambda arrays: 2 * 3 * width * size * len(np.unique(arrays[1])),
    )


@functools.lru_cache(maxsize=3)
def _poisoned(seed: int, count: int, outs: int, width: int) -> jax.Array:
    w = random(seed, count, outs, width, scale=width**-0.5)
    w[-1] = np.nan
    return jnp.asarray(w)


def _experts(x, ids, gate, up, down) -> np.ndarray:
    x, ids = wide(x), np.asarray(ids)
    gate, up, down = map(np.asarray, (gate, up, down))
    out = np.zeros((*ids.shape, x.shape[1]))
    for expert in np.unique(ids):
        token, place = np.nonzero(ids == expert)
        g, u = x[token] @ wide(gate[expert]).T, x[token] @ wide(up[expert]).T
        out[token, place] = (g / (1 + np.exp(-g)) * u) @ wide(down[expert]).T
    return out


# Products of few rows.


def products(name: str, rows: int, outs: tuple[int, ...], width: int, gated: bool = False) -> Case:
    """Normed rows times weights; ``gated``: of a gated block."""
    settings = Settings(None, (1e-6, False), jax.nn.silu if gated else None)

    def arrays():
        weights = (jnp.asarray(random(i, n, width, scale=width**-0.5)) for i, n in enumerate(outs))
        return jnp.asarray(random(98, rows, width)), *weights, 1 + jnp.asarray(random(99, width, scale=0.125))

    def reference(x, *more):
        x = Normed(x, more[-1], *settings.norm).array()
        found = tuple(product(x, w) for w in more[:-1])
        return (settings.activation(found[0]) * found[1],) if settings.activation else found

    def apply(want):
        def one(x, *more):
            return dispatch.implementation("skinny", (x, more[:-1], settings), reference, want)(x, *more)

        return one

    def judge(arrays):
        x, *weights, norm = arrays
        x = wide(x)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * wide(norm)
        wanted = [times(x, w) for w in weights]
        if gated:
            wanted = [wanted[0] / (1 + np.exp(-wanted[0])) * wanted[1]]
        return lambda got: distance(np.hstack([wide(y) for y in got]), np.hstack(wanted))

    return Case("skinny", name, arrays, apply, judge, _after, lambda _: 2 * sum(outs) * width)


def _after(arrays, result):
    """The inputs, known only when all of a result is."""
    whole = jax.tree.leaves(jax.lax.optimization_barrier(result))
    nothing = sum(x.ravel()[0].astype(jnp.float32) for x in whole) * 0  # not for the compiler: it may be NaN
    return (arrays[0] + nothing.astype(arrays[0].dtype), *arrays[1:])


# Attention of packed rows, in training.


def packed(name: str, length: int, documents: int, heads: int = 4, groups: int = 2, size: int = 16) -> Case:
    """Documents of one size in a row, each causal."""
    scale = size**-0.5
    each = np.arange(length) * documents // length
    seen = (each[:, None] == each) & (np.arange(length)[:, None] >= np.arange(length))

    def arrays():
        shape = (1, groups, length, size)
        return (
            jnp.asarray(random(0, 1, length, heads, size)),
            jnp.asarray(random(1, *shape)),
            jnp.asarray(random(2, *shape)),
            jnp.asarray(seen[None]),
        )

    def reference(q, k, v, visible):
        k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
        return jax.nn.dot_product_attention(q, k, v, mask=visible[:, None], scale=scale, implementation="xla")

    def apply(want):
        def one(q, k, v, visible):
            run = dispatch.implementation("packed_attention", (q, k, v, scale, None), reference, want)
            return run(q, k, v, visible)

        return one

    def oracle(arrays):
        q, k, v = map(wide, arrays[:3])
        share = heads // groups
        out = [
            _softmax(q[0, :, h] @ k[0, h // share].T * scale, seen, None) @ v[0, h // share]
            for h in range(heads)
        ]
        return np.stack(out, 1)[None]

    reads = lambda arrays: 2 * sum(x.size for x in arrays[:3])  # noqa: E731
    return Case("packed_attention", name, arrays, apply, against(oracle), _after, reads)
