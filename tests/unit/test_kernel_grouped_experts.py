"""Experts of many tokens: interpreted the kernels equal XLA's tiles, they lower for both GPU platforms, and the layer
takes them where there are more tokens than the kernel for few has room for."""

import functools

import expert_blocks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_blocks import inputs

from specjax.kernels import dispatch, experts_op, grouped_experts as kernel
from specjax.layers import moe
from specjax.layers.mlp import gelu_tanh

SMALL = kernel.Tiles(up=kernel.Tile(16, 32, 4, 2), down=kernel.Tile(32, 16, 4, 2))


interpreted = functools.partial(expert_blocks.interpreted, kernel, SMALL)


@pytest.mark.parametrize(
    ("n", "k", "experts", "d", "f"),
    [
        (130, 3, 5, 48, 80),  # sizes that the tiles do not divide, several tiles per expert
        pytest.param(70, 2, 6, 32, 48, marks=pytest.mark.long),
        pytest.param(65, 1, 100, 32, 16, marks=pytest.mark.long),  # more experts than choices
    ],
)
def test_equals_tiles_one_by_one(n, k, experts, d, f):
    """KRN.3"""
    x, ids, w = inputs(n, experts, d, f, k)
    want = jax.jit(moe._tiled, static_argnums=5)(x, ids, *w, jax.nn.silu)
    np.testing.assert_allclose(interpreted(x, ids, w), want, atol=1e-5)


def test_all_on_one_beside_what_is_no_number():
    """A row depends on itself alone, and experts that nobody chose are not read; bfloat16, another activation."""
    x, _, w = inputs(70, 6, 32, 16, dtype=jnp.bfloat16)
    ids = jnp.full((70, 2), 3, jnp.int32)
    got = interpreted(x, ids, w, gelu_tanh)
    np.testing.assert_allclose(got, moe._gathered(x, ids, *w, gelu_tanh), atol=2e-2)
    poison = lambda a: a.at[jnp.asarray([0, 1, 2, 4, 5])].set(jnp.nan)  # noqa: E731
    again = interpreted(x.at[1:].set(jnp.nan), ids, tuple(map(poison, w)), gelu_tanh)
    np.testing.assert_array_equal(again[0], got[0])


@pytest.fixture
def pretend(monkeypatch):
    """The table believes in a GPU, on which everything can be built."""
    monkeypatch.setattr(dispatch.platform, "backend", lambda: "cuda")
    monkeypatch.setattr(kernel, "_chosen", lambda case, name: kernel.choices(case, name)[0])
    dispatch._failure.cache_clear()
    yield
    dispatch._failure.cache_clear()
    dispatch._failed.clear()


@pytest.mark.parametrize(
    ("platform", "tokens", "calls"), [("cuda", 512, 2), ("rocm", 4096, 2), ("cpu", 512, 0)]
)
def test_the_layer_takes_them_beyond_few_tokens(pretend, platform, tokens, calls):
    """At the size of a 30B-A3B model; compiled for a CPU it is the reference."""
    case = kernel.Case(tokens, 8, 128, 2048, 768, jnp.dtype(jnp.bfloat16), jax.nn.silu)
    x, ids, *weights = experts_op.shapes(case)
    share = jax.ShapeDtypeStruct(ids.shape, jnp.float32)
    assert expert_blocks.calls(jax.jit(moe.experts), platform, x, share, ids, *weights) == calls


def test_what_is_refused(pretend):
    case = lambda **changes: kernel.Case(**{**dict(zip(  # noqa: E731
        ("tokens", "per_token", "experts", "width", "size"), (80, 2, 8, 32, 16), strict=True
    )), "dtype": jnp.dtype(jnp.bfloat16), "activation": jax.nn.silu, **changes})  # fmt: skip
    assert kernel.refuse(case()) is None
    assert "float32" in kernel.refuse(case(dtype=jnp.dtype(jnp.float32)))
    assert "multiples of 16" in kernel.refuse(case(width=40))
    assert "at most 65535" in kernel.refuse(case(tokens=1 << 23))


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "experts", "k"), [(65, 16, 4), (512, 128, 8), (4096, 64, 8)])
def test_on_the_device(tokens, experts, k):
    x, ids, w = inputs(tokens, experts, 256, 128, k, jnp.bfloat16)
    facts = (x, ids, w[0], jax.nn.silu)
    assert dispatch.choose("grouped_experts", *facts).implementation == "kernel"
    run = dispatch.implementation("grouped_experts", facts, moe._tiled)
    got, want = (jax.jit(f, static_argnums=5)(x, ids, *w, jax.nn.silu) for f in (run, moe._tiled))
    assert jnp.linalg.norm(got - want) < 1e-2 * jnp.linalg.norm(want)
