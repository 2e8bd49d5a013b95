"""A small attention target with a window per layer, for tests of ring caches and rollback.

Layers with a window keep a :class:`~specjax.core.cache.RingKV`, others (window 0) a
:class:`~specjax.core.cache.DenseKV`. Family name: ``"specjax.testing.sliding"``.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.config import Meta
from specjax.core.cache import DenseKV, RingKV
from specjax.layers.attention import attend
from specjax.layers.linear import linear
from specjax.layers.norm import rms_norm
from specjax.layers.rope import RopeConfig, rope_angles, rotate
from specjax.types import ArraySpec, KVView, Mode, Params, Shared, TapSpec, TargetOut

EPS = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Frozen settings: one layer per entry of ``windows``, 0 = full attention."""

    vocab_size: int
    hidden_size: int
    windows: tuple[int, ...]
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 8
    max_positions: int = 1024
    mlp_size: int = 1

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def rope(self) -> RopeConfig:
        """Plain rope over the whole head."""
        return RopeConfig(self.head_dim)


@struct.dataclass
class Layer:
    """Weights of one layer: attention, no MLP."""

    q: Float[Array, "H C D"]
    k: Float[Array, "G C D"]
    v: Float[Array, "G C D"]
    o: Float[Array, "D N"]  # N = H * C


@struct.dataclass
class Weights:
    """All weights."""

    embed: Float[Array, "V D"]
    layers: tuple[Layer, ...]
    head: Float[Array, "V D"]


def sliding_params(
    windows: tuple[int, ...] = (5, 3),
    seed: int = 0,
    vocab: int = 32,
    width: int = 16,
    *,
    drafter: str | None = None,
    drafter_cfg: Any = None,
    drafter_weights: Any = None,
    eos_ids: tuple[int, ...] = (),
) -> Params:
    """Random target whose layers weigh keys unevenly, so that one wrong key changes the tokens."""
    cfg = Config(vocab_size=vocab, hidden_size=width, windows=windows)
    rng = np.random.default_rng(seed)

    def make(spec: ArraySpec):
        return jnp.asarray(rng.standard_normal(spec.shape) / np.sqrt(spec.shape[-1]), jnp.float32)

    weights = jax.tree.map(make, abstract(cfg), is_leaf=lambda x: isinstance(x, ArraySpec))
    layers = tuple(x.replace(q=x.q * 3, o=x.o * 3) for x in weights.layers)
    meta = Meta(
        family="specjax.testing.sliding",
        target_cfg=cfg,
        drafter=drafter,
        drafter_cfg=drafter_cfg,
        eos_ids=eos_ids,
        name="sliding",
    )
    return Params(weights.replace(layers=layers, head=weights.head * 16), drafter_weights, meta)


def config(hf: Mapping[str, Any]) -> Config:
    """Config from its own fields as a dict."""
    return Config(**{**hf, "windows": tuple(hf["windows"])})


def abstract(cfg: Config) -> Weights:
    """Weight struct of ArraySpecs."""
    d, h, g, c = cfg.hidden_size, cfg.heads, cfg.kv_heads, cfg.head_dim
    spec = lambda *shape: ArraySpec(shape, (None,) * len(shape))  # noqa: E731
    layer = Layer(spec(h, c, d), spec(g, c, d), spec(g, c, d), spec(d, h * c))
    return Weights(spec(cfg.vocab_size, d), (layer,) * cfg.num_layers, spec(cfg.vocab_size, d))


def init_cache(cfg: Config, rows: int, slots: int, q_max: int, dtype: Any) -> tuple[DenseKV | RingKV, ...]:
    """A ring for each window, a dense cache for each full layer."""
    g, c = cfg.kv_heads, cfg.head_dim
    return tuple(
        RingKV.create(rows, g, w, q_max, c, dtype) if w else DenseKV.create(rows, g, slots, c, dtype)
        for w in cfg.windows
    )


def forward(
    p: Weights,
    cfg: Config,
    tokens: Int[Array, "B Q"],
    pos: Int[Array, "B Q"],
    valid: Int[Array, " B"],
    cache: tuple[DenseKV | RingKV, ...],
    taps: TapSpec,
    mode: Mode,
) -> TargetOut:
    """One pass over Q contiguous positions per row."""
    x, angles = p.embed[tokens], rope_angles(cfg.rope, pos)
    kept, new_cache = {}, []
    for i, (layer, kv, window) in enumerate(zip(p.layers, cache, cfg.windows, strict=True)):
        if i in taps.taps:
            kept[i] = x
        y = _normed(x)
        q, k, v = (linear(y, w) for w in (layer.q, layer.k, layer.v))
        keys, values, key_pos, kv = kv.extend(rotate(k, *angles), v, pos, valid, mode)
        out = attend(rotate(q, *angles), keys, values, pos, key_pos, cfg.head_dim**-0.5, window or None)
        x = x + linear(out.reshape(*out.shape[:2], -1), layer.o)
        new_cache.append(kv)
    if cfg.num_layers in taps.taps:
        kept[cfg.num_layers] = x
    return TargetOut(_normed(x), kept, tuple(new_cache))


def _normed(x):
    return rms_norm(x, jnp.ones(x.shape[-1:], x.dtype), EPS)


def commit(cfg: Config, cache, emitted: Int[Array, " B"]):
    """Every cache keeps what the length says."""
    return tuple(kv.commit(emitted) for kv in cache)


def unembed(p: Weights, cfg: Config, hidden: Float[Array, "*N D"]) -> Float[Array, "*N V"]:
    """float32 logits."""
    return linear(hidden, p.head, out_dtype=jnp.float32)


def shared(p: Weights, cfg: Config) -> Shared:
    """Embedding and head."""
    return Shared(p.embed, p.head)


def kv_view(p: Weights, cfg: Config, cache, kind: str) -> KVView:
    """Keys and values of the last layer of the kind."""
    wanted = RingKV if kind == "sliding" else DenseKV
    last = [kv for kv in cache if isinstance(kv, wanted)][-1]
    slots = jnp.broadcast_to(jnp.arange(last.k.shape[2]), (last.k.shape[0], last.k.shape[2]))
    return KVView(last.k, last.v, last.pos if isinstance(last, RingKV) else slots)


def min_resume(cfg: Config, high_water: int) -> int:
    """A ring of window + q_max slots goes back q_max positions, and every block has at least one."""
    return max(1, high_water - 1) if any(cfg.windows) else 1
