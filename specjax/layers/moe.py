"""Mixture of experts without capacity: every token reaches every expert it chose, whatever the batch.

A row's result depends on that row alone, so padding rows are harmless and a block gives what its
positions give one by one.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.kernels import dispatch
from specjax.layers.grouping import gathered, group, tile_rows
from specjax.layers.linear import linear, precision_of, product
from specjax.layers.loop import scan_into

#: Up to here a kernel multiplies all tokens with every expert that is hit; beyond, each with the experts it chose.
FEW_TOKENS = 64


def route(
    x: Float[Array, "N D"], router: Float[Array, "E D"], k: int, normalise: bool
) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
    """Weights (float32) and ids of the k most probable experts; equal ones: the lower id first.

    The softmax runs over all experts. ``normalise`` makes the k weights sum to one.
    """
    probs = jax.nn.softmax(linear(x, router, out_dtype=jnp.float32), axis=-1)
    weights, ids = jax.lax.top_k(probs, k)
    if normalise:
        weights = weights / jnp.sum(weights, -1, keepdims=True)
    return weights, ids


def experts(
    x: Float[Array, "N D"],
    weights: Float[Array, "N k"],
    ids: Int[Array, "N k"],
    gate: Float[Array, "E F D"],
    up: Float[Array, "E F D"],
    down: Float[Array, "E D F"],
    activation: Callable = jax.nn.silu,
) -> Float[Array, "N D"]:
    """Weighted sum of the chosen experts' outputs ``down(activation(gate x) * up x)``, summed in float32.

    On a GPU few tokens (a decode or verify step) run as a kernel that reads every expert that is hit once
    (``specjax.kernels.experts``), and many are sorted by expert into tiles that hold one expert each, all of which one
    kernel multiplies (``specjax.kernels.grouped_experts``). Everything else is XLA's: tiles one after the other; few
    tokens that no kernel serves gather the weights of their experts on accelerators, which saves a sequence of small
    steps. A CPU always takes tiles, and reads each expert that is hit once per tile of 8 to 128 tokens; tiles that
    stayed empty are skipped there.
    """
    out = _way(x, ids, gate, activation)(x, ids, gate, up, down, activation)
    return jnp.sum(out * weights.astype(jnp.float32)[..., None], axis=1).astype(x.dtype)


def _way(x, ids, gate, activation) -> Callable:
    few = ids.size <= gate.shape[0] and jax.default_backend() != "cpu"
    op = "experts" if x.shape[0] <= FEW_TOKENS else "grouped_experts"
    return dispatch.implementation(op, (x, ids, gate, activation), _gathered if few else _tiled)


def _gathered(x, ids, gate, up, down, activation) -> Float[Array, "N k D"]:
    dot = lambda a, b, sub: jnp.einsum(  # noqa: E731
        sub, a, b, precision=precision_of(x.dtype), preferred_element_type=jnp.float32
    )
    g, u = dot(x, gate[ids], "nd,nkfd->nkf"), dot(x, up[ids], "nd,nkfd->nkf")
    return dot((activation(g) * u).astype(x.dtype), down[ids], "nkf,nkdf->nkd")


def _tiled(x, ids, gate, up, down, activation) -> Float[Array, "N k D"]:
    n_experts = gate.shape[0]
    tile = tile_rows(ids.size, n_experts)
    groups = group(ids.reshape(-1), n_experts, tile)
    rows = gathered(x, groups, ids.shape[1]).reshape(-1, tile, x.shape[1])

    def one(args):
        expert, block = args
        g = product(block, gate[expert], jnp.float32)
        u = product(block, up[expert], jnp.float32)
        return product((activation(g) * u).astype(x.dtype), down[expert], jnp.float32)

    def some(args):
        return jax.lax.cond(args[0], one, lambda _: jnp.zeros((tile, x.shape[1]), jnp.float32), args[1:])

    # a branch costs a GPU more than an empty tile does: it is taken on the host
    cpu = jax.default_backend() == "cpu"
    tiles = (jnp.arange(len(rows)) < groups.used, groups.expert, rows) if cpu else (groups.expert, rows)
    run = some if cpu else one
    _, out = scan_into(lambda _, at: ((), run(at)), (), tiles, rows.astype(jnp.float32))
    return out.reshape(-1, x.shape[1])[groups.slot].reshape(*ids.shape, -1)
