"""Small Gemma 4 targets with assistants of random weights, and the same assistants as folders."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import gemma_tiny
import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from specjax import testing
from specjax.drafters import assistant
from specjax.types import ArraySpec, Params

#: So few tokens that a random assistant is right now and then: every pattern of rejections occurs.
VOCAB, WINDOW = 6, gemma_tiny.WINDOW
TEXT: dict[str, Any] = {
    "model_type": "gemma4_text", "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "global_head_dim": 32, "sliding_window": WINDOW,
    "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 2, "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 256,
}  # fmt: skip
CLUSTERS = {"centroids": 3, "top_centroids": 2}


@functools.cache
def target(name: str = "gemma4_small", vocab: int = VOCAB) -> Params:
    """A Gemma 4 of few tokens."""
    few = {"vocab_size": vocab, "max_position_embeddings": 1024}
    made = testing.tiny_params(0, hf=gemma_tiny.CONFIGS[name] | few)
    layers = tuple(layer.replace(q_norm=jnp.full_like(layer.q_norm, 3.0)) for layer in made.target.layers)
    return made.replace(target=made.target.replace(layers=layers))


def settings(text: Any = (), **changes: Any) -> dict[str, Any]:
    """What the loader gives to ``config``."""
    return {"text": TEXT | dict(text), "backbone_hidden_size": 32, "k": 3} | changes


def drafted(
    name: str = "gemma4_small", seed: int = 1, vocab: int = VOCAB, text: Any = (), **changes: Any
) -> Params:
    """The target with a random assistant; no norm or scale has its trivial value, clusters are shuffled."""
    base = target(name, vocab)
    cfg = assistant.config(settings(text, **changes), base.meta.target_cfg)
    params, rng = testing.tiny_drafter(base, "assistant", seed, cfg), np.random.default_rng(seed)

    def lively(spec: ArraySpec, x):
        if spec.dtype is not None:
            return jnp.asarray(rng.permutation(spec.shape[0]), x.dtype)
        if spec.names[0] == "lm_head.weight":
            return x * 4
        return x if spec.init == "normal" else x + 0.3 * rng.standard_normal(x.shape).astype(np.float32)

    specs = assistant.abstract(cfg)
    weights = jax.tree.map(lively, specs, params.drafter, is_leaf=lambda x: isinstance(x, ArraySpec))
    return dataclasses.replace(params, drafter=weights)


def tensors(params: Params) -> dict[str, np.ndarray]:
    """Tensors as a file has them: two axes, the head in the place of an embedding."""
    specs = assistant.abstract(params.meta.drafter_cfg)
    leaves, out = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, ArraySpec)), {}
    for spec, x in zip(leaves, jax.tree.leaves(params.drafter), strict=True):
        x, name = np.asarray(x), spec.names[0].replace("lm_head.", "model.embed_tokens.")
        if x.ndim == 3:
            x = x.reshape(x.shape[0], -1) if "o_proj" in name else x.reshape(-1, x.shape[-1])
        out[name] = x.astype(np.int64) if "ordering" in name else x
    return out


def folder(path: Path, params: Params, extra: Any = (), without: str = "", **keys: Any) -> Path:
    """A folder as transformers writes it; ``keys`` replace those of ``config.json``."""
    held = {name: x for name, x in tensors(params).items() if name != without} | dict(extra)
    path.mkdir(parents=True)
    save_file({name: np.ascontiguousarray(x) for name, x in held.items()}, path / "model.safetensors")
    clusters = params.meta.drafter_cfg.centroids
    config = {
        "model_type": "gemma4_assistant",
        "architectures": ["Gemma4AssistantForCausalLM"],
        "text_config": TEXT,
        "backbone_hidden_size": 32,
        "use_ordered_embeddings": bool(clusters),
        "num_centroids": clusters or 2048,
        "centroid_intermediate_top_k": params.meta.drafter_cfg.top_centroids or 32,
        "tie_word_embeddings": True,
    }
    (path / "config.json").write_text(json.dumps(config | keys))
    return path
