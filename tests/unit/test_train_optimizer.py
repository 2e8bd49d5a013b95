"""Muon: which weights it moves, and how."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import train_toy as toy
from flax import struct

from specjax import registry, testing
from specjax.train import muon, step as steps
from specjax.train.run import _recipe
from specjax.types import ArraySpec


@pytest.mark.parametrize("name", ["eagle3", "mtp", "assistant", "dflash", "dspark"])
def test_matrices_move_by_muon(name):
    """Every axis of a matrix is either read or written; vectors are left to Adam."""
    module = registry.drafter(name)
    specs = module.abstract(module.tiny(testing.tiny_params().meta.target_cfg))
    shapes = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, jnp.float32),
        specs,
        is_leaf=lambda x: isinstance(x, ArraySpec),
    )
    leaves = jax.tree_util.tree_flatten_with_path(shapes)[0]
    matrices = [(path, leaf) for path, leaf in leaves if leaf.ndim > 1]
    moved = [steps._muon_axes(path, leaf) for path, leaf in matrices]
    assert len(moved) > 4
    assert all(
        into and set(into) < set(range(leaf.ndim)) for into, (_, leaf) in zip(moved, matrices, strict=True)
    )
    assert all(steps._muon_axes(path, leaf) is None for path, leaf in leaves if leaf.ndim < 2)


def test_vocabulary_tables_are_left_to_adam():
    assert steps._muon_axes((None,), jnp.zeros((9000, 4))) is None
    assert steps._muon_axes((None,), jnp.zeros((6, 4))) == (1,)


def test_matrices_done_together_are_done_as_one_by_one():
    """Matrices of one shape, transposed ones, head axes on either side, vectors and tables beside them: three updates
    equal optax' own of every leaf."""

    @struct.dataclass
    class Layer:
        q: jax.Array
        o: jax.Array
        up: jax.Array
        down: jax.Array
        norm: jax.Array
        table: jax.Array | None

    shapes = {"q": (2, 4, 24), "o": (24, 2, 4), "up": (40, 24), "down": (24, 40), "norm": (24,)}
    rng = np.random.default_rng(0)
    draw = lambda: {n: jnp.asarray(rng.standard_normal(s), jnp.float32) for n, s in shapes.items()}  # noqa: E731
    tree = lambda: (Layer(**draw(), table=None), Layer(**draw(), table=jnp.ones((9000, 2))))  # noqa: E731
    into = {"q": (2,), "o": (1, 2), "up": (1,), "down": (1,)}

    def dimensions(weights):
        def one(path, x):
            read = into.get(path[-1].name)
            rest = tuple(i for i in range(x.ndim) if i not in (read or ()))
            return None if read is None else optax.contrib.MuonDimensionNumbers(read, rest)

        return jax.tree_util.tree_map_with_path(one, weights)

    mine = muon.stacked(0.1, (0.9, 0.95), 0.1, steps._muon_axes)
    theirs = optax.contrib.muon(
        0.1,
        weight_decay=0.1,
        weight_decay_mask=lambda t: jax.tree.map(lambda x: x.ndim > 1, t),
        adam_b1=0.9,
        adam_b2=0.95,
        adam_weight_decay=0.1,
        muon_weight_dimension_numbers=dimensions,
        consistent_rms=0.2,
    )
    weights = tree()
    states = [rule.init(weights) for rule in (mine, theirs)]
    for _ in range(3):
        grads = tree()
        found = []
        for i, rule in enumerate((mine, theirs)):
            updates, states[i] = rule.update(grads, states[i], weights)
            found.append(updates)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), *found)
        weights = optax.apply_updates(weights, found[0])


def test_an_update_turns_all_directions_alike():
    """The singular values of a matrix's update are nearly equal, and its size is that of AdamW's."""
    recipe = toy.recipe(optimizer="muon", warmup=0.0, steps=1000, learning_rate=1.0, clip=1e9)
    rng = np.random.default_rng(0)
    weights = {"q": jnp.zeros((2, 4, 24)), "bias": jnp.zeros(3)}
    skewed = rng.standard_normal((8, 24)) * np.geomspace(1, 30, 8)[:, None]
    grads = {"q": jnp.asarray(skewed.reshape(2, 4, 24), jnp.float32), "bias": jnp.ones(3)}
    rule = steps.optimiser(recipe)
    state = rule.init(weights)
    for _ in range(20):  # the warm-up's first step is 0
        updates, state = rule.update(grads, state, weights)
    values = np.linalg.svd(np.asarray(updates["q"]).reshape(8, 24), compute_uv=False)
    assert values.max() / values.min() < 2
    assert 0.1 < float(optax.tree.norm(updates["q"])) / updates["q"].size ** 0.5 < 0.4


def test_unknown_names_are_refused():
    """Before anything is computed."""
    with pytest.raises(ValueError, match="optimizer must be 'adamw' or 'muon', got 'sgd'"):
        _recipe(toy, toy.NAME, {"optimizer": "sgd"})
    with pytest.raises(ValueError, match="source must be 'online', 'offline' or 'hybrid', got 'disk'"):
        _recipe(toy, toy.NAME, {"source": "disk"})
