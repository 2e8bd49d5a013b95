"""Feed-forward blocks that families share: dense, and experts with what stands beside them.

Checkpoints hold experts one by one (``experts.3.gate_proj.weight``) or fused (``experts.gate_up_proj [E 2F D]``, gate
rows first, and ``experts.down_proj [E D F]``); both fill the same arrays.
"""

from collections.abc import Callable

import jax
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.layers.linear import linear
from specjax.layers.mlp import swiglu
from specjax.layers.moe import experts
from specjax.layers.norm import Rows, plain
from specjax.types import ArraySpec


@struct.dataclass
class Dense:
    """Weights of a plain feed-forward block."""

    gate: Float[Array, "F D"]
    up: Float[Array, "F D"]
    down: Float[Array, "D F"]


@struct.dataclass
class Moe:
    """Weights of a block of experts. ``bias`` is added where experts are chosen; ``shared`` serves every token,
    times the sigmoid of ``shared_gate`` if there is one."""

    router: Float[Array, "E D"]
    gate: Float[Array, "E F D"]
    up: Float[Array, "E F D"]
    down: Float[Array, "E D F"]
    bias: Float[Array, " E"] | None = None
    shared: Dense | None = None
    shared_gate: Float[Array, "1 D"] | None = None


def dense_specs(width: int, size: int, prefix: str) -> Dense:
    """Specs under ``prefix`` ("model.layers.0.mlp.")."""
    return Dense(
        gate=ArraySpec((size, width), ("mlp", None), (prefix + "gate_proj.weight",)),
        up=ArraySpec((size, width), ("mlp", None), (prefix + "up_proj.weight",)),
        down=ArraySpec((width, size), (None, "mlp"), (prefix + "down_proj.weight",)),
    )


def moe_specs(width: int, size: int, count: int, prefix: str) -> Moe:
    """Specs of router and experts alone."""
    names = lambda part: tuple(f"{prefix}experts.{i}.{part}_proj.weight" for i in range(count))  # noqa: E731
    shape, axes, fused = (count, size, width), ("expert", "mlp", None), prefix + "experts.gate_up_proj"
    return Moe(
        router=ArraySpec((count, width), (None, None), (prefix + "gate.weight",)),
        gate=ArraySpec(shape, axes, names("gate"), fused=fused, rows=(0, size)),
        up=ArraySpec(shape, axes, names("up"), fused=fused, rows=(size, 2 * size)),
        down=ArraySpec(
            (count, width, size),
            ("expert", None, "mlp"),
            names("down"),
            fused=prefix + "experts.down_proj",
        ),
    )


Route = Callable[[Float[Array, "N D"], Moe], tuple[Float[Array, "N k"], Int[Array, "N k"]]]


def feed_forward(mlp: Dense | Moe, x: Rows, route: Route) -> Float[Array, "B Q D"]:
    """Output of either block for rows ``[B Q D]``; ``route(rows, mlp)`` gives weights and ids of each row's experts."""
    if isinstance(mlp, Dense):
        return swiglu(x, mlp.gate, mlp.up, mlp.down)
    x = plain(x)
    rows = x.reshape(-1, x.shape[-1])
    out = experts(rows, *route(rows, mlp), mlp.gate, mlp.up, mlp.down).reshape(x.shape)
    if mlp.shared is None:
        return out
    beside = swiglu(x, mlp.shared.gate, mlp.shared.up, mlp.shared.down)
    if mlp.shared_gate is not None:
        beside = jax.nn.sigmoid(linear(x, mlp.shared_gate)) * beside
    return out + beside
