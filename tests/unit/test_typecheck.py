"""What the tests check of annotations: every kind of call, once."""

import dataclasses
import sys
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typecheck
from jaxtyping import Array, Float, TypeCheckError

from specjax.layers.norm import rms_norm


@dataclasses.dataclass
class Setting:
    """Without a hash."""

    value: int = 0


@typecheck.once_per_kind(typechecker=typecheck.functions_only)
def summed(
    x: Float[Array, "B D"], weight: Float[Array, " D"], deep: dict, double: bool = False
) -> Float[Array, " B"]:
    out = (x * weight).sum(-1) + deep.get("more", 0)
    return jnp.concatenate([out, out]) if double else out


X, WEIGHT = jnp.ones((2, 3)), jnp.ones(3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"weight": jnp.ones(4)}, "weight"),
        ({"weight": jnp.ones(3, jnp.int32)}, "weight"),
        ({"x": jnp.ones(3)}, "x"),
        ({"x": np.ones((2, 3), np.float32)}, "x"),
        ({"deep": None}, "deep"),
        ({"double": True}, "return value"),
        ({"deep": {"more": jnp.ones((2, 1, 1))}}, "return value"),
    ],
)
def test_what_is_wrong_is_found_after_what_is_right(changes, said):
    """Another shape, dtype, class, structure or static value is another kind of call; it is refused every time."""
    right = {"x": X, "weight": WEIGHT, "deep": {}}
    for _ in range(2):
        assert summed(**right).shape == (2,)
        with pytest.raises(TypeCheckError, match=said):
            summed(**right | changes)
    assert summed(X, WEIGHT, {"more": jnp.ones(2)}).shape == (2,)


def test_what_is_traced_is_checked():
    """Shapes of tracers, too, and functions of the package."""
    assert jax.eval_shape(summed, X, WEIGHT, {}).shape == (2,)
    with pytest.raises(TypeCheckError, match="weight"):
        jax.eval_shape(summed, X, jnp.ones(4), {})
    for _ in range(2):
        with pytest.raises(TypeCheckError):
            rms_norm(jnp.ones(3), jnp.ones((3, 1)), 1e-6)


@typecheck.once_per_kind(typechecker=typecheck.functions_only)
def length(x: dict) -> int:
    return len(x)


@typecheck.once_per_kind(typechecker=typecheck.functions_only)
def total(rows: Iterable[Float[Array, " D"]], start: int = 0) -> int:
    return sum((row.shape[0] for row in rows), start)


def test_what_has_no_hash_is_checked_every_time():
    for odd in ({"more": 0, "set": Setting()}, {"more": 0, 1: 0}, {None: {"a": 0, 2: 1}}):
        for _ in range(sys.getrecursionlimit()):  # levels of the stack that are lost would add up
            assert length(odd) == len(odd)
        with pytest.raises(TypeCheckError, match="weight"):
            summed(X, jnp.ones(4), odd)
    assert [total(iter(X)), total(row for row in X), total(rows=(row for row in X))] == [6, 6, 6]
    with pytest.raises(TypeCheckError, match="start"):
        total(iter(X), "1")
