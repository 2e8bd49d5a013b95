"""Folders of small targets with a layer for multi-token prediction in them, as published files have it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tiny_files
from families import HYBRID, HYBRID_MOE, LATENT
from safetensors.numpy import load_file, save_file

from specjax import registry
from specjax.drafters import mtp
from specjax.types import ArraySpec

VOCAB = 7
_V3 = LATENT | {"num_key_value_heads": 2, "num_nextn_predict_layers": 1}
#: name -> (config of the target, where the layer lies, whether its experts are fused)
LAYOUTS: dict[str, tuple[dict[str, Any], str, bool]] = {
    "qwen": (HYBRID, "mtp.", False),
    "qwen, experts": (HYBRID_MOE, "mtp.", True),
    "deepseek": (_V3, "model.layers.2.", False),
    "deepseek, mtp": (_V3, "model.mtp.layers.0.", False),
    "deepseek, short": (_V3, "mtp.0.", True),
}
_DEEPSEEK = {
    "fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head.norm",
}  # fmt: skip


def config(kind: str, **changes: Any) -> dict[str, Any]:
    """``config.json`` of the target."""
    return LAYOUTS[kind][0] | {"vocab_size": VOCAB, "tie_word_embeddings": False} | changes


def layer(kind: str, seed: int = 1, **changes: Any) -> dict[str, np.ndarray]:
    """Tensors of the layer under the names of :mod:`specjax.drafters.mtp_model`."""
    hf = config(kind, **changes)
    model = registry.target(hf["model_type"]).config(hf)
    return arrays(mtp.abstract(mtp.config({"family": hf["model_type"], "model": model}, model)), seed)


def arrays(specs: Any, seed: int, gain: float = 1.5) -> dict[str, np.ndarray]:
    """Float32 arrays for a tree of specs under their names, two-dimensional, none at a trivial value."""
    rng, out = np.random.default_rng(seed), {}
    for spec in jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, ArraySpec)):
        for name in spec.names:
            shape = _flat(name, spec.shape if len(spec.names) == 1 else spec.shape[1:])
            x = rng.standard_normal(shape).astype(np.float32)
            out[name] = (
                x * gain / shape[-1] ** 0.5 if spec.init == "normal" else 0.3 * x + (spec.init == "ones")
            )
    return out


def _flat(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape in a file, where heads and channels are one axis."""
    if "conv1d" in name:
        return shape[0], 1, shape[1]
    if len(shape) < 3:
        return shape
    into = "o_proj" in name or "out_proj" in name
    return (shape[0], shape[1] * shape[2]) if into else (shape[0] * shape[1], shape[2])


def published(kind: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same under the names of published files."""
    _, prefix, fused = LAYOUTS[kind]
    return {prefix + _there(name, prefix): x for name, x in (fuse(tensors) if fused else tensors).items()}


def _there(name: str, prefix: str) -> str:
    if prefix == "mtp.":
        return name
    stem, _, last = name.rpartition(".")
    return f"{_DEEPSEEK.get(stem, stem)}.{last}".removeprefix("layers.0.")


def fuse(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Experts stacked in two tensors."""
    prefix, out = "layers.0.mlp.experts.", dict(tensors)
    count = len({n.removeprefix(prefix).split(".")[0] for n in out if n.startswith(prefix)})
    if not count:
        return out
    gate, up, down = (
        np.stack([out.pop(f"{prefix}{e}.{part}_proj.weight") for e in range(count)])
        for part in ("gate", "up", "down")
    )
    return out | {f"{prefix}gate_up_proj": np.concatenate([gate, up], 1), f"{prefix}down_proj": down}


def folder(
    path: Path, kind: str, extra: dict[str, np.ndarray] | None = None, seed: int = 1, **changes: Any
) -> Path:
    """A target with its layer (of ``seed``); ``extra`` tensors beside it, ``changes`` of its config."""
    hf = config(kind, **changes)
    family = registry.target(hf["model_type"])
    held = arrays(family.abstract(family.config(hf)), 5)
    held["lm_head.weight"] = 4 * held["lm_head.weight"]
    return tiny_files.folder(path, hf, held | published(kind, layer(kind, seed)) | (extra or {}))


def change(path: Path, edit: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> Path:
    """The folder with other tensors."""
    save_file(edit(load_file(path / "model.safetensors")), path / "model.safetensors")
    return path
