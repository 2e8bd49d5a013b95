"""Compact storage: how large it is, how near the weights, that damage is noticed."""

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checkpoints import compact
from specjax.checkpoints.writers import Tensor

RNG = np.random.default_rng(0)


def matrix(rows=512, columns=384, tails=False):
    """Normal weights; with ``tails`` rows of very different size and a few numbers far out."""
    x = RNG.standard_normal((rows, columns)).astype(np.float32) * 0.05
    if tails:
        x *= np.exp(RNG.standard_normal((rows, 1)).astype(np.float32))
        x[3, 5], x[9, 100] = 40, -60
    return x


def through(x, bits=compact.BITS):
    """(what comes back, entry, stored array)."""
    stored, entries = compact.pack({"w": Tensor(x.shape, x.dtype, lambda: x)}, bits)
    data = stored["w"].make()
    back = compact.reader("f", entries, {"w": data}.get)("w")
    assert back.shape == x.shape
    return np.asarray(back), entries["w"], data


def error(x, back):
    return float(np.linalg.norm(x - back) / np.linalg.norm(x))


def in_groups(x, size=64):
    """Sixteen values from the least to the largest number of each group, whose scale and offset are float16: 4.5 bits
    per weight as well."""
    g = x.reshape(-1, size)
    low = g.min(1, keepdims=True).astype(np.float16).astype(np.float32)
    step = ((g.max(1, keepdims=True) - low) / 15).astype(np.float16).astype(np.float32)
    return (np.clip(np.rint((g - low) / step), 0, 15) * step + low).reshape(x.shape)


@pytest.mark.parametrize("tails", [False, True])
def test_size_and_error(tails):
    """TRN.3: 4.5 bits per weight, all told; the error is under two thirds of that of groups with scales."""
    x = matrix(tails=tails)
    back, entry, data = through(x)
    assert 4.45 < 8 * data.nbytes / x.size <= 4.5
    assert error(x, back) < 0.65 * error(x, in_groups(x))
    assert error(x, back) < 0.056
    assert np.abs(x - back).max() <= 0.5001 * entry["step"]
    beyond = (np.abs(np.rint(x / np.float32(entry["step"]))) > 127).sum()
    assert data.nbytes == entry["coded"] + 4 * beyond
    assert (beyond >= 2) == tails


@pytest.mark.parametrize("bits", [2.0, 3.0, 6.0])
def test_other_sizes(bits):
    x = matrix()
    back, _, data = through(x, bits)
    assert bits - 0.1 < 8 * data.nbytes / x.size <= bits
    assert error(x, back) < 1.37 * 2.0**-bits


@pytest.mark.parametrize("bits", [1.9, 6.5, True])
def test_sizes_that_make_no_sense(bits):
    with pytest.raises(ValueError, match="from 2 to 6 bits per weight"):
        through(matrix(8, 8), bits)


def test_the_same_weights_give_the_same_bytes():
    x = matrix()
    assert np.array_equal(through(x)[2], through(x.copy())[2])


def test_small_matrices_vectors_and_tables():
    """Eight bits, sixteen bits, as they are."""
    x = matrix(60, 90)
    back, _, data = through(x)
    assert data.nbytes < x.size
    assert np.abs(x - back).max() <= np.abs(x).max() / 127 * 0.5001
    gain = (1 + 0.1 * RNG.standard_normal(50)).astype(np.float32)
    back, _, data = through(gain)
    assert data.dtype == np.float16
    np.testing.assert_allclose(back.astype(np.float32), gain, rtol=2**-11)
    wide = np.array([1e6, -3.0], np.float32)
    assert through(wide)[2].dtype == jnp.bfloat16
    ids = np.arange(9, dtype=np.int32)
    np.testing.assert_array_equal(through(ids)[0], ids)


@pytest.mark.parametrize("x", [np.zeros((300, 300), np.float32), np.zeros((3, 4), np.float32)])
def test_nothing_but_zeros(x):
    np.testing.assert_array_equal(through(x)[0], x)


def test_one_number_among_zeros():
    """Nothing is clipped."""
    x = np.zeros((400, 400), np.float32)
    x[7, 7] = 3
    np.testing.assert_allclose(through(x)[0], x, rtol=1e-4)


def test_three_axes_and_bfloat16():
    x = matrix(96, 800).reshape(2, 48, 800).astype(jnp.bfloat16)
    back, _, _ = through(x)
    assert error(x.astype(np.float32), back) < 0.056


@pytest.mark.parametrize("x", [matrix(), matrix(4, 4), np.ones(5, np.float32), np.arange(3)])
def test_damage_is_noticed(x):
    """Every tensor's bytes are checked; a tensor that the config does not know is an error."""
    _, entry, data = through(x)
    spoiled = data.copy()
    spoiled.view(np.uint8).reshape(-1)[-1] ^= 1
    with pytest.raises(ValueError, match="f: w is damaged: its bytes are not those that were written"):
        np.asarray(compact.reader("f", {"w": entry}, {"w": spoiled}.get)("w"))
    with pytest.raises(ValueError, match="does not say how v is stored"):
        compact.reader("f", {"w": entry}, {"v": data}.get)("v")


def test_shapes_that_do_not_fit_the_bytes():
    _, entry, data = through(matrix(4, 4))
    with pytest.raises(ValueError, match=r"w is damaged: it holds .* numbers in place of 20"):
        np.asarray(compact.reader("f", {"w": entry | {"shape": [4, 5]}}, {"w": data}.get)("w"))
