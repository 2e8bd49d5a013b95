"""Scans: of few steps, and with results that do not begin as zeros."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.core import platform


def scan_short(step: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: Any) -> tuple[Any, Any]:
    """``jax.lax.scan`` over few steps that are short: on a GPU one after the other without a loop, whose every turn
    costs as much as several kernels."""
    return jax.lax.scan(step, carry, xs, unroll=platform.backend() in ("cuda", "rocm"))


def scan_into(step: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: Any, into: Any) -> tuple[Any, Any]:
    """``jax.lax.scan(step, carry, xs)`` with the stacked results written over ``into``, arrays of the same shapes that
    come from the data.

    The results of a plain scan begin as zeros. Those are alike in every layer of a model, and XLA makes the zeros of
    all layers before the first one runs: memory would grow with the number of layers.
    """

    def one(held, at):
        carry, out = held
        i, x = at
        carry, y = step(carry, x)
        return (carry, jax.tree.map(lambda whole, part: whole.at[i].set(part), out, y)), None

    steps = jax.tree.leaves(into)[0].shape[0]
    return jax.lax.scan(one, (carry, into), (jnp.arange(steps), xs))[0]
