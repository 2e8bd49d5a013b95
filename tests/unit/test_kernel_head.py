"""A head of which the best id is wanted, and DSpark's walk: interpreted they find what XLA finds, ties and numbers that
are none included."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafters.markov import Markov, Settings, _walk, walk
from specjax.kernels import dispatch, head as head_entry, head_kernel, markov as markov_entry, markov_kernel
from specjax.layers.head import Cap, best, logits
from specjax.layers.norm import Normed

CAPS = [Cap(), Cap(2.0, 5.0, 200)]


def drawn(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize("cap", [CAPS[1], pytest.param(CAPS[0], marks=pytest.mark.long)])
def test_best_ids_of_a_streamed_head(cap):
    """NUM.3: the lowest of equal logits; NUM.1: a row with a logit that is no number is told by an infinite largest."""
    x, table = drawn(0, 2, 9, 64), drawn(1, 208, 64)
    table = table.at[150].set(table[7])
    x = x.at[0, 0].set(table[7] * 3).at[1, 2, 3].set(jnp.nan)
    want = jax.jit(lambda x, table: best(x, table, cap, lse=True))(x, table)
    with dispatch.asking("interpret"):
        got = jax.jit(lambda x, table: best(x, table, cap, lse=True))(x, table)
        normed = Normed(x, 1 + drawn(2, 64) / 8, 1e-6)
        close = jax.jit(lambda x, table: best(x, table, cap))(normed, table)[0]
    fine = np.isfinite(want[0])
    np.testing.assert_array_equal(fine, np.isfinite(got[0]))
    assert (~fine).sum() == 1
    np.testing.assert_array_equal(np.asarray(got[1])[fine], np.asarray(want[1])[fine])
    np.testing.assert_array_equal(want[1], jnp.argmax(logits(x, table, cap), -1))
    np.testing.assert_allclose(close[fine], logits(normed.array(), table, cap).max(-1)[fine], rtol=1e-5)
    for i in (0, 2):
        np.testing.assert_allclose(np.asarray(got[i])[fine], np.asarray(want[i])[fine], rtol=1e-5)


@pytest.mark.parametrize(
    ("batch", "after", "size", "mapped"),
    [(2, 64, 60, True), pytest.param(17, 48, 48, False, marks=pytest.mark.long)],
)
def test_walks(batch, after, size, mapped):
    """Every token corrects the next; equal logits give the lowest id; target ids of draft ids."""
    vocab, drafts, rank = 80, 3, 16
    p = Markov(drawn(0, vocab, rank), drawn(1, after, rank), None, None)
    scores = (2 * drawn(2, batch, drafts, size)).at[0, :, 3:5].set(50.0)
    p = p.replace(after=p.after.at[4].set(p.after[3]))
    ids = jnp.asarray(np.random.default_rng(3).permutation(vocab)[:size], jnp.int32) if mapped else None
    anchor, hidden = jnp.arange(batch, dtype=jnp.int32), drawn(4, batch, drafts, 8)
    run = lambda p, scores, anchor, hidden: walk(p, settings, hidden, scores, anchor, ids, None, None)  # noqa: E731
    settings = Settings(rank, "vanilla", vocab)
    want = _walk(p, settings, hidden, scores, anchor, ids, None, None)
    with dispatch.asking("interpret"):
        got = jax.jit(lambda *a: run(*a))(p, scores, anchor, hidden)
    for found in (got, jax.jit(run)(p, scores, anchor, hidden)):
        jax.tree.map(np.testing.assert_array_equal, found, want)


def test_what_they_refuse():
    head = head_kernel.Case(8, 4096, 151936, 151936, jnp.dtype(jnp.bfloat16))
    wrong = {"rows": 65, "width": 100, "vocab": 32003}
    assert head_entry.refuse(head) is None
    walk = markov_kernel.Case(1, 7, 256, 32000, 32000, 32000, jnp.dtype(jnp.bfloat16), False)
    assert markov_entry.refuse(walk) is None
    cases = [(head_entry, dataclasses.replace(head, **{k: v})) for k, v in wrong.items()]
    wrong = {"batch": 65, "rank": 6, "after": 32004, "size": 40000}
    for entry, case in cases + [
        (markov_entry, dataclasses.replace(walk, **{k: v})) for k, v in wrong.items()
    ]:
        assert entry.refuse(case)
        assert entry.beyond(case)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_on_the_device(dtype):
    x, table = drawn(0, 33, 1024).astype(dtype), drawn(1, 32000, 1024).astype(dtype)
    x = x.at[7, 3].set(jnp.nan)
    cap = Cap(softcap=30.0, size=31990)
    top, ids, lse = jax.jit(lambda *a: best(*a, cap, True))(x, table)
    wide = np.asarray(logits(x.astype(jnp.float32), table.astype(jnp.float32), cap))
    rows = np.asarray([i for i in range(33) if i != 7])
    assert not np.isfinite(top[7])
    np.testing.assert_allclose(np.asarray(top)[rows], wide[rows].max(-1), rtol=1e-3)
    np.testing.assert_allclose(wide[rows, np.asarray(ids)[rows]], wide[rows].max(-1), rtol=1e-3)
    np.testing.assert_allclose(np.asarray(lse)[rows], jax.nn.logsumexp(wide[rows], -1), rtol=1e-3)
    p = Markov(drawn(2, 32000, 64).astype(dtype), drawn(3, 32000, 64).astype(dtype), None, None)
    scores, settings = 9 * drawn(4, 2, 5, 32000), Settings(64, "vanilla", 32000)
    arrays = p, scores, jnp.asarray([3, 9], jnp.int32), jnp.zeros((2, 5, 8), dtype)
    got = jax.jit(lambda p, s, a, h: walk(p, settings, h, s, a, None, None, None))(*arrays)
    want = jax.jit(lambda p, s, a, h: _walk(p, settings, h, s, a, None, None, None))(*arrays)
    np.testing.assert_array_equal(got[0], want[0])
