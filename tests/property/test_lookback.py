"""How far a copy is worth drafting: the vectorised estimate against a plain re-derivation."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, strategies as st

from specjax.drafters import lookback, ngram
from specjax.types import Ctx

COSTS, ROWS = ((3, 1.75), (7, 2.0)), 3
hit_rates = jax.jit(lookback.hit_rates, static_argnums=(2, 3))


@functools.partial(jax.jit, static_argnums=0)
def worthwhile(k, chance, run):
    return lookback.worthwhile(COSTS, k, chance, run)


def best_match(row, end, longest, recent):
    """(match length, index of the continuation) of the suffix that ends at index ``end``."""
    for n in range(min(longest, end + 1), 0, -1):
        starts = [s for s in range(end - n + 1) if row[s : s + n] == row[end - n + 1 : end + 1]]
        if starts:
            return n, (starts[-1] if recent else starts[0]) + n
    return 0, 0


def oracle_rates(row, longest, recent):
    rates = []
    for n in range(1, longest + 1):
        seen = hits = 0
        for end in range(len(row) - 2, max(-1, len(row) - 2 - lookback.WINDOW), -1):
            found, follow = best_match(row, end, longest, recent)
            if found == n:
                seen += 1
                hits += row[follow] == row[end + 1]
        prior = lookback.PRIOR[min(n, 3) - 1] * lookback.PRIOR_WEIGHT
        rates.append((prior + hits) / (lookback.PRIOR_WEIGHT + seen))
    return rates


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=48), min_size=1, max_size=3),
    st.sampled_from([1, 3, 4]),
    st.booleans(),
)
def test_rates_equal_the_definition(rows, longest, recent):
    rows = [rows[i % len(rows)] for i in range(ROWS)]  # one shape, so that each setting compiles once
    buffer = np.full((ROWS, 48), 1, np.int32)  # garbage beyond the length must not count
    for i, row in enumerate(rows):
        buffer[i, : len(row)] = row
    got = hit_rates(buffer, np.array([len(r) for r in rows], np.int32), longest, recent)
    np.testing.assert_allclose(got, [oracle_rates(r, longest, recent) for r in rows], rtol=1e-6)


@given(st.lists(st.floats(0.01, 0.99), min_size=3, max_size=3), st.integers(0, 3), st.integers(1, 9))
def test_width_maximises_expected_tokens_per_cost(chance, run, k):
    got = int(worthwhile(k, np.array([chance], np.float32), np.array([run], np.int32))[0])
    gains = {0: 1.0}
    for w in sorted({w for w, _ in COSTS if w < k} | {k}):
        steps = [chance[min(run - 1 + i, 2)] for i in range(w)]
        price = next((c for x, c in COSTS if x >= w), COSTS[-1][1])
        gains[w] = (1 + sum(itertools.accumulate(steps, lambda a, b: a * b))) / price
    if run == 0:
        assert got == 0
    else:
        assert gains[got] >= max(gains.values()) - 1e-5


def draft(row, k=7):
    buffer = np.zeros((1, 128), np.int32)
    buffer[0, : len(row)] = row
    length = jnp.array([len(row)], jnp.int32)
    ctx = Ctx(jnp.asarray(buffer), length, length, length > 0, None, None)
    return ngram.draft(None, None, ngram.default("cpu"), k, (), ctx, None)[0]


def test_a_copying_row_drafts_wide_and_a_disappointing_one_not_at_all():
    """PRF.1: a drafter that keeps failing must cost next to nothing."""
    copying = list(range(20, 40)) + list(range(20, 32))
    assert int(draft(copying).count[0]) == 7
    failing = [x for i in range(12) for x in (5, 40 + i)] + [5]  # every match of "5" was followed by news
    assert int(draft(failing).count[0]) == 0


def test_an_explicit_config_drafts_whenever_it_matches():
    cfg = ngram.config({"num_speculative_tokens": 2, "prompt_lookup_max": 1})
    buffer = jnp.asarray([[5, 40, 5, 41, 5, 42, 5, 0]], jnp.int32)
    length = jnp.array([7], jnp.int32)
    ctx = Ctx(buffer, length, length, length > 0, None, None)
    assert int(ngram.draft(None, None, cfg, 2, (), ctx, None)[0].count[0]) == 2
