"""Products of few rows: interpreted they equal float64, a row's result does not depend on the others to the last bit
(NUM.3), and decoding with all kernels interpreted gives plain ids."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import registry, testing
from specjax.core import platform
from specjax.drafters import markov
from specjax.kernels import configs, dispatch, skinny as entry, skinny_kernel as kernel
from specjax.kernels.configs import Product
from specjax.layers.linear import Settings, gated, linear, linears, product
from specjax.layers.mlp import gelu_tanh
from specjax.layers.norm import Joined, Normed, rms_norm, rms_norm_offset

WIDTH = 96


def inputs(rows, outs, norm=None, pieces=1, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    make = lambda *s: jnp.asarray(rng.standard_normal(s) / s[-1] ** 0.5, dtype)  # noqa: E731
    x = 4 * make(64, WIDTH)[:rows] * np.repeat(1 + np.arange(pieces, dtype=dtype), WIDTH // pieces)
    weights = [make(n, WIDTH) for n in outs]
    return x, *weights, *(1 + make(WIDTH // pieces) for _ in range(pieces if norm else 0))


def interpreted(arrays, parts, norm=None, activation=None, pieces=1):
    count = len(arrays) - 1 - (pieces if norm is not None else 0)
    case = entry.case(arrays[0], arrays[1 : 1 + count], Settings(None, norm, activation, pieces=pieces))
    plan = kernel.Plan(16, 16, parts, 4, 2)
    return jax.jit(functools.partial(kernel.launch, case=case, plan=plan, interpret=True))(*arrays)


def exact(arrays, norm, activation, pieces=1):
    x, *rest = (np.asarray(a, np.float64) for a in arrays)
    if norm is not None:
        eps, offset = norm
        rest, norms = rest[:-pieces], rest[-pieces:]
        each = [p / np.sqrt((p**2).mean(-1, keepdims=True) + eps) for p in np.split(x, pieces, -1)]
        x = np.hstack([p * (w + offset) for p, w in zip(each, norms, strict=True)])
    found = [x @ w.T for w in rest]
    return found if activation is None else [np.asarray(activation(jnp.asarray(found[0]))) * found[1]]


@pytest.mark.parametrize(
    ("parts", "outs", "norm", "activation", "pieces"),
    [
        (1, (32, 48), None, None, 1),
        (2, (48, 48), (1e-6, True), jax.nn.silu, 1),
        (6, (32, 16, 16), (1e-6, False), None, 3),
        pytest.param(1, (48, 48), (1e-6, False), gelu_tanh, 1, marks=pytest.mark.long),
        pytest.param(3, (32, 48, 16), (1e-6, False), None, 1, marks=pytest.mark.long),
        pytest.param(2, (48,), (1e-6, True), None, 2, marks=pytest.mark.long),
    ],
)
def test_products_equal_float64_and_rows_are_independent(parts, outs, norm, activation, pieces):
    alone = None
    for rows in (1, 8, 17):
        arrays = inputs(rows, outs, norm, pieces)
        got = interpreted(arrays, parts, norm, activation, pieces)
        for x, y in zip(got, exact(arrays, norm, activation, pieces), strict=True):
            np.testing.assert_allclose(x, y, atol=3e-6, rtol=1e-6)
        first = [np.asarray(x)[0] for x in got]
        alone = alone or first
        jax.tree.map(np.testing.assert_array_equal, alone, first)


def test_layers_run_as_xla_on_a_cpu_and_as_the_kernel_when_asked():
    x, a, b, weight = inputs(6, (32, 32), (1e-6, False))
    rows = x.reshape(2, 3, WIDTH)
    for offset, plain in ((False, rms_norm), (True, rms_norm_offset)):
        left, normed = Normed(rows, weight, 1e-6, offset), plain(rows, weight, 1e-6)
        jax.tree.map(
            np.testing.assert_array_equal, linears(left, (a, b)), (product(normed, a), product(normed, b))
        )
        with dispatch.asking("interpret"):
            got = gated(left, a, b, jax.nn.silu), linear(rows, a.reshape(4, 8, WIDTH), jnp.ones((4, 8)))
        want = gated(left, a, b, jax.nn.silu), linear(rows, a.reshape(4, 8, WIDTH), jnp.ones((4, 8)))
        jax.tree.map(lambda u, v: np.testing.assert_allclose(u, v, rtol=1e-5, atol=1e-5), got, want)
    half = WIDTH // 2
    both = Joined(tuple(Normed(rows[..., at], weight[at], 1e-6) for at in (slice(half), slice(half, None))))
    with dispatch.asking("interpret"):
        got = linears(both, (a, b))
    jax.tree.map(
        lambda u, v: np.testing.assert_allclose(u, v, rtol=1e-5, atol=1e-5),
        got,
        linears(both.array(), (a, b)),
    )


def test_what_the_kernel_refuses_and_its_grids():
    case = lambda rows=8, outs=(4096,), width=4096, dtype=jnp.bfloat16: kernel.Case(  # noqa: E731
        rows, width, outs, jnp.dtype(dtype), jnp.dtype(dtype)
    )
    assert entry.refuse(case()) is None
    assert entry.refuse(case(dtype=jnp.float32)) is None
    for wrong in (case(rows=65), case(outs=(100,)), case(width=100)):
        assert entry.refuse(wrong)
        assert entry.beyond(wrong)
    assert entry.refuse(dataclasses.replace(case(width=96), normed=True, pieces=4))
    unlike = entry.case(jnp.ones((2, 32), jnp.bfloat16), (jnp.ones((16, 32)),), Settings())
    assert "alike" in entry.refuse(unlike)
    assert entry.beyond(unlike)
    for chip, (outs, width) in [
        (c, s) for c in configs.PRODUCT for s in (((4096,), 12288), ((512, 16), 576))
    ]:
        plans = [entry.plans(case(rows, outs, width), chip) for rows in (1, 17, 64)]
        assert plans[0] == plans[1] == plans[2]
        for plan in plans[0]:
            assert all(n % plan.rows == 0 for n in outs)
            assert width // plan.parts % plan.depth == 0
    assert kernel.plan(case(), Product(64, 128, 4, 4), 132) == kernel.Plan(64, 128, 4, 4, 4)
    wide = dataclasses.replace(case(outs=(24576,), width=12288), normed=True, pieces=3)
    assert kernel.plan(wide, Product(64, 128, 4, 4), 132).parts == 3  # a part lies within one piece


@pytest.mark.long
@pytest.mark.parametrize("method", ["eagle3", "dspark"])
def test_decoding_with_every_kernel_interpreted_gives_plain_ids(method):
    """The norm before heads and gated blocks, the target's and a drafter's best tokens, the walk."""
    plain = testing.tiny_params()
    cfg = registry.drafter(method).tiny(plain.meta.target_cfg)
    changes = {"markov": markov.Settings(16, "vanilla", 64)} if method == "dspark" else {}
    params = testing.tiny_drafter(plain, method, cfg=dataclasses.replace(cfg, **changes))
    prompts, options = [[1, 2, 3, 4, 5], [7, 8, 9]], {"max_new_tokens": 12}
    want = specjax.decode(plain, prompts, kernels="xla", **options)
    assert specjax.decode(params, prompts, kernels="interpret", **options).tokens == want.tokens


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(("outs", "activation"), [((4096, 1024, 1024), None), ((1536, 1536), jax.nn.silu)])
def test_on_the_device(outs, activation, dtype):
    rng = np.random.default_rng(1)
    make = lambda *s: jnp.asarray(rng.standard_normal(s) / s[-1] ** 0.5, dtype)  # noqa: E731
    weights, norm, x = tuple(make(n, 2048) for n in outs), 1 + make(2048), 4 * make(64, 2048)
    settings, alone = Settings(None, (1e-6, False), activation), None
    for rows in (1, 8, 17, 64):
        arrays = x[:rows], *weights, norm
        case = entry.case(x[:rows], weights, settings)
        entry.build(case, platform.backend())
        plan = entry._plan(case, platform.backend())
        got = jax.jit(functools.partial(kernel.launch, case=case, plan=plan))(*arrays)
        for u, v in zip(got, exact(arrays, (1e-6, False), activation), strict=True):
            u = np.asarray(u.astype(jnp.float32), np.float64)
            assert np.linalg.norm(u - v) / np.linalg.norm(v) < (1e-2 if dtype == jnp.bfloat16 else 1e-5)
        first = [np.asarray(u[0].astype(jnp.float32)) for u in got]
        alone = alone or first
        jax.tree.map(np.testing.assert_array_equal, alone, first)
