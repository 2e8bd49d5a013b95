"""A GGUF file seen as a Hugging Face checkpoint: config dict, tensor names, row order, stop ids."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from specjax.checkpoints import gguf_gemma
from specjax.checkpoints.gguf import File
from specjax.layers.rope import RopeConfig, inverse_frequencies

#: GGUF architecture -> ``model_type``.
ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    gguf_gemma.ARCHITECTURE: "gemma3_text",
}

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_ROPE_FACTORS = "rope_freqs.weight"
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


def architecture(file: File) -> str:
    """``general.architecture``; ValueError listing the known ones."""
    arch = file.metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"{file.path}: GGUF architecture {arch!r} is not supported; known: {known}")
    return arch


def hf_config(file: File) -> dict[str, Any]:
    """The ``config.json`` this file would have had. Warns about architecture settings it does not know."""
    arch = architecture(file)
    meta = _Fields(file, arch)
    heads, width = meta.need("attention.head_count"), meta.need("embedding_length")
    head_dim = meta.get("attention.key_length", width // heads)
    if meta.get("attention.value_length", head_dim) != head_dim:
        raise ValueError(f"{file.path}: key and value heads of different size are not supported")
    vocab = file.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in file.tensors else 0
    meta.get("vocab_size")
    config = {
        "model_type": ARCHITECTURES[arch],
        "vocab_size": vocab,
        "hidden_size": width,
        "num_hidden_layers": meta.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": meta.need("feed_forward_length"),
        "max_position_embeddings": meta.need("context_length"),
        "rms_norm_eps": meta.need("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **_rope(file, meta, head_dim),
        **_experts(file, meta, arch),
        **_attention_bias(file, arch),
    }
    config |= (
        gguf_gemma.settings(meta.get, head_dim) if arch == gguf_gemma.ARCHITECTURE else {"hidden_act": "silu"}
    )
    meta.finish()
    return config


class _Fields:
    """Fields under ``<architecture>.``; remembers what was asked for, to report the rest."""

    def __init__(self, file: File, arch: str):
        self.file, self.prefix = file, arch + "."
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(self.prefix + key)
        value = self.file.metadata.get(self.prefix + key, default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ValueError(
                    f"{self.file.path}: {self.prefix}{key} differs between layers, which is not supported"
                )
            value = value[0]
        return value

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ValueError(f"{self.file.path} lacks the metadata field {self.prefix}{key}")
        return value

    def finish(self) -> None:
        rest = sorted(k for k in self.file.metadata if k.startswith(self.prefix) and k not in self.asked)
        if rest:
            warnings.warn(
                f"{self.file.path} has settings this version does not understand and ignores: {rest}; the output "
                "may differ from what the file was made for",
                UserWarning,
                stacklevel=4,
            )


def _rope(file: File, meta: _Fields, head_dim: int) -> dict[str, Any]:
    out: dict[str, Any] = {"rope_theta": meta.get("rope.freq_base", 10000.0)}
    rotated = meta.get("rope.dimension_count", head_dim)
    if rotated != head_dim:
        out["partial_rotary_factor"] = rotated / head_dim
    kind = meta.get("rope.scaling.type", "none")
    factor = meta.get("rope.scaling.factor") or meta.get("rope.scale_linear") or 1.0
    original = meta.get("rope.scaling.original_context_length")
    meta.get("rope.scaling.finetuned")
    if meta.get("rope.scaling.attn_factor", 1.0) != 1.0:
        raise ValueError(f"{file.path}: a rope attention factor other than 1 is not supported")
    if kind not in ("none", "linear", "yarn"):
        raise ValueError(f"{file.path}: rope scaling {kind!r} is not supported (none, linear, yarn)")
    if kind == "yarn":
        out["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
        }
        if original is None:
            raise ValueError(f"{file.path}: yarn rope scaling needs rope.scaling.original_context_length")
    elif factor != 1.0:
        out["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    if _ROPE_FACTORS in file.tensors:
        if "rope_scaling" in out:
            raise ValueError(f"{file.path} has both {_ROPE_FACTORS} and {kind} rope scaling")
        out |= _from_factors(file, rotated, out["rope_theta"])
    return out


def _from_factors(file: File, dims: int, theta: float) -> dict[str, Any]:
    """Llama 3 settings that give the stored divisors of the frequencies; ValueError if none does.

    Every Llama 3.x release uses low 1, high 4, 8192 original positions and differs in the factor, which is
    the divisor of the slowest frequency.
    """
    stored = file.read(_ROPE_FACTORS).astype(np.float64)
    if stored.shape == (dims // 2,) and np.allclose(stored, 1.0):
        return {}
    settings = {"factor": float(stored.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    plain = RopeConfig(dims=dims, theta=theta)
    scaled = RopeConfig(dims=dims, theta=theta, kind="llama3", factor=settings["factor"], original_max=8192)
    divisors = inverse_frequencies(plain).astype(np.float64) / inverse_frequencies(scaled)
    if stored.shape != divisors.shape or not np.allclose(stored, divisors, rtol=1e-4):
        raise ValueError(
            f"{file.path}: {_ROPE_FACTORS} does not follow the Llama 3 rule, so it is not supported"
        )
    return {"rope_scaling": {"rope_type": "llama3", "original_max_position_embeddings": 8192, **settings}}


def _experts(file: File, meta: _Fields, arch: str) -> dict[str, Any]:
    count = meta.get("expert_count", 0)
    used = meta.get("expert_used_count", 0)
    if arch != "qwen3moe":
        if count:
            raise ValueError(f"{file.path}: experts in a {arch!r} GGUF are not supported")
        return {}
    if meta.get("expert_shared_count", 0) or meta.get("expert_weights_scale", 1.0) not in (0.0, 1.0):
        raise ValueError(
            f"{file.path}: shared experts or scaled expert weights are not supported for qwen3moe"
        )
    return {
        "num_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": meta.need("expert_feed_forward_length"),
        "norm_topk_prob": bool(meta.get("expert_weights_norm", True)),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _attention_bias(file: File, arch: str) -> dict[str, Any]:
    if arch == "qwen2":
        return {}
    return {"attention_bias": True} if "blk.0.attn_q.bias" in file.tensors else {}


def generation(file: File) -> dict[str, Any]:
    """Sampling defaults, where the file has them."""
    found = {v: file.metadata.get(f"general.sampling.{k}") for k, v in _SAMPLING.items()}
    return {k: v for k, v in found.items() if v is not None}


def eos_ids(file: File) -> tuple[int, ...]:
    """Ids that end a turn or a text."""
    found = [file.metadata.get(f"tokenizer.ggml.{k}_token_id") for k in ("eos", "eot", "eom")]
    return tuple(sorted({int(i) for i in found if i is not None}))


def reader(file: File, config: dict[str, Any]) -> tuple[Callable[[str], np.ndarray], set[str]]:
    """``(get, names)`` under Hugging Face names; stacked experts appear one by one."""
    sources = {}
    for name in file.tensors:
        sources.update(_named(name, config))
    permuted, gemma = (architecture(file) == arch for arch in ("llama", gguf_gemma.ARCHITECTURE))

    def get(name: str) -> np.ndarray:
        source, index = sources[name]
        x = file.read(source, index)
        if permuted and ".self_attn.q_proj." in name:
            return unpermute(x, config["num_attention_heads"])
        if permuted and ".self_attn.k_proj." in name:
            return unpermute(x, config["num_key_value_heads"])
        return gguf_gemma.plain_norm(name, x) if gemma else x

    return get, set(sources)


def shapes(file: File, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor under its Hugging Face name; nothing is read."""
    return {
        name: shape if expert is None else shape[1:]
        for source, shape in ((t.name, t.shape) for t in file.tensors.values())
        for name, (_, expert) in _named(source, config).items()
    }


def unpermute(x: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a q or k projection from llama.cpp's order (rope pairs side by side) to half-split order."""
    pairs = x.reshape(heads, -1, 2, *x.shape[1:])
    return np.swapaxes(pairs, 1, 2).reshape(x.shape)


def _named(name: str, config: dict[str, Any]) -> dict[str, tuple[str, int | None]]:
    """Hugging Face name(s) of one GGUF tensor -> (GGUF name, expert)."""
    if name == _ROPE_FACTORS:
        return {}
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP:
        return {f"{_TOP[stem]}.{suffix}": (name, None)}
    blk, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    prefix = f"model.layers.{layer}."
    block = _BLOCK | gguf_gemma.BLOCK if config["model_type"] == "gemma3_text" else _BLOCK
    if blk == "blk" and part in block:
        return {f"{prefix}{block[part]}.{suffix}": (name, None)}
    if blk == "blk" and part in _EXPERTS:
        n = config.get("num_experts", 0)
        return {f"{prefix}mlp.experts.{e}.{_EXPERTS[part]}.{suffix}": (name, e) for e in range(n)}
    return {name: (name, None)}  # unknown: reported by its own name as unexpected
