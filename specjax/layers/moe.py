"""Mixture of experts without capacity: every token reaches every expert it chose, whatever the batch.

A row's result depends on that row alone, so padding rows are harmless and a block gives what its
positions give one by one.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.kernels import dispatch
from specjax.layers.linear import linear, precision_of
from specjax.layers.loop import scan_into

_TILE_MIN, _TILE_MAX = 8, 128


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
    (``specjax.kernels.experts``). Everything else is XLA's: many tokens are sorted by expert into tiles that hold
    one expert each; few tokens that no kernel serves gather the weights of their experts on accelerators, which
    saves a sequence of small steps. A CPU always takes tiles, and reads each expert that is hit once per tile of
    8 to 128 tokens; tiles that stayed empty are skipped there.
    """
    out = _way(x, ids, gate, activation)(x, ids, gate, up, down, activation)
    return jnp.sum(out * weights.astype(jnp.float32)[..., None], axis=1).astype(x.dtype)


def _way(x, ids, gate, activation) -> Callable:
    few = ids.size <= gate.shape[0] and jax.default_backend() != "cpu"
    return dispatch.implementation("experts", (x, ids, gate, activation), _gathered if few else _tiled)


def _gathered(x, ids, gate, up, down, activation) -> Float[Array, "N k D"]:
    dot = lambda a, b, sub: jnp.einsum(  # noqa: E731
        sub, a, b, precision=precision_of(x.dtype), preferred_element_type=jnp.float32
    )
    g, u = dot(x, gate[ids], "nd,nkfd->nkf"), dot(x, up[ids], "nd,nkfd->nkf")
    return dot((activation(g) * u).astype(x.dtype), down[ids], "nkf,nkdf->nkd")


def _tiled(x, ids, gate, up, down, activation) -> Float[Array, "N k D"]:
    n, n_experts = ids.size, gate.shape[0]
    tile = _tile_rows(n, n_experts)
    n_tiles = n // tile + min(n_experts, n)  # enough for any distribution over experts
    slot, tile_expert, used = _layout(ids.reshape(-1), n_experts, tile, n_tiles)
    source = jnp.full(n_tiles * tile, x.shape[0], jnp.int32).at[slot].set(jnp.arange(n) // ids.shape[1])
    rows = x.at[source].get(mode="fill", fill_value=0).reshape(n_tiles, tile, -1)

    def one(args):
        expert, block = args
        g = linear(block, gate[expert], out_dtype=jnp.float32)
        u = linear(block, up[expert], out_dtype=jnp.float32)
        return linear((activation(g) * u).astype(x.dtype), down[expert], out_dtype=jnp.float32)

    def some(args):
        return jax.lax.cond(args[0], one, lambda _: jnp.zeros((tile, x.shape[1]), jnp.float32), args[1:])

    # a branch costs a GPU more than an empty tile does: it is taken on the host
    cpu = jax.default_backend() == "cpu"
    tiles = (jnp.arange(n_tiles) < used, tile_expert, rows) if cpu else (tile_expert, rows)
    run = some if cpu else one
    _, out = scan_into(lambda _, at: ((), run(at)), (), tiles, rows.astype(jnp.float32))
    return out.reshape(n_tiles * tile, -1)[slot].reshape(*ids.shape, -1)


def _layout(expert, n_experts: int, tile: int, n_tiles: int):
    """Slot of every (token, choice) among the tiles' rows, the expert of every tile, and how many tiles are used."""
    count = jnp.bincount(expert, length=n_experts)
    last = jnp.cumsum(-(-count // tile))  # tiles up to and including each expert's
    first_row = (last - -(-count // tile)) * tile
    order = jnp.argsort(expert, stable=True)
    rank = jnp.zeros_like(expert).at[order].set(jnp.arange(expert.size, dtype=expert.dtype))
    rank = rank - (jnp.cumsum(count) - count)[expert]  # place among the tokens of the same expert
    tile_expert = jnp.searchsorted(last, jnp.arange(n_tiles), side="right")
    return first_row[expert] + rank, jnp.minimum(tile_expert, n_experts - 1), last[-1]


def _tile_rows(n: int, n_experts: int) -> int:
    """A power of two near the mean number of tokens per expert."""
    tile = _TILE_MIN
    while tile < min(_TILE_MAX, n / n_experts):
        tile *= 2
    return tile
