"""Attention of training: what packed rows see, and that context and own keys are one softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import packing
import pytest

from specjax.train.attention import attend_packed, same_document, take_rows, visible

BATCH = packing.packed(packing.random_rows(9, [[5, 4], [7], [1, 2, 6]]), 10)
ROWS = jnp.asarray([[0, 3, 6, 9], [6, 2, 2, 8], [0, 1, 5, 8]])


def dense(rows: np.ndarray, ahead: int, window: int | None) -> np.ndarray:
    """The mask spelled out."""
    doc, pos = np.asarray(BATCH.doc), np.asarray(BATCH.pos)
    out = np.zeros((*rows.shape, doc.shape[1]), bool)
    for r, n in np.ndindex(*rows.shape):
        for s in range(doc.shape[1]):
            t = rows[r, n]
            near = window is None or pos[r, t] + ahead - pos[r, s] < window
            out[r, n, s] = doc[r, t] >= 0 and doc[r, s] == doc[r, t] and s <= t and near
    return out


@pytest.mark.parametrize("rows", [None, ROWS], ids=["all", "some"])
@pytest.mark.parametrize(("ahead", "window"), [(0, None), (0, 3), (2, 3), (5, 3), (2, None)])
def test_masks_are_those_spelled_out(rows, ahead, window):
    """PEER.13: documents, causality, and windows seen from a later step."""
    index = np.tile(np.arange(10), (3, 1)) if rows is None else np.asarray(rows)
    assert np.array_equal(visible(BATCH, rows, ahead, window), dense(index, ahead, window))
    doc = np.asarray(BATCH.doc)
    same = np.take_along_axis(doc, index, 1)[:, :, None] == doc[:, None]
    assert np.array_equal(
        same_document(BATCH, rows), same & (np.take_along_axis(doc, index, 1) >= 0)[..., None]
    )


def arrays(own: int, dtype=jnp.float32):
    rng = np.random.default_rng(1)
    make = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)  # noqa: E731
    kept = tuple((make(3, 4, 2, 6), make(3, 4, 2, 5)) for _ in range(own))
    return make(3, 4, 4, 6), make(3, 10, 2, 6), make(3, 10, 2, 5), kept


def joined(q, keys, values, own, softcap):
    """float64, one row and head at a time, over the keys put side by side."""
    seen, out = dense(np.asarray(ROWS), 0, None), np.zeros((3, 4, 4, 5))
    q, keys, values, own = jax.tree.map(lambda x: np.asarray(x, np.float64), (q, keys, values, own))
    for r, n, h in np.ndindex(3, 4, 4):
        mine = [(k[r, n, h // 2], v[r, n, h // 2]) for k, v in own]
        pairs = [(keys[r, s, h // 2], values[r, s, h // 2]) for s in np.flatnonzero(seen[r, n])] + mine
        if pairs:
            scores = np.array([k @ q[r, n, h] for k, _ in pairs]) * 0.5
            scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
            weights = np.exp(scores - scores.max())
            out[r, n, h] = weights @ np.array([v for _, v in pairs]) / weights.sum()
    return out


@pytest.mark.parametrize("own", [0, 1, 3])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_attention_is_one_softmax_over_both_sets(own, softcap):
    """PEER.10, BAT.5: rows of padding, which see nothing, give zeros or what is their own."""
    q, keys, values, kept = arrays(own)
    got = attend_packed(q, keys, values, visible(BATCH, ROWS), kept, 0.5, softcap)
    np.testing.assert_allclose(got, joined(q, keys, values, kept, softcap), atol=1e-6)


def test_gradients_are_finite_and_those_of_the_joined_form():
    """PEER.15, BAT.5: against the same attention over keys that were really joined."""
    q, keys, values, kept = arrays(2)
    seen = visible(BATCH, ROWS)

    def ours(parts):
        q, keys, values, kept = parts
        return jnp.sum(jnp.sin(attend_packed(q, keys, values, seen, kept, 0.5)))

    def plain(parts):
        q, keys, values, kept = parts

        def wide(x, mine):
            spread = jnp.broadcast_to(x[:, None], (3, 4, *x.shape[1:]))
            return jnp.concatenate([spread, jnp.stack(mine, 2)], 2)

        k, v = wide(keys, [k for k, _ in kept]), wide(values, [v for _, v in kept])
        k, v = jnp.repeat(k, 2, 3), jnp.repeat(v, 2, 3)
        scores = jnp.einsum("rnhc,rnshc->rnhs", q, k, precision="highest") * 0.5
        mask = jnp.concatenate([seen, jnp.ones((3, 4, 2), bool)], -1)[:, :, None]
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), -1)
        return jnp.sum(jnp.sin(jnp.einsum("rnhs,rnshc->rnhc", weights, v, precision="highest")))

    parts = (q, keys, values, kept)
    got, want = jax.grad(ours)(parts), jax.grad(plain)(parts)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want)
    padding = jnp.asarray([[9] * 4] * 3)  # of the first two rows
    nothing = jax.grad(lambda q: jnp.sum(attend_packed(q, keys, values, visible(BATCH, padding), (), 0.5)))(q)
    assert np.all(np.isfinite(nothing))
    assert not np.any(nothing[:2])


def test_low_precision():
    """NUM.2: bfloat16 in and out, close to float32."""
    q, keys, values, kept = arrays(2, jnp.bfloat16)
    got = attend_packed(q, keys, values, visible(BATCH, ROWS), kept, 0.5)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), joined(q, keys, values, kept, None), atol=0.05)


def test_rows_beyond_the_end_are_the_last():
    x = jnp.arange(8).reshape(2, 4)
    assert np.array_equal(take_rows(x, jnp.asarray([[0, 9], [3, 1]])), [[0, 3], [7, 5]])
