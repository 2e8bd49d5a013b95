"""Models held as flax nnx modules in tunix's layout of Llama 3 and Qwen3 (dense and experts).

Weights there are input-major (``q_proj.w [D H C]``, ``kernel [in out]``, experts ``[E D F]``); the last axis
is the input here.
"""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from specjax.checkpoints.load import eos_union, family_module
from specjax.checkpoints.tree import fill
from specjax.config import Meta
from specjax.types import Params

_Transform = Callable[[np.ndarray], np.ndarray]
_heads_first: _Transform = lambda x: np.transpose(x, (1, 2, 0))  # noqa: E731
_out_first: _Transform = lambda x: np.transpose(x, (2, 0, 1))  # noqa: E731
_flip: _Transform = lambda x: x.T  # noqa: E731
_same: _Transform = lambda x: x  # noqa: E731

#: Path inside the module -> (checkpoint name, transform).
_RULES: tuple[tuple[str, str, _Transform], ...] = (
    (r"embedder\.input_embedding", "model.embed_tokens.weight", _same),
    (r"final_norm\.w", "model.norm.weight", _same),
    (r"lm_head\.w", "lm_head.weight", _flip),
    (r"layers\.(\d+)\.(input_layernorm|post_attention_layernorm)\.w", r"model.layers.\1.\2.weight", _same),
    (r"layers\.(\d+)\.attn\.([qk]_norm)\.w", r"model.layers.\1.self_attn.\2.weight", _same),
    (r"layers\.(\d+)\.attn\.([qkv]_proj)\.w", r"model.layers.\1.self_attn.\2.weight", _heads_first),
    (r"layers\.(\d+)\.attn\.o_proj\.w", r"model.layers.\1.self_attn.o_proj.weight", _out_first),
    (r"layers\.(\d+)\.mlp\.(gate_proj|up_proj|down_proj)\.kernel", r"model.layers.\1.mlp.\2.weight", _flip),
    (r"layers\.(\d+)\.mlp\.router\.kernel", r"model.layers.\1.mlp.gate.weight", _flip),
)
_STACKED = re.compile(r"layers\.(\d+)\.mlp\.(gate_proj|up_proj|down_proj)")
_POSITIONS = {"llama": 8192, "qwen3": 40960, "qwen3_moe": 40960}


def from_nnx(
    module: Any, dtype: Any = None, *, hf_config: Mapping[str, Any] | None = None, tokenizer_id: str = ""
) -> Params:
    """Params of a Llama 3 or Qwen3 nnx module.

    ``dtype``: of the weights (default: the embedding's). The config is read from ``module.config``;
    ``hf_config`` adds or replaces ``config.json`` keys, for what a module does not record: rope scaling,
    ``max_position_embeddings``, ``eos_token_id``. Raises ValueError naming what is missing or misshapen, and
    for unmerged LoRA weights.
    """
    from flax import nnx

    arrays = {".".join(map(str, k)): v for k, v in _flatten(nnx.to_pure_dict(nnx.state(module, nnx.Param)))}
    lora = sorted(n for n in arrays if "lora" in n.lower())
    if lora:
        raise ValueError(
            f"the module holds LoRA weights ({lora[0]} ...): merge them into the base weights first"
        )
    sources = _sources(arrays)
    hf = _hf_config(module, sources) | dict(hf_config or {})
    family = family_module(hf, "the nnx module")
    cfg = family.config(hf)
    get = lambda name: sources[name]()  # noqa: E731
    if dtype is None:
        dtype = (
            get("model.embed_tokens.weight").dtype if "model.embed_tokens.weight" in sources else np.float32
        )
    weights = fill(family.abstract(cfg), get, set(sources), dtype, where="the nnx module")
    meta = Meta(
        family=hf["model_type"],
        target_cfg=cfg,
        tokenizer_id=tokenizer_id,
        eos_ids=eos_union(hf),
        name=type(module).__name__,
    )
    return Params(weights, None, meta)


def _flatten(tree: Any, path: tuple = ()):
    if not isinstance(tree, Mapping):
        yield path, tree
        return
    for key, value in tree.items():
        yield from _flatten(value, (*path, key))


def _sources(arrays: Mapping[str, Any]) -> dict[str, Callable[[], np.ndarray]]:
    """Checkpoint name -> function that makes the tensor. Unknown paths keep their own name."""
    out: dict[str, Callable[[], np.ndarray]] = {}
    for path, value in arrays.items():
        stacked = _STACKED.fullmatch(path)
        if stacked:
            prefix, part = f"model.layers.{stacked[1]}.mlp.experts", stacked[2]
            for e in range(value.shape[0]):
                out[f"{prefix}.{e}.{part}.weight"] = functools.partial(_expert, value, e)
            continue
        name, transform = _renamed(path)
        out[name] = functools.partial(_whole, value, transform)
    return out


def _expert(value: Any, index: int) -> np.ndarray:
    return np.asarray(value)[index].T  # the copy on the host is kept by the array


def _whole(value: Any, transform: _Transform) -> np.ndarray:
    return transform(np.asarray(value))


def _renamed(path: str) -> tuple[str, _Transform]:
    for pattern, name, transform in _RULES:
        if re.fullmatch(pattern, path):
            return re.sub(pattern, name, path), transform
    return path, _same


def _hf_config(module: Any, names: Mapping[str, Any]) -> dict[str, Any]:
    """What ``module.config`` says, in ``config.json`` terms; the family follows from the weights."""
    family = "qwen3" if "model.layers.0.self_attn.q_norm.weight" in names else "llama"
    if "model.layers.0.mlp.gate.weight" in names:
        family = "qwen3_moe"
    config = getattr(module, "config", None)
    if config is None:
        raise ValueError("the nnx module has no .config: it must record num_layers, num_heads and so on")
    try:
        out = {
            "model_type": family,
            "vocab_size": config.vocab_size,
            "hidden_size": config.embed_dim,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "intermediate_size": config.hidden_dim,
            "max_position_embeddings": _POSITIONS[family],
            "rms_norm_eps": config.norm_eps,
            "rope_theta": float(config.rope_theta),
            "tie_word_embeddings": "lm_head.weight" not in names,
        }
        if family == "qwen3_moe":
            out |= {
                "num_experts": config.num_experts,
                "num_experts_per_tok": config.num_experts_per_tok,
                "moe_intermediate_size": config.hidden_dim,
                "norm_topk_prob": True,  # that layout always renormalises
            }
    except AttributeError as error:
        raise ValueError(f"the nnx module's config lacks a field: {error}") from None
    return out
