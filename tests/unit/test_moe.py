"""Experts: both ways to compute them equal a loop, and no token depends on its neighbours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.layers import moe
from specjax.layers.mlp import geglu, gelu_tanh


def fast(fn):
    """Compiled with less optimisation, which takes less time than it saves."""
    return jax.jit(fn, compiler_options={"xla_backend_optimization_level": 0})


def weights(n_experts=6, d=16, f=8, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    make = lambda *s: jnp.asarray(rng.standard_normal(s) / s[-1] ** 0.5, dtype)  # noqa: E731
    return make(n_experts, f, d), make(n_experts, f, d), make(n_experts, d, f)


def tokens(n, d=16, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(n).standard_normal((n, d)), dtype)


def loop(x, w, ids, gate, up, down):
    x, w, gate, up, down = (np.asarray(a, np.float64) for a in (x, w, gate, up, down))
    out = np.zeros_like(x)
    for t in range(len(x)):
        for j, e in enumerate(np.asarray(ids)[t]):
            g = gate[e] @ x[t]
            out[t] += w[t, j] * (down[e] @ (g / (1 + np.exp(-g)) * (up[e] @ x[t])))
    return out


@pytest.mark.parametrize("way", ["_gathered", "_tiled"])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (3, 2), (40, 2), (40, 6)])
def test_equals_a_loop_over_tokens(monkeypatch, way, n, k):
    apply = getattr(moe, way)
    monkeypatch.setattr(moe, "_gathered", apply)
    monkeypatch.setattr(moe, "_tiled", apply)
    rng = np.random.default_rng(k)
    ids = jnp.asarray(np.stack([rng.permutation(6)[:k] for _ in range(n)]), jnp.int32)
    w = jnp.asarray(rng.uniform(size=(n, k)), jnp.float32)
    got = fast(moe.experts)(tokens(n), w, ids, *weights())
    np.testing.assert_allclose(got, loop(tokens(n), w, ids, *weights()), atol=1e-5)


@pytest.mark.parametrize("way", ["_gathered", "_tiled"])
def test_another_activation(monkeypatch, way):
    """An expert that stands alone with weight one is a plain gated block."""
    apply = getattr(moe, way)
    monkeypatch.setattr(moe, "_gathered", apply)
    monkeypatch.setattr(moe, "_tiled", apply)
    gate, up, down = weights()
    ids, one = jnp.full((5, 1), 2, jnp.int32), jnp.ones((5, 1))
    got = fast(lambda x: moe.experts(x, one, ids, gate, up, down, gelu_tanh))(tokens(5))
    want = fast(geglu)(tokens(5)[None], gate[2], up[2], down[2])[0]
    np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("n", [7, 130])
def test_all_tokens_on_one_expert(n):
    """Nothing is dropped however uneven the choice is."""
    ids = jnp.full((n, 1), 5, jnp.int32)
    got = fast(moe.experts)(tokens(n), jnp.ones((n, 1)), ids, *weights())
    np.testing.assert_allclose(got, loop(tokens(n), np.ones((n, 1)), ids, *weights()), atol=1e-5)


def test_rows_are_independent():
    """The same token gives the same bits beside any other tokens, not-a-number included."""
    x, router = tokens(12), tokens(6)

    @fast
    def run(x):
        w, ids = moe.route(x, router, 2, True)
        return moe.experts(x, w, ids, *weights())

    a = run(x)
    b = run(x.at[3:].set(-x[3:] * 2))
    c = run(x.at[3:].set(jnp.nan))
    np.testing.assert_array_equal(a[:3], b[:3])
    np.testing.assert_array_equal(a[:3], c[:3])


def test_router_ties_go_to_the_lower_index():
    w, ids = moe.route(jnp.ones((1, 4)), jnp.zeros((6, 4)), 3, False)
    assert ids.tolist() == [[0, 1, 2]]
    np.testing.assert_allclose(w, 1 / 6, rtol=1e-6)
    w, _ = moe.route(jnp.ones((1, 4)), jnp.zeros((6, 4)), 3, True)
    np.testing.assert_allclose(w, 1 / 3, rtol=1e-6)


def test_router_is_float32_for_bfloat16_tokens():
    """NUM.2"""
    x, router = tokens(4, dtype=jnp.bfloat16), tokens(6, dtype=jnp.bfloat16)
    w, ids = moe.route(x, router, 2, True)
    assert w.dtype == jnp.float32
    out = fast(moe.experts)(x, w, ids, *weights(dtype=jnp.bfloat16))
    assert out.dtype == jnp.bfloat16
    want = loop(x, w, ids, *weights(dtype=jnp.bfloat16))
    np.testing.assert_allclose(np.asarray(out, np.float32), want, atol=0.02, rtol=0.02)
