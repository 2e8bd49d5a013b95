"""Muon: which weights it moves, and how."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import train_toy as toy

from specjax import registry, testing
from specjax.train import step as steps
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
    axes = jax.tree.leaves(steps._muon_axes(shapes), is_leaf=lambda x: x is None or hasattr(x, "output_axis"))
    matrices = [leaf for leaf in jax.tree.leaves(shapes) if leaf.ndim > 1]
    moved = [x for x in axes if x is not None]
    assert len(moved) == len(matrices) > 4
    for leaf, x in zip(matrices, moved, strict=True):
        assert sorted((*x.reduction_axis, *x.output_axis)) == list(range(leaf.ndim))


def test_vocabulary_tables_are_left_to_adam():
    tree = {"table": jnp.zeros((9000, 4)), "matrix": jnp.zeros((6, 4))}
    axes = steps._muon_axes(tree)
    assert axes["table"] is None
    assert axes["matrix"] is not None


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
