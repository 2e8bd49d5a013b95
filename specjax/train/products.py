"""Products and look-ups whose gradients are as cheap, and as exact, as their values.

JAX's own rules multiply the float32 gradient of a product with float32 sums by the low-precision factor, a product of
two types that no matrix unit runs, and add up the gradients of a look-up in the table's own type.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.layers.linear import precision_of


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(spec: str, a: Array, b: Array) -> Array:
    """``einsum(spec, a, b)`` with float32 sums and a float32 result. The gradient is rounded to the factors' type
    before it is multiplied.

    Each letter of a factor must be in the other factor or in the result.
    """
    return jnp.einsum(spec, a, b, precision=precision_of(a.dtype), preferred_element_type=jnp.float32)


def _forward(spec, a, b):
    return product(spec, a, b), (a, b)


def _backward(spec, factors, slope):
    a, b = factors
    of, out = spec.split("->")
    first, second = of.split(",")
    slope = slope.astype(a.dtype)
    back = product(f"{out},{second}->{first}", slope, b), product(f"{out},{first}->{second}", slope, a)
    return tuple(x.astype(like.dtype) for x, like in zip(back, factors, strict=True))


product.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rows(table, ids, size):
    del size
    return table[ids]


def _rows_forward(table, ids, size):
    return table[ids], ids


def _rows_backward(size, ids, slope):
    summed = jnp.zeros((size, slope.shape[-1]), jnp.float32).at[ids].add(slope.astype(jnp.float32))
    return summed.astype(slope.dtype), None


_rows.defvjp(_rows_forward, _rows_backward)


def lookup(table: Float[Array, "V D"], ids: Int[Array, "..."]) -> Float[Array, "... D"]:
    """Rows of a table, their gradients added up in float32: a frequent token's are many, and bfloat16 would drop
    most of them."""
    return _rows(table, ids, table.shape[0])
