"""KV injection: interpreted it equals the reference for all layers at once, and the table says what runs."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.kernels import configs, dispatch, kv_injection as entry, kv_injection_kernel as kernel
from specjax.kernels.configs import Injection, Projection
from specjax.kernels.kv_injection_op import Heads, Projections, inject, reference
from specjax.layers.rope import RopeConfig

PLAIN = Heads(RopeConfig(16, 1e4), 1e-6)
SPLIT = Injection({16: Projection(16, 16, 2, 4, 2)}, tokens=4)


def inputs(heads, batch=2, block=3, width=32, layers=2, groups=2, size=16, slots=9, own=True, bias=False, norm=True,
           dtype=jnp.float32):  # fmt: skip
    """Rows keep none, some or all of their block; one row's block ends beyond the buffer."""
    rng = np.random.default_rng(block)
    make = lambda *s: jnp.asarray(rng.standard_normal(s) / s[-1] ** 0.5, dtype)  # noqa: E731

    def layer():
        return Projections(
            k=make(groups, size, width),
            v=make(groups, size, width) if own else None,
            k_bias=make(groups, size) if bias else None,
            v_bias=make(groups, size) if bias and own else None,
            k_norm=1 + make(size) if norm else None,
        )

    cache = lambda: (make(batch, groups, slots, size), make(batch, groups, slots, size))  # noqa: E731
    start = rng.integers(0, slots - block + 1, batch)
    start[-1] = slots - 1
    pos = jnp.asarray(start[:, None] + np.arange(block), jnp.int32)
    keep = jnp.asarray([block, *rng.integers(0, block, batch)][-batch:][::-1], jnp.int32).at[-1].set(block)
    caches, weights = tuple(cache() for _ in range(layers)), tuple(layer() for _ in range(layers))
    return 4 * make(batch, block, width), weights, caches, pos, keep


def interpreted(arrays, heads, tiles):
    case = entry.case(*arrays[:3], heads)
    return jax.jit(lambda *a: kernel.launch(*a, case=case, tiles=tiles, interpret=True))(*arrays)


def compare(heads, tiles, atol=3e-6, **changes):
    arrays = inputs(heads, **changes)
    got = interpreted(arrays, heads, tiles)
    want = jax.jit(lambda *a: reference(*a, heads=heads))(*arrays)
    wide = lambda tree: [np.asarray(a, np.float64) for a in jax.tree.leaves(tree)]  # noqa: E731
    for x, y, before in zip(wide(got), wide(want), wide(arrays[2]), strict=True):
        np.testing.assert_allclose(x, y, atol=atol)
        assert (y != before).any()


def test_injection_in_parts_equals_the_reference():
    compare(PLAIN, SPLIT)


@pytest.mark.long
@pytest.mark.parametrize(
    ("heads", "tiles", "changes"),
    [
        (PLAIN, Injection({}, tokens=2), {}),  # products by XLA
        (Heads(RopeConfig(16, 1e4, span=32), 1e-6, True, True), SPLIT, {"size": 32, "own": False, "batch": 1}),
        (Heads(RopeConfig(16, 1e4), 1e-6), SPLIT, {"size": 48, "bias": True, "norm": False}),  # partial rotation
        (Heads(RopeConfig(64, 1e4, kind="yarn", factor=4.0, attention_factor=1.2), 1e-5),
         Injection({99: Projection(64, 32, 1, 4, 2)}, tokens=4),
         {"size": 64, "groups": 1, "layers": 1, "batch": 22, "block": 3}),  # 66 tokens: more than one tile
    ],
)  # fmt: skip
def test_injections_equal_the_reference(heads, tiles, changes):
    compare(heads, tiles, **changes)


@pytest.mark.long
def test_bfloat16_and_values_that_are_not_finite():
    """NUM.1, NUM.2: rounded once where the reference rounds after every step; infinity is told by its key."""
    compare(PLAIN, SPLIT, atol=4e-2, dtype=jnp.bfloat16)
    x, *rest = inputs(PLAIN)
    arrays = x.at[-1, 0, 0].set(jnp.inf), *rest
    for got in (interpreted(arrays, PLAIN, SPLIT), reference(*arrays, heads=PLAIN)):
        for keys, values in got:
            assert np.isfinite(values).all()
            bad = np.isnan(keys).any((1, 3))
            np.testing.assert_array_equal(np.argwhere(bad), [[1, 8]])


def facts(heads=PLAIN, **changes):
    arrays = jax.eval_shape(lambda: inputs(heads, **({"dtype": jnp.bfloat16} | changes))[:3])
    return *arrays, heads


def test_on_a_cpu_the_reference_runs(monkeypatch):
    arrays = inputs(PLAIN)
    got, want = inject(*arrays, heads=PLAIN), reference(*arrays, heads=PLAIN)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    with pytest.raises(ValueError, match="kv_injection: the Pallas kernel is asked for"):
        inject(*arrays, heads=PLAIN, implementation="pallas")


def test_what_the_kernels_refuse_and_smaller_tiles(monkeypatch):
    refused = lambda *facts: entry.refuse(entry.case(*facts))  # noqa: E731
    assert refused(*facts()) is None
    assert "float32" in refused(*facts(dtype=jnp.float32))
    assert "multiples of 16" in refused(*facts(width=40))
    assert "17 layers" in refused(*facts(layers=17))
    x, layers, caches, _ = facts()
    other = layers[1].replace(k_norm=None)
    assert "different shapes" in refused(x, (layers[0], other), caches, PLAIN)
    assert "pairs 4 channels apart" in refused(*facts(Heads(RopeConfig(4, span=8), 1e-6)))

    tried = []

    def compiles(case, tiles):
        tried.append(tiles)
        if len(tried) < 2:
            raise RuntimeError("out of registers")

    monkeypatch.setattr(entry, "compile_tiles", compiles)
    monkeypatch.setattr(dispatch.platform, "backend", lambda: "cuda")
    monkeypatch.setattr(entry, "_built", {})
    with contextlib.ExitStack() as stack:
        stack.callback(dispatch._failure.cache_clear)
        assert dispatch.choose("kv_injection", *facts()).implementation == "kernel"
        assert tried == list(configs.injection("default"))[:2]
        assert entry._tiles(entry.case(*facts()), "cuda") == tried[1]


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 8, 64, 700])
def test_on_the_device(batch):
    changes = {
        "batch": batch,
        "block": 2,
        "width": 1024,
        "layers": 3,
        "size": 128,
        "slots": 50,
        "dtype": jnp.bfloat16,
    }
    heads = Heads(RopeConfig(128, 1e6), 1e-6)
    arrays = inputs(heads, **changes)
    got = jax.jit(lambda *a: inject(*a, heads=heads, implementation="pallas"))(*arrays)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a, arrays)
    want = jax.jit(lambda *a: reference(*a, heads=heads))(*wide)
    error = lambda x, y: float(jnp.linalg.norm(x.astype(jnp.float32) - y) / jnp.linalg.norm(y))  # noqa: E731
    assert max(jax.tree.leaves(jax.tree.map(error, got, want))) < 1e-2
