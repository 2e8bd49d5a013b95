"""Drafters of every kind in every shape that layouts hold, and how they are written and read back."""

import dataclasses
import functools
import warnings

import assistant_tiny
import block_tiny
import eagle3_tiny
import families
import gemma_drafter_reference as gemma
import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax import checkpoints, registry, testing
from specjax.checkpoints import hub
from specjax.types import Params


@functools.cache
def target() -> Params:
    """Four layers, so that taps need not be the last."""
    return testing.tiny_params(layers=4, vocab=block_tiny.VOCAB)


LAYER = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 24,
}  # fmt: skip
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}


def made(base: Params, method: str, settings) -> Params:
    """A random drafter for a target, bfloat16 numbers throughout."""
    module = registry.drafter(method)
    params = testing.tiny_drafter(base, method, 1, module.config(settings, base.meta.target_cfg))
    return dataclasses.replace(params, drafter=jax.tree.map(rounded, params.drafter))


def rounded(x):
    x = np.asarray(x)  # on the host: nothing is compiled
    return jnp.asarray(x.astype(jnp.bfloat16).astype(x.dtype)) if jnp.issubdtype(x.dtype, jnp.floating) else x


def eagle(layers=(), **more):
    one = LAYER | {"num_hidden_layers": 1} | dict(layers)
    return made(target(), "eagle3", {"transformer": one, "taps": (0, 1, 3), "k": 4} | more)


def block(method="dflash", layers=(), causal=(False, False), **more):
    shape = {
        "transformer": LAYER | dict(layers), "layout": "fill", "block_size": 5, "mask_id": 23, "taps": (1, 2),
        "fc_width": 64, "causal": causal, "vocab_size": 24,
    }  # fmt: skip
    return made(target(), method, shape | more)


def layer(kind: str, **more):
    base = families.target(kind)
    model, family = base.meta.target_cfg, base.meta.family
    return made(base, "mtp", {"family": family, "model": model} | more)


def gemma_layers(method: str):
    """Gemma's layers for a Gemma target: a block, or EAGLE-3."""
    base = testing.tiny_params(3, hf=gemma.TARGET)
    width = int(base.meta.target_cfg.hidden_size)
    layers = {
        "hidden_size": width, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 16, "vocab_size": gemma.VOCAB, "hidden_act": "gelu_pytorch_tanh",
        "rope_parameters": {"rope_type": "proportional", "rope_theta": 100.0, "partial_rotary_factor": 0.25},
    }  # fmt: skip
    own = {"flavour": "gemma4", "values_from_keys": True, "input_scale": width**0.5, "softcap": 30.0}
    if method == "eagle3":
        return made(base, method, {"transformer": layers, "taps": (0, 1), "qk_norm": True, **own})
    shape = {
        "layout": "shift",
        "block_size": 3,
        "mask_id": 1,
        "taps": (0, 1),
        "fc_width": 2 * width,
        "causal": (False,),
    }
    return made(base, method, {"transformer": layers, **shape, **own, "confidence": True})


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
TABLES = {"own_embed": True, "own_head": True, "embed_rows": 24, "head_rows": 24}
REDUCED = {"draft_vocab": 9, "own_head": True, "head_rows": 9}
HEADS = {"markov_rank": 6, "markov_rows": 24, "confidence": True, "confidence_markov": True}
ANCHOR = {"layers": SLIDING, "window_from": "anchor"}
PARTS = {"conv": (2, 8), "selector": (6, 4)}
#: name -> (what makes it, layouts beside our own that hold it)
CASES = {
    "eagle3, llama": (eagle, "speculators eagle"),
    "eagle3, qwen3": (lambda: eagle(qk_norm=True), "speculators deepspec"),
    "eagle3, 3.1, yarn": (
        lambda: eagle(
            {"rope_scaling": YARN}, qk_norm=True, fc_norm=True, norm_output=True, norm_before_residual=True
        ),
        "speculators",
    ),
    "eagle3, own embedding, windows": (
        lambda: eagle(SLIDING | {"num_hidden_layers": 2}, qk_norm=True, own_embed=True, own_head=True),
        "speculators",
    ),
    "eagle3, reduced": (
        lambda: eagle(draft_vocab_size=9, reduced=True, norm_before_fc=True, own_head=True),
        "speculators eagle",
    ),
    "eagle3, logit scale": (lambda: eagle(logit_scale=0.5), "eagle"),
    "eagle3, no taps": (lambda: eagle(use_aux_hidden_state=False, taps=()), "eagle"),
    "eagle3, q, k, v biased": (lambda: eagle({"attention_bias": True}, o_bias=False), ""),
    "eagle3, latent": (
        lambda: eagle(eagle3_tiny.LATENT | {"num_hidden_layers": 2}, latent=True, norm_before_residual=True),
        "eagle",
    ),
    "eagle3, gemma4": (lambda: gemma_layers("eagle3"), "deepspec"),
    "dflash": (block, "speculators zlab"),
    "dflash, shift": (lambda: block(layout="shift"), "speculators deepspec"),
    "dflash, reduced": (lambda: block(**REDUCED, taps=(4, 1)), "speculators"),
    "dflash, own tables": (lambda: block(layout="shift", **TABLES), "deepspec"),
    "dflash, row window": (lambda: block(layers=SLIDING, causal=(True, False)), "zlab"),
    "dflash, anchor window": (lambda: block(**ANCHOR), "speculators"),
    "dflash, all causal": (lambda: block(causal=(True, True)), "zlab"),
    "dflash, mask vector": (lambda: block(mask_embedding=True), ""),
    "dflash, last tap": (lambda: block(taps=(2, 4)), "speculators"),
    "dflash2": (lambda: block(**ANCHOR, **PARTS), "speculators"),
    "dflash2, scaled": (lambda: block(**PARTS, input_scale=2.0, softcap=5.0, output_multiplier=0.5), "zlab"),
    "dspark": (lambda: block("dspark", layout="shift", **HEADS), "speculators deepspec"),
    "dspark, fill, reduced": (
        lambda: block("dspark", **HEADS, **REDUCED, markov_kind="rnn"),
        "speculators",
    ),
    "dspark, gated, windows": (
        lambda: block("dspark", **HEADS, **ANCHOR, causal=(True, False), markov_kind="gated"),
        "speculators",
    ),
    "dspark, gemma4": (lambda: gemma_layers("dspark"), "deepspec"),
    "mtp, hybrid": (lambda: layer("hybrid"), "speculators native"),
    "mtp, experts": (lambda: layer("hybrid_moe"), "speculators native"),
    "mtp, latent": (lambda: layer("latent"), "native"),
    "mtp, latent, own tables": (lambda: layer("latent", own_embed=True, own_head=True), "native"),
    "mtp, own embedding": (lambda: layer("hybrid", own_embed=True), "native"),
    "assistant": (lambda: testing.tiny_drafter(target(), "assistant"), "transformers"),
    "assistant, clusters": (lambda: assistant_tiny.drafted(**assistant_tiny.CLUSTERS), "transformers"),
    "assistant, before the anchor": (lambda: assistant_tiny.drafted(position_offset=0), ""),
    "draft model": (lambda: testing.tiny_drafter(target(), "draft_model"), ""),
}  # fmt: skip


def read(params: Params, folder, **settings) -> checkpoints.LoadedDrafter:
    """What is loaded from a folder for the target of ``params``; a warning is an error."""
    meta = params.meta
    lent = registry.target(meta.family).shared(params.target, meta.target_cfg)
    return checkpoints.load_drafter(
        hub.resolve(folder),
        meta.target_cfg,
        lent,
        lent.embed.dtype,
        settings=settings,
        eos_ids=meta.eos_ids,
        target_name=meta.name,
    )


def same(a, b) -> bool:
    """Structs of equal arrays."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    pairs = zip(*(map(np.asarray, jax.tree.leaves(tree)) for tree in (a, b)), strict=True)
    return all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in pairs)


def export(params, folder, layout="own", dtype="float32", **more):
    """``specjax.export``; that ``k`` has no place in a layout is not told."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"the \w+ layout has no place for k=\d: give it when loading")
        specjax.export(params, folder, layout, dtype, **more)
