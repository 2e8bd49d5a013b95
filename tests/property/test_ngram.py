"""The n-gram drafter against the definition, written as the loops it avoids."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from specjax.drafters import ngram
from specjax.types import Ctx

SIZE = 20  # buffer length T of every case, so that each setting compiles once
ROWS = 4


def naive(tokens, cfg, k):
    """Longest suffix first; among its earlier occurrences the first or the last one."""
    total = len(tokens)
    for n in range(min(cfg.lookup_max, total - 1), cfg.lookup_min - 1, -1):
        starts = [s for s in range(total - n) if tokens[s : s + n] == tokens[total - n :]]
        if starts:
            start = starts[0] if cfg.match == "earliest" else starts[-1]
            return tokens[start + n : start + n + k]
    return []


@functools.partial(jax.jit, static_argnums=(0, 1))
def propose(cfg, k, tokens, length):
    ctx = Ctx(tokens, length, tokens[:, 0], length > 0, None, None)
    proposal, _ = ngram.draft(None, None, cfg, k, (), ctx, None)
    assert proposal.q is None
    assert proposal.point is None
    return proposal.tokens, proposal.count


def drafts(cfg, k, rows, garbage=0):
    """Drafted tokens per row, from a buffer filled up with ``garbage``."""
    buffer = np.full((len(rows), SIZE), garbage, np.int32)
    for line, row in zip(buffer, rows, strict=True):
        line[: len(row)] = row
    tokens, count = propose(cfg, k, buffer, np.array([len(r) for r in rows], np.int32))
    assert tokens.shape == (len(rows), k)
    assert tokens.dtype == count.dtype == np.int32
    assert np.all((count >= 0) & (count <= k))
    return [list(map(int, t[:c])) for t, c in zip(np.asarray(tokens), np.asarray(count), strict=True)]


SETTINGS = [(4, 3, 1), (1, 1, 1), (7, 5, 5), (3, 4, 2), (8, 30, 1)]


@pytest.mark.parametrize("match", ["recent", "earliest"])
@pytest.mark.parametrize(("k", "high", "low"), SETTINGS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_equals_definition(match, k, high, low, data):
    """NGR.2: every row of a ragged batch, over alphabets so small that occurrences overlap; whatever lies
    beyond a row's length has no effect."""
    letters = st.integers(0, data.draw(st.integers(0, 2)))
    rows = data.draw(st.lists(st.lists(letters, min_size=1, max_size=SIZE), min_size=ROWS, max_size=ROWS))
    cfg = ngram.Config(k, high, low, match)
    expected = [naive(row, cfg, k) for row in rows]
    for garbage in (0, 1, 2**31 - 1, -7):
        assert drafts(cfg, k, rows, garbage) == expected


@settings(max_examples=80, deadline=None, derandomize=True)
@given(row=st.lists(st.integers(0, 3), min_size=1, max_size=SIZE))
@example(row=[0])
def test_tie_rules_agree_on_the_length_of_the_match(row):
    """Both rules look for the longest n-gram first, so they find something in the same cases."""
    recent, earliest = (ngram.Config(4, 3, 1, m) for m in ("recent", "earliest"))
    assert bool(drafts(recent, 4, [row])[0]) == bool(drafts(earliest, 4, [row])[0])
