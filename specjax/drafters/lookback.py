"""How far a copy is worth drafting: the row's own recent past says how often copying would have been right.

A pure function of the row's tokens. For each of its last ``WINDOW`` tokens the same lookup is made as if
the row ended there, and its answer compared with the token that really came. Hits are counted per match
length, a prior stands in where there is no evidence, and the width with the most expected tokens per unit
of verification cost is drafted. Having no state, it is the same after a refill, a resumed conversation
or any chunking.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

WINDOW = 32
#: Chance that a copied token is right, by match length 1, 2, 3 and more, on a text one knows nothing
#: about, and how many observations that is worth. Chosen on training prompts, in float32 on a CPU.
PRIOR = (0.15, 0.35, 0.55)
PRIOR_WEIGHT = 4.0

Costs = tuple[tuple[int, float], ...]


def worthwhile(
    costs: Costs,
    k: int,
    chance: Float[Array, "B N"],
    run: Int[Array, " B"],
) -> Int[Array, " B"]:
    """Drafts worth verifying, 0..k, for a match of ``run`` tokens (0 = none).

    ``costs``: (width, time of verifying that many drafts over the time of a plain step), increasing;
    ``chance[:, n-1]``: that a token copied after a match of n tokens is right. Each further token of a copy
    lengthens its match by one.
    """
    longest = chance.shape[1]
    steps = jnp.clip(run[:, None] - 1 + jnp.arange(k), 0, longest - 1)
    expected = jnp.cumsum(jnp.cumprod(jnp.take_along_axis(chance, steps, 1), 1), 1)
    widths = sorted({w for w, _ in costs if w < k} | {k})
    price = [next((c for w, c in costs if w >= width), costs[-1][1]) for width in widths]
    gains = [(1 + expected[:, w - 1]) / c for w, c in zip(widths, price, strict=True)]
    table = jnp.stack([jnp.ones_like(gains[0]), *gains], 1)
    best = jnp.asarray([0, *widths], jnp.int32)[jnp.argmax(table, 1)]
    return jnp.where(run > 0, best, 0)


def hit_rates(
    tokens: Int[Array, "B T"], length: Int[Array, " B"], longest: int, recent: bool
) -> Float[Array, "B N"]:
    """Chance of a hit by match length 1..longest, estimated on the row's last ``WINDOW`` tokens."""
    size = tokens.shape[1]
    follow, run = _lookups(tokens, length, longest, recent)
    ends = length[:, None] - 1 - jnp.arange(1, WINDOW + 1)
    guess = jnp.take_along_axis(tokens, jnp.clip(follow, 0, size - 1), 1)
    came = jnp.take_along_axis(tokens, jnp.clip(ends + 1, 0, size - 1), 1)
    of_length = run[:, :, None] == jnp.arange(1, longest + 1)
    hits = jnp.sum(of_length & (guess == came)[:, :, None], 1)
    prior = jnp.asarray([PRIOR[min(n, len(PRIOR) - 1)] for n in range(longest)], jnp.float32)
    return (prior * PRIOR_WEIGHT + hits) / (PRIOR_WEIGHT + jnp.sum(of_length, 1))


def _lookups(tokens, length, longest: int, recent: bool):
    """(start of the continuation, match length) as if the row ended 1..WINDOW tokens earlier: [B W]."""
    size = tokens.shape[1]
    at = jnp.arange(size, dtype=jnp.int32)
    back = length[:, None] - 1 - jnp.arange(1, WINDOW + longest)  # index of the last tokens, newest first
    word = jnp.take_along_axis(tokens, jnp.maximum(back, 0), 1)
    equal = (tokens[:, None, :] == word[:, :, None]) & (back >= 0)[:, :, None]  # [B, W+N-1, T]
    same = at < back[:, :WINDOW, None]
    run = jnp.zeros(same.shape, jnp.int32)
    for j in range(longest):
        shifted = jnp.pad(equal[:, j : j + WINDOW], ((0, 0), (0, 0), (j, 0)))[:, :, :size]
        same &= shifted
        run += same
    place = at if recent else size - 1 - at
    best = jnp.max(run * size + place, axis=-1)
    where = best % size
    return (where if recent else size - 1 - where) + 1, best // size
