"""Rotary position embedding: frequencies from a config, rotation of half-split pairs.

Sources: transformers' ``rope_parameters`` (nested) and the older flat ``rope_theta`` + ``rope_scaling``.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
    "proportional": (),
}
_KNOWN = {
    "rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "finetuned",
    "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
    "attention_factor", "truncate", "partial_rotary_factor", "mrope_section", "mrope_interleaved",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Frozen rope settings. ``kind`` is default, linear, llama3, yarn or proportional.

    Proportional: the slowest pairs of a whole head of ``span`` channels do not turn. Frequencies and pairs are
    those of the head, not of the channels that turn.
    """

    dims: int  # rotated dimensions of a head
    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq: float = 1.0
    high_freq: float = 4.0
    original_max: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    span: int | None = None  # channels over which pairs and frequencies are laid out; None = dims

    @property
    def pair(self) -> int:
        """Distance between the two channels of a pair."""
        return (self.dims if self.span is None else self.span) // 2


def rope_config(hf: Mapping[str, Any], dims: int) -> RopeConfig:
    """Read rope settings from a config dict, flat or nested.

    Raises ValueError when the two layouts disagree, when the scaling type is unknown (it is never
    treated as plain rope) or when a key it needs is missing.
    """
    nested, flat = dict(hf.get("rope_parameters") or {}), dict(hf.get("rope_scaling") or {})
    for name in ("type", "rope_type"):
        if name in nested and name in flat and nested[name] != flat[name]:
            raise ValueError(f"rope_parameters says {nested[name]!r} but rope_scaling says {flat[name]!r}")
    theta = nested.get("rope_theta", flat.get("rope_theta"))
    if theta is not None and "rope_theta" in hf and float(hf["rope_theta"]) != float(theta):
        raise ValueError(f"rope_theta is {hf['rope_theta']} at top level but {theta} in the nested layout")
    p = {**flat, **nested}
    unknown = sorted(set(p) - _KNOWN)
    if unknown:
        raise ValueError(f"unknown rope setting(s) {unknown}; known: {sorted(_KNOWN)}")
    kind = p.get("rope_type", p.get("type", "default")) or "default"
    if kind not in _KEYS:
        raise ValueError(f"unknown rope type {kind!r}; supported: {', '.join(_KEYS)}")
    missing = [k for k in _KEYS[kind] if k not in p]
    if missing:
        raise ValueError(f"rope type {kind!r} needs {missing}, which the config does not give")
    original = p.get("original_max_position_embeddings", hf.get("max_position_embeddings", 8192))
    share = float(p.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0)))
    proportional = kind == "proportional"
    return RopeConfig(
        dims=2 * int(share * dims // 2) if proportional else int(dims * share),
        theta=float(theta if theta is not None else hf.get("rope_theta", 10000.0)),
        kind=kind,
        factor=float(p.get("factor", 1.0)),
        low_freq=float(p.get("low_freq_factor", 1.0)),
        high_freq=float(p.get("high_freq_factor", 4.0)),
        original_max=int(original)
        if kind in ("llama3", "yarn")
        else RopeConfig.original_max,  # of no use elsewhere
        beta_fast=float(p.get("beta_fast") or 32.0),
        beta_slow=float(p.get("beta_slow") or 1.0),
        attention_factor=_attention_factor(kind, p),
        truncate=bool(p.get("truncate", True)),
        span=dims if proportional else None,
    )


def _attention_factor(kind: str, p: Mapping[str, Any]) -> float:
    """Multiplier of cos and sin (YaRN only); an explicit value wins."""
    if kind != "yarn":
        return 1.0
    if p.get("attention_factor") is not None:
        return float(p["attention_factor"])
    scale = lambda m: 1.0 if p["factor"] <= 1 else 0.1 * m * math.log(p["factor"]) + 1.0  # noqa: E731
    if p.get("mscale") and p.get("mscale_all_dim"):
        return scale(float(p["mscale"])) / scale(float(p["mscale_all_dim"]))
    return scale(1.0)


def inverse_frequencies(cfg: RopeConfig) -> np.ndarray:
    """float32 ``[dims/2]`` angular frequencies per position, computed in float64 on the host."""
    base = cfg.theta ** (-np.arange(0, cfg.dims, 2, dtype=np.float64) / (2 * cfg.pair))
    if cfg.kind in ("linear", "proportional"):
        base = base / cfg.factor
    elif cfg.kind == "llama3":
        base = _llama3(base, cfg)
    elif cfg.kind == "yarn":
        base = _yarn(base, cfg)
    return base.astype(np.float32)


def _llama3(inv: np.ndarray, cfg: RopeConfig) -> np.ndarray:
    """Llama 3.1: long wavelengths divided by ``factor``, short ones kept, a ramp between."""
    turns = cfg.original_max * inv / (2 * math.pi)
    smooth = np.clip((turns - cfg.low_freq) / (cfg.high_freq - cfg.low_freq), 0.0, 1.0)
    return (1 - smooth) * inv / cfg.factor + smooth * inv


def _yarn(inv: np.ndarray, cfg: RopeConfig) -> np.ndarray:
    """YaRN (arXiv 2309.00071): interpolate below beta_slow turns, keep above beta_fast."""
    edge = lambda turns: (  # noqa: E731
        cfg.dims * math.log(cfg.original_max / (2 * math.pi * turns)) / (2 * math.log(cfg.theta))
    )
    low, high = edge(cfg.beta_fast), edge(cfg.beta_slow)
    if cfg.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, cfg.dims - 1)
    ramp = np.clip((np.arange(cfg.dims // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
    return inv / cfg.factor * ramp + inv * (1 - ramp)


def rope_angles(
    cfg: RopeConfig, pos: Int[Array, "B Q"]
) -> tuple[Float[Array, "B Q R"], Float[Array, "B Q R"]]:
    """cos and sin in float32, ``R = dims/2``."""
    angle = pos[..., None].astype(jnp.float32) * jnp.asarray(inverse_frequencies(cfg))
    return jnp.cos(angle) * cfg.attention_factor, jnp.sin(angle) * cfg.attention_factor


def rotate(
    x: Float[Array, "B Q N C"],
    cos: Float[Array, "B Q R"],
    sin: Float[Array, "B Q R"],
    pair: int | None = None,
) -> Float[Array, "B Q N C"]:
    """Rotate pairs of channels (j, j + ``pair``) for j < R; the others pass through with the same bits.

    ``pair`` None: R, so that the pairs fill the first 2R channels of each head.
    """
    turned, pair = cos.shape[-1], cos.shape[-1] if pair is None else pair
    cos, sin = cos[:, :, None], sin[:, :, None]
    first, second = x[..., :turned], x[..., pair : pair + turned]
    a, b = first.astype(jnp.float32), second.astype(jnp.float32)
    return jnp.concatenate(
        [
            (a * cos - b * sin).astype(x.dtype),
            x[..., turned:pair],
            (b * cos + a * sin).astype(x.dtype),
            x[..., pair + turned :],
        ],
        -1,
    )
