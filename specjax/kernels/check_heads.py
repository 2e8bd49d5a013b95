"""Cases of heads of which the best id is wanted and of DSpark's walk, with float64 oracles."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax.drafters.markov import Markov, best_walk
from specjax.kernels import dispatch
from specjax.kernels.check_cases import Case, distance, random, times, wide
from specjax.layers.head import Cap, _facts, _reference as plain_best

#: Rows of the largest case.
MOST = 64


def small() -> list[Case]:
    """One of each, seconds on any device."""
    return [
        best("17 rows, soft cap, padding", 17, 96, 64, Cap(softcap=30.0, size=90)),
        walk("rank 16", 2, 96, 16),
    ]


def real() -> list[Case]:
    """Shapes of an 8B model."""
    heads = [best(f"{rows} rows", rows, 151936, 4096, Cap()) for rows in (1, 8, 16, 64)]
    return [*heads, walk("rank 256", 1, 151936, 256, drafts=7)]


def _after(x, result):
    """``x`` with a dependence on a result that changes nothing."""
    first = result.ravel()[0].astype(x.dtype)
    return x + jnp.where(jnp.isfinite(first), first * 0, 0)


def best(name: str, rows: int, vocab: int, width: int, cap: Cap) -> Case:
    """Rows before a head; one holds a number that is none. The error is infinite if another id than the best, or one as
    good in bfloat16, is found."""

    def arrays():
        x = random(0, MOST, width)[:rows]
        if rows > 1:
            x[1, 3] = np.nan
        return jnp.asarray(x), _table(vocab, width)

    def apply(want):
        plain = functools.partial(plain_best, cap=cap, lse=True)
        return lambda x, table: dispatch.implementation("head", _facts(x, table, cap, True), plain, want)(
            x, table
        )

    def judge(_):
        fine = np.arange(rows) != 1 if rows > 1 else np.ones(rows, bool)
        out = _logits(vocab, width)[:rows][fine] * cap.scale
        out = (cap.softcap * np.tanh(out / cap.softcap) if cap.softcap else out)[:, : cap.size]
        largest = out.max(-1)
        sums = largest + np.log(np.exp(out - largest[:, None]).sum(-1))

        def error(got):
            top, ids, lse = (np.asarray(x, np.float64) for x in got)
            if np.isfinite(top[~fine]).any() or (ids >= out.shape[1])[fine].any():
                return float("inf")
            chosen = np.take_along_axis(out, ids[fine].astype(int)[:, None], 1)[:, 0]
            return max(distance(top[fine], largest), distance(chosen, largest), distance(lse[fine], sums))

        return error

    chain = lambda arrays, got: (_after(arrays[0], got[0]), arrays[1])  # noqa: E731
    return Case("head", name, arrays, apply, judge, chain, lambda _: 2 * vocab * width)


@functools.lru_cache(maxsize=1)
def _table(vocab: int, width: int) -> jax.Array:
    return jnp.asarray(random(1, vocab, width, scale=width**-0.5))


@functools.lru_cache(maxsize=1)
def _logits(vocab: int, width: int) -> np.ndarray:
    """Of as many rows as any case has, once for all of them."""
    return times(wide(random(0, MOST, width)), _table(vocab, width))


def walk(name: str, batch: int, vocab: int, rank: int, drafts: int = 4) -> Case:
    """Drafts whose logits are corrected by the one before; the error is infinite where a token is not the best, or as
    good in bfloat16, of logits that its own predecessor corrects."""

    def arrays():
        tables = (jnp.asarray(random(seed, vocab, rank, scale=rank**-0.5)) for seed in (0, 1))
        logits = jnp.asarray(random(2, batch, drafts, vocab, scale=3.0).astype(np.float32))
        return *tables, logits, jnp.arange(3, 3 + batch, dtype=jnp.int32)

    def apply(want):
        def one(before, after, logits, anchor):
            with dispatch.asking(want):
                return best_walk(Markov(before, after, None, None), logits, anchor, None)[0]

        return one

    def judge(arrays):
        before, after, logits, anchor = map(wide, arrays)

        def error(got):
            got = np.asarray(got)
            previous = np.concatenate([anchor.astype(int)[:, None], got[:, :-1]], 1)
            total = logits + before[previous] @ after.T
            chosen = np.take_along_axis(total, got[..., None], -1)[..., 0]
            return distance(chosen, total.max(-1))

        return error

    def chain(arrays, got):
        last = got[:, -1]
        return (*arrays[:3], jnp.where(last < 0, last, arrays[3]))  # the anchor: no id is below 0

    return Case(
        "markov", name, arrays, apply, judge, chain, lambda _: drafts * vocab * (2 * rank + 4 * batch)
    )
