"""Temporary memory told from traces: the rules one by one, with figures that can be worked out by hand."""

import jax
import jax.numpy as jnp
import pytest

from specjax.core.liveness import peak_bytes

N = 16
SQUARE = jax.ShapeDtypeStruct((N, N), jnp.float32)
ONE = 4 * N * N  # bytes of a square
SPARE = jax.ShapeDtypeStruct((3,), jnp.int32)  # given up, and of no use


def peak(function, *args) -> float:
    """In squares; the first argument is the one that is given up."""
    return peak_bytes(function, SPARE, *args, donated=0) / ONE


def test_products_are_written_and_forgotten():
    assert peak(lambda _, a: a @ a, SQUARE) == 1
    assert peak(lambda _, a: a @ a @ a @ a, SQUARE) == 2
    assert peak(lambda _, a: (a @ a) @ (a @ a @ a), SQUARE) == 3


def test_single_elements_cost_nothing_until_somebody_needs_them_whole():
    scalar = 1 / (N * N)
    assert peak(lambda _, a: jnp.sum(jnp.exp(a) * 2 + 1), SQUARE) == scalar
    assert peak(lambda _, a: jnp.exp(a) @ a, SQUARE) == 2
    assert (
        peak(lambda _, a: jnp.tanh(a @ a) @ a, SQUARE) == 2
    )  # the product and its tanh, then that and the result


def test_what_is_read_twice_is_written():
    def softmax(_, a):
        scores = jnp.where(a > 0, a @ a, 0)
        weights = jnp.exp(scores - 1)
        return jnp.sum(weights) + jnp.sum(weights, 0)

    assert peak(softmax, SQUARE) == pytest.approx(2, abs=0.1)


def test_views_and_dead_code_cost_nothing():
    def views(_, a):
        unused = jnp.linalg.cholesky(a @ a)
        del unused
        return a.reshape(-1)[None].reshape(N, N) @ a

    assert peak(views, SQUARE) == 1


def test_results_take_the_place_of_what_is_given_up():
    put = lambda a, b: a.at[0].set(b[1])  # noqa: E731
    assert peak_bytes(put, SQUARE, SQUARE, donated=0) < ONE / 8
    assert (
        peak(lambda _, a, b: put(a, b), SQUARE, SQUARE) > 1
    )  # nothing is given up that has the result's shape


def test_loops_carry_in_place():
    def turns(a, b):
        return jax.lax.fori_loop(0, 5, lambda i, a: a.at[i].set(jnp.sum(b @ b, 0)), a)

    assert peak_bytes(turns, SQUARE, SQUARE, donated=0) / ONE == pytest.approx(1, abs=0.2)


def test_results_of_a_scan_are_set_aside_before_its_first_turn():
    def scan(_, a):
        return jax.lax.scan(lambda c, x: (c + 1, c @ c), a, jnp.arange(7))[1]

    assert peak(scan, SQUARE) == pytest.approx(7 + 1 + 1, abs=0.1)  # results, carry, and one product


def test_of_branches_the_largest_counts():
    def choose(_, a):
        wide = lambda a: jnp.sum(a @ a @ a @ a)  # noqa: E731
        return jax.lax.cond(a[0, 0] > 0, wide, lambda a: jnp.sum(a @ a), a)

    assert peak(choose, SQUARE) == pytest.approx(2, abs=0.1)


def test_calls_are_looked_into():
    inner = jax.jit(lambda a: a @ a)
    assert peak(lambda _, a: inner(inner(a)), SQUARE) == 2
    assert peak(lambda _, a: jax.checkpoint(lambda a: jnp.sum(a @ a @ a))(a), SQUARE) == pytest.approx(
        2, abs=0.1
    )
    assert peak(lambda _, a: jax.nn.relu(a @ a) @ a, SQUARE) == 2  # it has a rule of its own for derivatives
