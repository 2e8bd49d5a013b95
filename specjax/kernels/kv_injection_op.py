"""Injection of features into the caches of all layers of a drafter: the operation and its reference.

For every position one fused feature is projected to each layer's key and value; keys are normed per head and turned to
their position; both are written at that position's slot. Nothing of one layer depends on another.
"""

import dataclasses

from flax import struct
from jaxtyping import Array, Float, Int

from specjax.core.cache import DenseKV
from specjax.kernels import dispatch
from specjax.layers.linear import linear
from specjax.layers.norm import rms_norm, rms_norm_wide
from specjax.layers.rope import RopeConfig, rope_angles, rotate
from specjax.types import Mode


@struct.dataclass
class Projections:
    """One layer's weights, (out, in). Without ``v`` values are the raw keys. Any other may be None."""

    k: Float[Array, "G C D"]
    v: Float[Array, "G C D"] | None
    k_bias: Float[Array, "G C"] | None
    v_bias: Float[Array, "G C"] | None
    k_norm: Float[Array, " C"] | None


@dataclasses.dataclass(frozen=True)
class Heads:
    """How keys and values are made: ``wide`` rounds a norm once (Gemma 4), ``value_norm`` norms values too."""

    rope: RopeConfig
    eps: float
    wide: bool = False
    value_norm: bool = False


Cache = tuple[Float[Array, "B G S C"], Float[Array, "B G S C"]]


def inject(
    x: Float[Array, "B Q D"],
    layers: tuple[Projections, ...],
    caches: tuple[Cache, ...],
    pos: Int[Array, "B Q"],
    keep: Int[Array, " B"],
    *,
    heads: Heads,
    mode: Mode = "extend",
    implementation: str | None = None,
) -> tuple[Cache, ...]:
    """The caches (keys, values; one pair per layer) with the first ``keep`` positions of every row written.

    Position p is written to slot p; positions outside the buffer are dropped. A value that is not finite becomes 0 and
    its key NaN, as in :func:`specjax.core.cache.laid_out`. Positions of a row are consecutive. Mode "verify": the rest
    of the block, which has room, may be written too: its slots are not seen before they are written again.
    ``implementation``: as for :func:`specjax.kernels.block_attention_op.attend_block`.
    """
    run = lambda *arrays: reference(*arrays, heads=heads, mode=mode)  # noqa: E731
    run = dispatch.implementation("kv_injection", (x, layers, caches, heads), run, implementation)
    return run(x, layers, caches, pos, keep)


def reference(x, layers, caches, pos, keep, *, heads: Heads, mode: Mode = "extend") -> tuple[Cache, ...]:
    """The same in jnp: two products and two writes per layer."""
    angles = rope_angles(heads.rope, pos)
    norm = rms_norm_wide if heads.wide else rms_norm

    def one(p: Projections, cache: Cache) -> Cache:
        raw = linear(x, p.k, p.k_bias)
        v = raw if p.v is None else linear(x, p.v, p.v_bias)
        k = raw if p.k_norm is None else norm(raw, p.k_norm, heads.eps)
        v = rms_norm_wide(v, None, heads.eps) if heads.value_norm else v
        kv = DenseKV(*cache).extend(rotate(k, *angles, heads.rope.pair), v, pos, keep, mode)[-1]
        return kv.k, kv.v

    return tuple(one(p, cache) for p, cache in zip(layers, caches, strict=True))
