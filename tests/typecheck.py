"""Run-time checks of jaxtyping annotations, for every function but not for constructors.

Pytree structs are rebuilt by JAX around leaves that are no arrays (shapes, shardings, batch axes, array
specs), so their fields cannot be checked when they are made; functions that take and return arrays can.
"""

from beartype import beartype


def functions_only(fn):
    """Type checker for jaxtyping's import hook."""
    return fn if fn.__name__ == "__init__" else beartype(fn)
