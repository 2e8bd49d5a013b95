"""Initial weights of drafters: small random matrices, norms at one, and what the target has to give."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.targets import gemma3, qwen3_5
from specjax.types import ArraySpec

#: Standard deviation of a layer's matrices, as transformers initialises models of the families drafters take after.
STD = 0.02
#: Matrices that add to the residual stream: half as large. Matrices that make one out of features: by their inputs.
HALVED, BY_INPUTS = ("o", "down"), ("fc", "pre", "post", "embed", "head")


def random_weights(specs: Any, key: jax.Array) -> Any:
    """float32 weights for a struct of ArraySpecs; integer tables are zeros. Fields are told by their names."""
    leaf = lambda x: isinstance(x, ArraySpec)  # noqa: E731
    keys = iter(jax.random.split(key, len(jax.tree.leaves(specs, is_leaf=leaf))))
    return jax.tree_util.tree_map_with_path(
        lambda path, spec: _made(path[-1], spec, next(keys)), specs, is_leaf=leaf
    )


def _made(last: Any, spec: ArraySpec, key: jax.Array) -> Array:
    if spec.init != "normal" or spec.dtype not in (None, "float32"):
        return jnp.full(spec.shape, 1.0 if spec.init == "ones" else 0.0, spec.dtype or jnp.float32)
    name = getattr(last, "name", "")
    std = spec.shape[-1] ** -0.5 if name in BY_INPUTS else STD / (2 if name in HALVED else 1)
    return std * jax.random.normal(key, spec.shape, jnp.float32)


def final_gain(target: Any) -> Float[Array, " D"]:
    """What the target's final norm multiplies by, float32. ``target``: its weights."""
    stored_minus_one = isinstance(target.layers[0], qwen3_5.Layer | gemma3.Layer)
    return target.norm.astype(jnp.float32) + (1.0 if stored_minus_one else 0.0)


def with_calm_queries(layer: Any) -> Any:
    """A layer whose scores have no scale but the norm of its queries: the usual one, ``1 / sqrt(channels)``."""
    return dataclasses.replace(layer, q_norm=layer.q_norm * layer.q_norm.shape[0] ** -0.5)


def rms(x: Float[Array, "..."]) -> Float[Array, ""]:
    """Root of the mean square."""
    return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32))))


def directions(table: Float[Array, "V W"], count: int) -> Float[Array, "W count"]:
    """Orthonormal directions of a head's input in which its products are largest over all tokens."""
    gram = jnp.einsum("vw,vx->wx", table, table, precision="highest")
    return jnp.linalg.eigh(gram)[1][:, -count:]
