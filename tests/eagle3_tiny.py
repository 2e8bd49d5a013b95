"""Small targets with EAGLE-3 drafters of every kind, and the same drafters as the tensors of a published file."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from eagle3_reference import Slow

from specjax import registry, testing
from specjax.drafters import eagle3
from specjax.types import AbsorbIn, ArraySpec, Ctx, Params, TapSpec

WIDTH = 16
#: So few tokens that a random drafter is right now and then: every pattern of rejections occurs.
VOCAB = 7
LAYER = {
    "hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 24, "vocab_size": VOCAB,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
    "rope_scaling": {
        "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip
SLIDING = {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 3,
}
#: name -> (keys of the layers, settings)
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({}, {}),
    "qwen3, 3.1": (
        {"rope_theta": 1e6},
        {"qk_norm": True, "fc_norm": True, "norm_output": True, "norm_before_residual": True},
    ),
    "reduced": ({}, {"draft_vocab_size": 4, "reduced": True, "norm_before_fc": True, "logit_scale": 0.5}),
    "no taps": ({}, {"use_aux_hidden_state": False, "taps": ()}),
    "sliding": (SLIDING | {"attention_bias": True, "hidden_size": 24}, {"own_embed": True, "o_bias": False}),
    "latent": (LATENT, {"latent": True, "norm_before_residual": True}),
    "latent, two layers": ({"q_lora_rank": None, "num_hidden_layers": 2}, {"latent": True}),
}
KINDS["latent, two layers"][0].update(
    {k: v for k, v in LATENT.items() if k not in ("q_lora_rank", "rope_scaling")}
)
IDS = np.array([1, 2, 4, 6])  # of the reduced vocabulary


@functools.cache
def target() -> Params:
    """Three layers; logits far apart."""
    return testing.tiny_params(5, vocab=VOCAB, width=WIDTH, layers=3)


def settings(kind: str, **changes: Any) -> dict[str, Any]:
    layer, given = KINDS[kind]
    return {"transformer": LAYER | layer, "taps": (0, 2, 3), "k": 3} | given | changes


def drafted(kind: str = "llama", seed: int = 1, **changes: Any) -> Params:
    """The target with a random drafter; norms and biases are not at their trivial values."""
    return attached(target(), eagle3.config(settings(kind, **changes), target().meta.target_cfg), seed)


def attached(base: Params, cfg: eagle3.Config, seed: int = 1) -> Params:
    """A target with a random drafter of a config."""
    params = testing.tiny_drafter(base, "eagle3", seed, cfg)
    rng = np.random.default_rng(seed)

    def lively(spec: ArraySpec, x):
        if spec.dtype is not None:
            return jnp.asarray(IDS - np.arange(len(IDS)), x.dtype)
        if spec.init == "normal":
            return x * (8 if spec.names[0] == "lm_head.weight" else 1)
        return x + 0.3 * rng.standard_normal(x.shape).astype(np.float32)

    specs = eagle3.abstract(cfg)
    weights = jax.tree.map(lively, specs, params.drafter, is_leaf=lambda x: isinstance(x, ArraySpec))
    return dataclasses.replace(params, drafter=weights)


def published(params: Params) -> dict[str, np.ndarray]:
    """Tensors as a file has them: two axes, ``layers.0.`` names."""
    specs = jax.tree.leaves(
        eagle3.abstract(params.meta.drafter_cfg), is_leaf=lambda x: isinstance(x, ArraySpec)
    )
    out = {}
    for spec, x in zip(specs, jax.tree.leaves(params.drafter), strict=True):
        x, name = np.asarray(x), spec.names[0]
        if x.ndim == 3:
            x = x.reshape(x.shape[0], -1) if "o_proj" in name else x.reshape(-1, x.shape[-1])
        out[name] = x.reshape(-1) if name.endswith("_proj.bias") else x
    if "d2t" in out:
        out["d2t"] = out["d2t"].astype(np.int64)
    return out


def slow(params: Params, kind: str) -> Slow:
    """The float64 reference of the same drafter."""
    layer, given = KINDS[kind]
    flags = {k: v for k, v in given.items() if k in ("norm_before_residual", "norm_output", "logit_scale")}
    lent = params.target
    return Slow(published(params), LAYER | layer, np.asarray(lent.embed), np.asarray(lent.head), **flags)


absorb = jax.jit(eagle3.absorb, static_argnums=2)
propose = jax.jit(eagle3.draft, static_argnums=(2, 3))


def _no_view(kind: str):
    raise ValueError(kind)


def ready(params: Params, rows: int = 3, length: int = 9, temperature=None):
    """(what the target lends, state, context) after absorbing random features; no target runs."""
    cfg, kind, rng = params.meta.drafter_cfg, params.drafter.norm.dtype, np.random.default_rng(2)
    lent = registry.target("llama").shared(params.target, params.meta.target_cfg)
    tokens = jnp.asarray(rng.integers(0, VOCAB, (rows, length)), jnp.int32)
    random = lambda: jnp.asarray(rng.standard_normal((rows, length - 1, cfg.target_size)), lent.embed.dtype)  # noqa: E731
    pos = jnp.broadcast_to(jnp.arange(length - 1, dtype=jnp.int32), (rows, length - 1))
    keep = jnp.full((rows,), length - 1, jnp.int32)
    block = AbsorbIn(
        tokens[:, :-1], tokens[:, 1:], pos, keep, random(), {t: random() for t in cfg.taps}, "extend"
    )
    empty = eagle3.init_state(cfg, rows, length + 8, 8, kind)
    state = absorb(params.drafter, lent, cfg, empty, block)
    end, live = jnp.full((rows,), length, jnp.int32), jnp.ones((rows,), bool)
    return lent, state, Ctx(tokens, end, tokens[:, -1], live, temperature, _no_view)


def draft(params: Params, k: int = 3, temperature=None, **place: int):
    """Proposal of a drafter made :func:`ready`."""
    lent, state, ctx = ready(params, temperature=temperature, **place)
    keys = None if temperature is None else jax.random.split(jax.random.key(0), 3)
    return propose(params.drafter, lent, params.meta.drafter_cfg, k, state, ctx, keys)[0]


@functools.cache
def _pass():
    module, meta = registry.target(target().meta.family), target().meta
    taps = TapSpec(tuple(range(meta.target_cfg.num_layers + 1)), hidden=True)

    @jax.jit
    def run(p, ids):
        cache = module.init_cache(meta.target_cfg, *ids.shape, 1, jnp.float32)
        pos = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
        out = module.forward(
            p, meta.target_cfg, ids, pos, jnp.full(len(ids), ids.shape[1]), cache, taps, "extend"
        )
        return out.taps, out.hidden

    return run


def features(reference: Slow, cfg: eagle3.Config, tokens: np.ndarray) -> np.ndarray:
    """Fused features [B T D] of all positions of texts, from one pass of the target over them."""
    taps, hidden = jax.tree.map(np.asarray, _pass()(target().target, jnp.asarray(tokens, jnp.int32)))
    return reference.fuse([taps[j] for j in cfg.taps] or [hidden])
