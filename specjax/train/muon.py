"""Muon for trees of many matrices: those of one shape are made orthogonal together.

A drafter has dozens of small matrices, and the iteration that makes each update orthogonal is some twenty-five
operations, which one by one keep a GPU waiting. Stacked, they are a few dozen batched products.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

#: ``axes(path, leaf)``: the axes that a matrix reads, or None for what is no matrix.
Axes = Callable[[Any, Array], tuple[int, ...] | None]


class _Place(NamedTuple):
    """Where a leaf lies in a stacked tree: a group of matrices and its place in it, or a name alone."""

    name: str
    number: int | None
    order: tuple[int, ...]  # axes of the leaf in the order of the matrix
    shape: tuple[int, ...]  # of the leaf with these axes


def stacked(
    learning_rate: optax.ScalarOrSchedule,
    betas: tuple[float, float],
    weight_decay: float,
    axes: Axes,
) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024) with updates of AdamW's size, so that learning rates carry over (Liu et al. 2025), and
    AdamW for all that is no matrix. Decay acts on leaves of more than one axis.

    Updates are those of ``optax.contrib.muon`` up to rounding; its state holds stacked momenta.
    """
    inner = optax.contrib.muon(
        learning_rate,
        weight_decay=weight_decay,
        weight_decay_mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree),
        adam_b1=betas[0],
        adam_b2=betas[1],
        adam_weight_decay=weight_decay,
        muon_weight_dimension_numbers=_dimensions,
        consistent_rms=0.2,
    )

    def init(weights: Any) -> Any:
        return inner.init(_pack(weights, _places(weights, axes)))

    def update(gradients: Any, state: Any, weights: Any = None) -> tuple[Any, Any]:
        if weights is None:
            raise ValueError("Muon with weight decay needs the weights beside their gradients")
        places = _places(weights, axes)
        found, state = inner.update(_pack(gradients, places), state, _pack(weights, places))
        return _unpack(found, places, gradients), state

    return optax.GradientTransformation(init, update)


def _dimensions(packed: dict[str, Array]) -> dict[str, Any]:
    """Every group is matrices ``[n, rows, columns]``; the rest is left to Adam."""
    matrix = optax.contrib.MuonDimensionNumbers((2,), (1,))
    return {name: matrix if name.startswith("matrices") else None for name in packed}


def _places(weights: Any, axes: Axes) -> list[_Place]:
    """A place per leaf, in the order of ``jax.tree.leaves``. The shorter side of a matrix comes first: what is done to
    one is the same for its transpose."""
    counts: dict[str, int] = {}
    places = []
    for number, (path, leaf) in enumerate(jax.tree_util.tree_flatten_with_path(weights)[0]):
        into = axes(path, leaf)
        if into is None:
            places.append(_Place(f"other {number:04d}", None, (), ()))
            continue
        out = tuple(i for i in range(leaf.ndim) if i not in into)
        size = lambda some, leaf=leaf: math.prod(leaf.shape[i] for i in some)  # noqa: E731
        first, second = sorted((out, tuple(into)), key=size)
        name = f"matrices {size(first)}x{size(second)}"
        order = (*first, *second)
        places.append(_Place(name, counts.get(name, 0), order, tuple(leaf.shape[i] for i in order)))
        counts[name] = counts.get(name, 0) + 1
    return places


def _pack(tree: Any, places: list[_Place]) -> dict[str, Array]:
    packed: dict[str, Any] = {}
    for place, leaf in zip(places, jax.tree.leaves(tree), strict=True):
        if place.number is None:
            packed[place.name] = leaf
        else:
            rows, columns = place.name.split()[1].split("x")
            packed.setdefault(place.name, []).append(
                leaf.transpose(place.order).reshape(int(rows), int(columns))
            )
    return {name: jnp.stack(x) if isinstance(x, list) else x for name, x in packed.items()}


def _unpack(packed: dict[str, Array], places: list[_Place], like: Any) -> Any:
    def leaf(place: _Place) -> Array:
        if place.number is None:
            return packed[place.name]
        back = sorted(range(len(place.order)), key=place.order.__getitem__)
        return packed[place.name][place.number].reshape(place.shape).transpose(back)

    return jax.tree.unflatten(jax.tree.structure(like), [leaf(place) for place in places])
