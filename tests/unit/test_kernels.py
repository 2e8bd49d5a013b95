"""Kernels: interpreted they equal a loop, they lower for both GPU platforms, and the table says what runs and why."""

import functools

import expert_blocks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_blocks import inputs

import specjax
from specjax.kernels import dispatch, experts as kernel, experts_op
from specjax.layers import moe
from specjax.layers.mlp import gelu_tanh

SMALL = kernel.Tiles(up=kernel.Tile(16, 32, 4, 2, lanes=2), down=kernel.Tile(32, 16, 4, 2, lanes=3))


interpreted = functools.partial(expert_blocks.interpreted, kernel, SMALL)


def loop(x, ids, gate, up, down):
    x, gate, up, down = (np.asarray(a, np.float64) for a in (x, gate, up, down))
    out = np.zeros((*ids.shape, x.shape[1]))
    for t, row in enumerate(np.asarray(ids)):
        for j, e in enumerate(row):
            g = gate[e] @ x[t]
            out[t, j] = down[e] @ (g / (1 + np.exp(-g)) * (up[e] @ x[t]))
    return out


@pytest.mark.parametrize(
    ("n", "k", "n_experts", "d", "f"),
    [
        (1, 1, 3, 32, 16),  # one token
        (3, 2, 32, 48, 80),  # slots are choices; sizes that the tiles do not divide
        (18, 3, 5, 32, 48),  # slots are experts; more tokens than one row tile
    ],
)
def test_experts_equal_a_loop(n, k, n_experts, d, f):
    x, ids, w = inputs(n, n_experts, d, f, k)
    np.testing.assert_allclose(interpreted(x, ids, w), loop(x, ids, *w), atol=1e-5)


def test_experts_in_bfloat16_and_another_activation():
    """The same roundings as XLA's path: the hidden values are in the weights' dtype, sums in float32."""
    x, _, w = inputs(4, 6, 32, 32, dtype=jnp.bfloat16)
    ids = jnp.asarray([[0, 5], [5, 2], [2, 0], [1, 4]], jnp.int32)
    got = interpreted(x, ids, w, gelu_tanh)
    np.testing.assert_allclose(got, moe._gathered(x, ids, *w, gelu_tanh), atol=2e-2)


def test_experts_named_twice_and_all_on_one():
    x, _, w = inputs(5, 32, 32, 16)
    ids = jnp.full((5, 2), 3, jnp.int32)
    np.testing.assert_allclose(interpreted(x, ids, w), loop(x, ids, *w), atol=1e-5)


def test_experts_of_a_token_do_not_depend_on_its_neighbours():
    """Nor on experts that nobody chose: bits stay the same beside not-a-number."""
    x, _, w = inputs(3, 6, 32, 16)
    ids = jnp.asarray([[0, 2], [2, 3], [0, 3]], jnp.int32)
    want = interpreted(x, ids, w)
    poison = lambda a: a.at[jnp.asarray([1, 4, 5])].set(jnp.nan)  # noqa: E731
    got = interpreted(x.at[1:].set(jnp.nan), ids, tuple(map(poison, w)))
    np.testing.assert_array_equal(got[0], want[0])


@pytest.fixture
def pretend(monkeypatch):
    """The table believes in a GPU, on which everything can be built."""
    monkeypatch.setattr(dispatch.platform, "backend", lambda: "cuda")
    monkeypatch.setattr(kernel, "build", lambda case, platform: None)
    dispatch._failure.cache_clear()
    yield monkeypatch
    dispatch._failure.cache_clear()
    dispatch._failed.clear()


@pytest.mark.parametrize(("platform", "calls"), [("cuda", 3), ("rocm", 3), ("cpu", 0)])
@pytest.mark.parametrize("tokens", [1, 16])
def test_experts_lower_to_triton(pretend, platform, calls, tokens):
    """The block as layers call it, at the size of a 30B-A3B model; compiled for a CPU it is the reference."""
    case = kernel.Case(tokens, 8, 128, 2048, 768, jnp.dtype(jnp.bfloat16), jax.nn.silu)
    x, ids, *weights = experts_op.shapes(case)
    share = jax.ShapeDtypeStruct(ids.shape, jnp.float32)
    assert expert_blocks.calls(jax.jit(moe.experts), platform, x, share, ids, *weights) == calls


def test_gradients_are_the_reference_s(pretend):
    x, _, w = inputs(3, 4, 32, 16, dtype=jnp.bfloat16)
    ids, share = jnp.asarray([[0, 2], [2, 3], [0, 1]], jnp.int32), jnp.full((3, 2), 0.5)
    loss = lambda x, gate: moe.experts(x, share, ids, gate, *w[1:]).astype(jnp.float32).sum()  # noqa: E731
    got = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, w[0])
    pretend.setenv("SPECJAX_KERNELS", "off")
    want = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, w[0])
    jax.tree.map(np.testing.assert_array_equal, got, want)


def facts(tokens=4, k=2, dtype=jnp.bfloat16, width=32):
    s = jax.ShapeDtypeStruct
    return s((tokens, width), dtype), s((tokens, k), jnp.int32), s((8, 16, width), dtype), jax.nn.silu


def test_a_cpu_runs_references_and_says_so():
    choice = dispatch.choose("experts", *facts())
    assert (choice.implementation, "cpu" in choice.reason) == ("reference", True)
    assert [k.op for k in specjax.doctor().kernels] == list(dispatch.KERNELS)


def test_what_the_table_says_on_a_gpu(pretend):
    said = lambda **changes: dispatch.choose("experts", *facts(**changes))  # noqa: E731
    assert said().implementation == "kernel"
    assert "float32" in said(dtype=jnp.float32).reason
    assert "65 tokens" in said(tokens=65).reason
    assert "multiples of 16" in said(width=40).reason
    pretend.setenv("SPECJAX_KERNELS", "off")
    assert "SPECJAX_KERNELS" in said().reason


def test_a_kernel_that_cannot_be_built_is_replaced_with_a_warning(pretend):
    def fails(case, platform):
        raise RuntimeError("shared memory\nand more")

    pretend.setattr(kernel, "build", fails)
    reference = lambda: None  # noqa: E731
    with pytest.warns(
        UserWarning, match="not built for cuda: RuntimeError: shared memory; the reference runs"
    ):
        assert dispatch.implementation("experts", facts(), reference) is reference
    assert dispatch.implementation("experts", facts(), reference) is reference  # and does not warn again
    assert "shared memory" in dispatch.explain("experts").reason


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 16, 4), (5, 16, 4), (40, 16, 4), (10, 128, 8)])
def test_experts_on_the_device(tokens, experts, k):
    """Also where the list of choices is read in parts, the last of which is shorter."""
    x, ids, w = inputs(tokens, experts, 256, 128, k, jnp.bfloat16)
    facts = (x, ids, w[0], jax.nn.silu)
    assert dispatch.choose("experts", *facts).implementation == "kernel"
    run = dispatch.implementation("experts", facts, moe._gathered)
    got, want = (jax.jit(f, static_argnums=5)(x, ids, *w, jax.nn.silu) for f in (run, moe._gathered))
    assert jnp.linalg.norm(got - want) < 1e-2 * jnp.linalg.norm(want)
    alone = jax.jit(run, static_argnums=5)(x.at[1:].set(jnp.nan), ids, *w, jax.nn.silu)
    np.testing.assert_array_equal(alone[0], got[0])
