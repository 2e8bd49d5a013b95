"""Choosing a draft token from a drafter's logits: the argmax, or a draw whose distribution is kept.

A draw comes from exactly the float32 vector that acceptance later divides by. Drafts see the temperature
only: filters and penalties belong to the target.
"""

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

#: "greedy": always the argmax, a point mass. "probabilistic": drawn at the row's temperature, with q kept.
Drafting = Literal["greedy", "probabilistic"]


def check_drafting(k: Any, drafting: Any) -> None:
    """ValueError unless ``k`` is a positive whole number and ``drafting`` one of the two ways."""
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"k must be a whole number of at least 1, got {k!r}")
    if drafting not in get_args(Drafting):
        raise ValueError(f"drafting must be one of {get_args(Drafting)}, got {drafting!r}")


def sampling(drafting: Drafting, keys: Array | None) -> bool:
    """Whether q is kept in this program: drafts are drawn, and some row has a temperature."""
    return drafting == "probabilistic" and keys is not None


def greedy(keys: Array | None, temperature: Float[Array, " B"] | None) -> bool:
    """Whether every draft of this program is the argmax: then the other logits need not be kept."""
    return keys is None or temperature is None


def pick(
    logits: Float[Array, "B V"],
    keys: Array | None,
    step: int | Int[Array, ""],
    temperature: Float[Array, " B"] | None,
) -> tuple[Int[Array, " B"], Float[Array, "B V"] | None]:
    """One token per row and the distribution it was drawn from.

    ``keys`` [B] are this round's draft keys and ``step`` the index of the draft in the round; without keys
    the argmax is taken and q is None. Rows at temperature 0 take the argmax, and their q is one-hot.
    """
    best = jnp.argmax(logits, -1).astype(jnp.int32)
    if keys is None or temperature is None:
        return best, None
    hot = (temperature > 0)[:, None]
    logits = logits.astype(jnp.float32)
    logits = logits - jnp.max(logits, -1, keepdims=True)
    q = jax.nn.softmax(logits / jnp.where(hot, temperature[:, None], 1.0), -1)
    q = jnp.where(hot, q, jax.nn.one_hot(best, q.shape[-1], dtype=jnp.float32))
    noise = jax.vmap(lambda key: jax.random.gumbel(jax.random.fold_in(key, step), q.shape[-1:]))(keys)
    drawn = jnp.argmax(jnp.log(q) + noise, -1).astype(jnp.int32)
    return jnp.where(hot[:, 0], drawn, best), q
