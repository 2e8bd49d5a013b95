"""What DFlash2 adds to DFlash: convolutions along the block, and a selector among the best candidates.

Source: the ``dflash`` package of z-lab (0.1.0). Context positions are not convolved.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.drafters.dflash_config import Convolution, Selection
from specjax.drafters.pick import pick
from specjax.layers.linear import linear, precision_of
from specjax.layers.norm import Rows, plain
from specjax.types import ArraySpec


@struct.dataclass
class Conv:
    """Kernels of the convolution before ([0]) and after ([1]) a sublayer; ``N`` taps."""

    base: Float[Array, "2 N D"]
    project: Float[Array, "P D"]  # P = 2 * N * groups: what the token adds to the kernels


@struct.dataclass
class LayerConvs:
    """Convolutions of one layer."""

    attention: Conv
    mlp: Conv


@struct.dataclass
class Selector:
    """Low-rank scores of a candidate after its predecessor."""

    predecessor: Float[Array, "V R"]
    successor: Float[Array, "V R"]
    project: Float[Array, "R D"]


def conv_specs(cfg: Convolution, width: int, prefix: str) -> LayerConvs:
    """Specs of one layer's convolutions under ``prefix``."""

    def one(name: str) -> Conv:
        shape = (2 * cfg.taps * (width // cfg.group), width)
        return Conv(
            ArraySpec((2, cfg.taps, width), (None, None, None), (f"{prefix}{name}.base_kernel",)),
            ArraySpec(shape, (None, None), (f"{prefix}{name}.kernel_projection.weight",)),
        )

    return LayerConvs(one("attention_conv"), one("mlp_conv"))


def selector_specs(cfg: Selection, vocab: int, width: int) -> Selector:
    """Specs of the selector."""
    name = "candidate_selector."
    codes = lambda which: ArraySpec((vocab, cfg.rank), ("vocab", None), (f"{name}{which}_codebook",))  # noqa: E731
    return Selector(
        codes("predecessor"),
        codes("successor"),
        ArraySpec((cfg.rank, width), (None, None), (f"{name}hidden_projection.weight",)),
    )


def around(
    p: Conv | None,
    cfg: Convolution | None,
    x: Rows,
    sublayer: Callable[[Rows], Float[Array, "B N D"]],
) -> Float[Array, "B N D"]:
    """``sublayer(x)`` between two convolutions along the block, whose kernels depend on ``x`` row by row."""
    if p is None or cfg is None:
        return sublayer(x)
    x = plain(x)
    kernels = linear(x, p.project).reshape(*x.shape[:2], 2, cfg.taps, -1)
    inner = convolve(x, p.base[0], kernels[:, :, 0], cfg.group)
    return convolve(sublayer(inner), p.base[1], kernels[:, :, 1], cfg.group)


def convolve(
    x: Float[Array, "B N D"], base: Float[Array, "W D"], added: Float[Array, "B N W P"], group: int
) -> Float[Array, "B N D"]:
    """Sum over taps t of (base[t] + what the row adds, shared by a group) * the row t before; zeros before
    the block."""
    out = jnp.zeros_like(x)
    for t in range(base.shape[0]):
        before = jnp.pad(x, ((0, 0), (t, 0), (0, 0)))[:, : x.shape[1]]
        out = out + (base[t].astype(x.dtype) + jnp.repeat(added[:, :, t], group, axis=-1)) * before
    return out


def walk(
    p: Selector,
    cfg: Selection,
    hidden: Float[Array, "B K D"],
    logits: Float[Array, "B K V"],
    anchor: Int[Array, " B"],
    keys: Array | None,
    temperature: Float[Array, " B"] | None,
) -> tuple[Int[Array, "B K"], Float[Array, "B K V"] | None]:
    """One token per position, left to right among the best candidates, and the distributions drawn from.

    A draw is from the softmax of the candidates' scores; q is that, spread over the vocabulary, with zeros
    for everything that was no candidate.
    """
    best, ids = jax.lax.top_k(logits, cfg.top)
    rank = linear(hidden, p.project)
    token, tokens, picked = anchor, [], []
    for t in range(logits.shape[1]):
        score = scores(p.predecessor[token], rank[:, t], p.successor[ids[:, t]])
        index, q = pick(best[:, t] + score, keys, t, temperature)
        token = jnp.take_along_axis(ids[:, t], index[:, None], 1)[:, 0]
        tokens.append(token)
        picked.append(q)
    if picked[0] is None:
        return jnp.stack(tokens, 1), None
    return jnp.stack(tokens, 1), _spread(jnp.stack(picked, 1), ids, logits.shape[-1])


def scores(
    before: Float[Array, "*B R"], rank: Float[Array, "*B R"], after: Float[Array, "*B M R"]
) -> Float[Array, "*B M"]:
    """float32 scores of candidates, from the predecessor's code, the row's and the candidates'."""
    wanted = (before * rank).astype(after.dtype)
    return jnp.einsum(
        "...r,...mr->...m",
        wanted,
        after,
        precision=precision_of(after.dtype),
        preferred_element_type=jnp.float32,
    )


def _spread(q: Float[Array, "B K M"], ids: Int[Array, "B K M"], vocab: int) -> Float[Array, "B K V"]:
    put = lambda row, at: jnp.zeros((vocab,), jnp.float32).at[at].set(row, unique_indices=True)  # noqa: E731
    return jax.vmap(jax.vmap(put))(q, ids)
