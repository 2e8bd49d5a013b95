"""Run-time checks of jaxtyping annotations, for every function but not for constructors.

Pytree structs are rebuilt by JAX around leaves that are no arrays (shapes, shardings, batch axes, array
specs), so their fields cannot be checked when they are made; functions that take and return arrays can.

A check costs as much as the tracing it watches, and JAX traces the same functions for every program. So a call
is checked once per kind: structure of the arguments, shapes and dtypes of arrays, values of everything static.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jaxtyping
from beartype import beartype

_jaxtyped = jaxtyping.jaxtyped


def functions_only(fn):
    """Type checker for jaxtyping's import hook."""
    return fn if fn.__name__ == "__init__" else beartype(fn)


def once_per_kind(fn: Any = None, *, typechecker: Callable) -> Any:
    """``jaxtyping.jaxtyped``, for as long as the import hook asks it to check the same thing again."""
    if fn is None:
        return functools.partial(once_per_kind, typechecker=typechecker)
    if inspect.isclass(fn) or getattr(fn, "__name__", "") == "__init__":
        return fn
    if not inspect.isfunction(fn):
        return _jaxtyped(fn, typechecker=typechecker)
    seen: set[Any] = set()
    # made when it is first called: most functions are not
    checked = functools.cache(lambda: _jaxtyped(fn, typechecker=typechecker))

    @functools.wraps(fn)
    def call(*args, **kwargs):
        __tracebackhide__ = True
        try:
            kind = _kind(args, kwargs)
            known = kind in seen
        except TypeError:  # something has no hash
            return checked()(*args, **kwargs)
        if known:
            return fn(*args, **kwargs)
        out = checked()(*args, **kwargs)
        seen.add(kind)
        return out

    return call


def _kind(args: tuple, kwargs: dict) -> Any:
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=_whole)
    return tree, tuple(map(_leaf, leaves))


def _whole(x: Any) -> bool:
    """What JAX must not take apart: it walks through iterators, and loses count of Python's stack (jaxlib 0.10) where
    it fails to sort the keys of a dict."""
    if isinstance(x, dict):
        return {*map(type, x)} not in (set(), {str}, {int})
    return hasattr(type(x), "__next__")


def _leaf(x: Any) -> Any:
    if (dtype := getattr(x, "dtype", None)) is not None:
        return type(x), getattr(x, "shape", None), dtype
    if isinstance(x, (int, float, str, bytes)) or dataclasses.is_dataclass(x):
        return type(x), x
    if _whole(x):
        raise TypeError
    return type(x)
