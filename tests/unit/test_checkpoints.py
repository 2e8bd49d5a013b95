"""The loader behind every format: what is read, refused, cast and reported."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import checkpoints
from specjax.types import ArraySpec


def spec(shape, *names, **kwargs):
    return ArraySpec(shape, (None,) * len(shape), names, **kwargs)


def load(abstract, arrays, dtype=np.float32, **kwargs):
    return checkpoints.fill(abstract, lambda n: arrays[n], set(arrays), dtype, **kwargs)


def test_fills_and_reshapes_in_tree_order():
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(6, 1), "b": np.ones((2, 3), np.float32)}
    seen = []
    out = load(
        {"x": spec((2, 3), "a"), "y": (spec((2, 3), "b"), None)}, arrays, progress=lambda *p: seen.append(p)
    )
    np.testing.assert_array_equal(out["x"], np.arange(6).reshape(2, 3))
    assert isinstance(out["x"], jax.Array)
    assert out["y"][1] is None
    assert seen == [(1, 2, "a"), (2, 2, "b")]


def test_missing_tensors_are_all_named_before_anything_is_read():
    """CKP.4"""

    def get(name):
        raise AssertionError(f"{name} was read")

    with pytest.raises(ValueError, match=r"my file lacks 2 tensor\(s\).*first.weight, third.weight"):
        checkpoints.fill(
            {"a": spec((2,), "first.weight"), "b": spec((2,), "second"), "c": spec((2,), "third.weight")},
            get,
            {"second"},
            np.float32,
            where="my file",
        )


def test_one_missing_expert_is_named():
    """CKP.4"""
    arrays = {"e.0": np.ones((2, 3)), "e.2": np.ones((2, 3))}
    with pytest.raises(ValueError, match=r"e\.1"):
        load({"w": spec((3, 2, 3), "e.0", "e.1", "e.2")}, arrays)


def test_a_spec_without_a_source_never_stays_at_its_initial_value():
    """CKP.4"""
    with pytest.raises(ValueError, match="lacks 1 tensor"):
        load({"w": spec((2,))}, {})


def test_wrong_size_names_both_shapes():
    with pytest.raises(ValueError, match=r"w has shape \(4, 3\), this model needs \(2, 3\)"):
        load(spec((2, 3), "w"), {"w": np.ones((4, 3))})


@pytest.mark.parametrize(
    ("found", "need"), [((6, 4), (4, 6)), ((8, 24), (24, 8)), ((4, 6), (2, 3, 4)), ((6, 4), (4, 2, 3))]
)
def test_transposed_tensors_are_refused(found, need):
    with pytest.raises(ValueError, match="has shape"):
        load(spec(need, "w"), {"w": np.ones(found)})


@pytest.mark.parametrize(
    ("found", "need"),
    [((6, 4), (2, 3, 4)), ((4, 6), (4, 2, 3)), ((8, 1, 4), (8, 4)), ((2, 3), (2, 3)), ((), (1,))],
)
def test_split_and_merged_axes_are_accepted(found, need):
    x = np.arange(np.prod(found, dtype=int), dtype=np.float32).reshape(found)
    np.testing.assert_array_equal(load(spec(need, "w"), {"w": x}), x.reshape(need))


def test_unexpected_tensors_are_named_in_a_warning():
    arrays = {"w": np.ones(2), "model.layers.0.surprise": np.ones(3)}
    with pytest.warns(UserWarning, match=r"does not use.*model\.layers\.0\.surprise"):
        load(spec((2,), "w"), arrays)


def test_listed_buffers_are_harmless():
    arrays = {
        "w": np.ones(2),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(3),
        "lm_head.weight": 0,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(spec((2,), "w"), arrays, harmless=("lm_head.weight",))


def test_fused_experts_equal_separate_ones():
    """Both layouts on disk give the same arrays."""
    rng = np.random.default_rng(0)
    gate, up, down = (rng.standard_normal((3, *s)).astype(np.float32) for s in ((4, 5), (4, 5), (5, 4)))
    names = lambda part: [f"e.{i}.{part}" for i in range(3)]  # noqa: E731
    abstract = {
        "gate": spec((3, 4, 5), *names("gate"), fused="gate_up", rows=(0, 4)),
        "up": spec((3, 4, 5), *names("up"), fused="gate_up", rows=(4, 8)),
        "down": spec((3, 5, 4), *names("down"), fused="down"),
    }
    parts = (("gate", gate), ("up", up), ("down", down))
    one = {f"e.{i}.{p}": x[i] for p, x in parts for i in range(3)}
    fused = {"gate_up": np.concatenate([gate, up], 1), "down": down}
    for arrays in (one, fused):
        out = load(abstract, arrays)
        for part, x in parts:
            np.testing.assert_array_equal(out[part], x)
    with pytest.raises(ValueError, match=r"gate_up has shape \(3, 9, 5\), this model needs \(3, 8, 5\)"):
        load(abstract, fused | {"gate_up": np.ones((3, 9, 5))})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16", "float64"])
def test_floats_are_cast_and_integers_kept(stored, dtype):
    """NUM.2"""
    x = np.linspace(-3, 3, 7).astype(jnp.dtype(stored))
    out = load(
        {"w": spec((7,), "w"), "i": spec((2,), "i")},
        {"w": x, "i": np.array([1, 2], np.int32)},
        jnp.dtype(dtype),
    )
    assert out["w"].dtype == dtype
    assert out["i"].dtype == jnp.int32
    np.testing.assert_array_equal(out["w"], x.astype(jnp.dtype(dtype)))


def test_float16_that_cannot_hold_a_weight_is_refused():
    """NUM.1"""
    with pytest.raises(ValueError, match=r"w holds values beyond the range of float16"):
        load(spec((1,), "w"), {"w": np.array([1e5], np.float32)}, np.float16)


def test_loaded_arrays_do_not_alias_the_source():
    x = np.ones(64, np.float32)
    out = load(spec((64,), "w"), {"w": x})
    x[:] = 2
    np.testing.assert_array_equal(out, 1)


def test_random_weights_follow_the_spec():
    abstract = {
        "w": ArraySpec((64, 256), (None, None)),
        "o": ArraySpec((64, 4, 64), (None, "heads", None)),
        "n": ArraySpec((5,), (None,), init="ones"),
        "b": ArraySpec((5,), (None,), init="zeros"),
    }
    out = checkpoints.random_weights(abstract, 3, jnp.bfloat16, scale=2.0)
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(out))
    assert abs(float(jnp.std(out["w"].astype(jnp.float32))) - 2 / 16) < 0.01
    assert abs(float(jnp.std(out["o"].astype(jnp.float32))) - 2 / 16) < 0.01
    assert (out["n"] == 1).all()
    assert (out["b"] == 0).all()
    again = checkpoints.random_weights(abstract, 3, jnp.bfloat16, scale=2.0)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), out, again))
    assert (checkpoints.random_weights(abstract, 4, jnp.bfloat16)["w"] != out["w"]).any()
