"""Serial drafters of every kind on small targets, for tests of their training."""

import dataclasses
import functools
from collections.abc import Callable

import assistant_tiny
import eagle3_tiny
import jax
import jax.numpy as jnp
import numpy as np
from families import HYBRID_MOE, LATENT

from specjax import registry, testing
from specjax.drafters import eagle3, mtp
from specjax.types import ArraySpec, Params

GEMMA = {"hidden_act": "gelu_pytorch_tanh"}
QWEN3 = testing.tiny_config(model_type="qwen3", layers=1)


def lively(params: Params, seed: int = 1) -> Params:
    """Norms and biases away from their trivial values."""
    rng = np.random.default_rng(seed)

    def moved(spec: ArraySpec, x):
        if spec.init == "normal" or spec.dtype == "int32":
            return x
        return x + 0.3 * rng.standard_normal(x.shape).astype(x.dtype)

    specs = registry.drafter(params.meta.drafter).abstract(params.meta.drafter_cfg)
    weights = jax.tree.map(moved, specs, params.drafter, is_leaf=lambda x: isinstance(x, ArraySpec))
    return dataclasses.replace(params, drafter=weights)


def _eagle3(kind: str, **changes) -> Params:
    return eagle3_tiny.drafted(kind, **changes)


def _gemma() -> Params:
    base = eagle3_tiny.target()
    layer = eagle3_tiny.LAYER | GEMMA
    given = {"transformer": layer, "flavour": "gemma4", "qk_norm": True, "softcap": 3.0, "input_scale": 4.0}
    cfg = eagle3.config(eagle3_tiny.settings("llama", **given), base.meta.target_cfg)
    return eagle3_tiny.attached(base, cfg)


def _mtp(hf: dict | None = None, **changes) -> Params:
    """A layer of some family on the Llama target."""
    base = eagle3_tiny.target()
    cfg = mtp.tiny(base.meta.target_cfg)
    if hf is not None:
        hf = hf | {"hidden_size": eagle3_tiny.WIDTH, "vocab_size": eagle3_tiny.VOCAB}
        model = registry.target(hf["model_type"]).config(hf)
        cfg = mtp.config({"family": hf["model_type"], "model": model, "k": 3}, base.meta.target_cfg)
    return lively(testing.tiny_drafter(base, "mtp", 1, cfg, **changes))


def _assistant(**changes) -> Params:
    return lively(testing.tiny_drafter(eagle3_tiny.target(), "assistant", 1, **changes))


KINDS: dict[str, Callable[[], Params]] = {
    **{f"eagle3, {kind}": functools.partial(_eagle3, kind) for kind in eagle3_tiny.KINDS},
    "eagle3, borrowed rows": functools.partial(_eagle3, "reduced", own_head=False),
    "eagle3, gemma": _gemma,
    "mtp": _mtp,
    "mtp, cut": functools.partial(_mtp, draft_ids=(0, 2, 3, 6)),
    "mtp, raw": functools.partial(_mtp, state="raw"),
    "mtp, experts": functools.partial(_mtp, HYBRID_MOE),
    "mtp, latent": functools.partial(_mtp, LATENT),
    "mtp, qwen3": functools.partial(_mtp, QWEN3),
    "assistant": _assistant,
    "assistant, held back": functools.partial(_assistant, position_offset=0),
    "assistant, two kinds": assistant_tiny.drafted,
    "assistant, clusters": functools.partial(assistant_tiny.drafted, **assistant_tiny.CLUSTERS),
}


@functools.cache
def drafted(kind: str) -> Params:
    """float32, with greedy drafting and random weights."""
    params = KINDS[kind]()
    weights = jax.tree.map(
        lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, params.drafter
    )
    meta = dataclasses.replace(
        params.meta, drafter_cfg=dataclasses.replace(params.meta.drafter_cfg, drafting="greedy")
    )
    return dataclasses.replace(params, drafter=weights, meta=meta)
