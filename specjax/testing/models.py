"""A Llama target small enough for a test, with logits far enough apart for exact comparisons."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import registry
from specjax.config import Meta
from specjax.types import ArraySpec, Params


def tiny_config(
    vocab: int = 64, width: int = 32, layers: int = 2, max_positions: int = 512, **overrides: Any
) -> dict[str, Any]:
    """``config.json`` of a small Llama with grouped heads; ``overrides`` replace or add keys."""
    return {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 2 * width,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    } | overrides


def tiny_params(
    seed: int = 0,
    drafter: str | None = None,
    drafter_cfg: Any = None,
    drafter_weights: Any = None,
    *,
    sharpness: float = 16.0,
    eos_ids: tuple[int, ...] = (),
    hf: dict[str, Any] | None = None,
    **config: Any,
) -> Params:
    """Seeded float32 target, with a drafter if one is named.

    ``sharpness`` is about the standard deviation of the logits: at 16 the two largest are nearly always
    more than 0.01 apart, against rounding of about 0.0001; at 1 a draw at temperature 1 reaches most of the
    vocabulary.
    ``config`` goes to :func:`tiny_config` (``vocab``, ``width``, ``layers``, ...); ``hf`` replaces it.
    ``drafter_weights="target"`` lends the drafter the target's own weights.
    """
    hf = tiny_config(**config) if hf is None else hf
    family = hf["model_type"]
    cfg = registry.target(family).config(hf)
    weights = random_weights(registry.target(family).abstract(cfg), seed)
    weights = _lively(weights, sharpness)
    meta = Meta(
        family=family, target_cfg=cfg, drafter=drafter, drafter_cfg=drafter_cfg, eos_ids=eos_ids, name="tiny"
    )
    lent = weights if isinstance(drafter_weights, str) and drafter_weights == "target" else drafter_weights
    return Params(weights, lent, meta)


def tiny_drafter(params: Params, name: str, seed: int = 1, cfg: Any = None, **changes: Any) -> Params:
    """``params`` with a registered drafter of random weights.

    ``cfg`` defaults to the drafter's own ``tiny`` config; ``changes`` replace fields of it.
    """
    module = registry.drafter(name)
    cfg = module.tiny(params.meta.target_cfg) if cfg is None else cfg
    cfg = dataclasses.replace(cfg, **changes) if changes else cfg
    specs = module.abstract(cfg)
    weights = None if specs is None else random_weights(specs, seed)
    meta = dataclasses.replace(params.meta, drafter=name, drafter_cfg=cfg)
    return Params(params.target, weights, meta)


def random_weights(specs: Any, seed: int) -> Any:
    """Arrays in place of ArraySpecs; drawn by NumPy so that they are the same on every device."""
    rng = np.random.default_rng(seed)

    def make(spec: ArraySpec):
        if spec.init != "normal":
            return jnp.full(spec.shape, 1.0 if spec.init == "ones" else 0.0, spec.dtype or jnp.float32)
        mixes_heads = len(spec.shape) == 3 and spec.axes[0] is None  # output projection [D H C]
        fan_in = np.prod(spec.shape[1:]) if mixes_heads else spec.shape[-1]
        return jnp.asarray(rng.standard_normal(spec.shape) / np.sqrt(fan_in), jnp.float32)

    return jax.tree.map(make, specs, is_leaf=lambda x: isinstance(x, ArraySpec))


def _lively(weights: Any, sharpness: float) -> Any:
    """Scale the head to the wanted spread, and attention up: otherwise a random model looks at little but
    its last token and falls into a short cycle."""
    layers = tuple(_louder(x) for x in weights.layers)
    if weights.head is None:
        return weights.replace(layers=layers, norm=weights.norm * sharpness)
    return weights.replace(layers=layers, head=weights.head * sharpness)


def _louder(layer: Any) -> Any:
    """Queries and output four times as large, in the layer itself or in its ``mixer``."""
    if hasattr(layer, "mixer"):
        return dataclasses.replace(layer, mixer=_louder(layer.mixer))
    return dataclasses.replace(layer, **{n: getattr(layer, n) * 4 for n in ("q", "o") if hasattr(layer, n)})
