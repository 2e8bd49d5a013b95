"""Checkpoints of a few kilobytes, written from seeded arrays, for tests of the loaders."""

import json
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
from safetensors.numpy import save_file

from specjax import registry
from specjax.testing.models import tiny_config
from specjax.types import ArraySpec

QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def config(**overrides: Any) -> dict[str, Any]:
    """``config.json`` of the model; widths are multiples of 32, the block size of quantised rows."""
    return tiny_config(vocab=64, width=32, num_attention_heads=4, num_key_value_heads=2) | overrides


def tensors(hf: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Float32 arrays under checkpoint names, two-dimensional as files have them."""
    family = registry.target(hf["model_type"])
    rng, out = np.random.default_rng(seed), {}
    specs = jax.tree.leaves(family.abstract(family.config(hf)), is_leaf=lambda x: isinstance(x, ArraySpec))
    for spec in specs:
        for name in spec.names:
            shape = spec.shape if len(spec.names) == 1 else spec.shape[1:]
            out[name] = rng.standard_normal(_flat(name, shape)).astype(np.float32)
    return out


def _flat(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape in a file, where heads and channels are one axis."""
    if len(shape) == 3:
        return (shape[0], shape[1] * shape[2]) if "o_proj" in name else (shape[0] * shape[1], shape[2])
    return (shape[0] * shape[1],) if name.endswith("bias") and len(shape) == 2 else shape


def folder(
    path: Path, hf: dict[str, Any], arrays: dict[str, np.ndarray], shards: int = 1, **more: Any
) -> Path:
    """Hugging Face folder; with ``shards`` > 1 an index too. ``more``: other JSON files by stem."""
    path.mkdir(parents=True, exist_ok=True)
    for stem, content in {"config": hf, **more}.items():
        (path / f"{stem}.json").write_text(json.dumps(content))
    if shards == 1:
        save_file(arrays, path / "model.safetensors")
        return path
    index = {}
    for i, names in enumerate(np.array_split(sorted(arrays), shards)):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file({str(n): arrays[str(n)] for n in names}, path / file)
        index |= {str(n): file for n in names}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return path


#: Gemma 3: norms around both blocks, all layers but the sixth with a window.
GEMMA3 = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 7,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_act": "gelu_pytorch_tanh",
    "sliding_window": 8,
    "query_pre_attn_scalar": 8,
    "rope_local_base_freq": 10000.0,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
_GGUF_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
Kind = gguf.GGMLQuantizationType


def gguf_file(
    path: Path,
    hf: dict[str, Any],
    arrays: dict[str, np.ndarray],
    kind: Kind = Kind.F32,
    arch: str | None = None,
    fields: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    tokenizer: dict[str, Any] | None = None,
) -> Path:
    """GGUF of the same model, rows of q and k reordered as llama.cpp does; matrices stored as ``kind``."""
    known = {"qwen3_moe": "qwen3moe", "gemma3_text": "gemma3"}
    arch = arch or known.get(hf["model_type"], hf["model_type"])
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (_gguf_fields(hf) | (fields or {})).items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        (writer.add_string if isinstance(value, str) else add)(f"{arch}.{key}", value)
    for key, value in (tokenizer or {}).items():
        _add_tokenizer(writer, key, value)
    for name, x in _gguf_tensors(hf, arrays).items():
        _add_tensor(writer, name, x, kind)
    for name, x in (extra or {}).items():
        _add_tensor(writer, name, x, Kind.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_fields(hf: dict[str, Any]) -> dict[str, Any]:
    out = {
        "block_count": hf["num_hidden_layers"],
        "context_length": hf["max_position_embeddings"],
        "embedding_length": hf["hidden_size"],
        "feed_forward_length": hf["intermediate_size"],
        "attention.head_count": hf["num_attention_heads"],
        "attention.head_count_kv": hf["num_key_value_heads"],
        "attention.key_length": hf["head_dim"],
        "attention.value_length": hf["head_dim"],
        "attention.layer_norm_rms_epsilon": float(hf["rms_norm_eps"]),
        "rope.freq_base": float(hf["rope_theta"]),
        "rope.dimension_count": hf["head_dim"],
    }
    if hf["model_type"] == "gemma3_text":
        out["attention.sliding_window"] = hf["sliding_window"]
    if "num_experts" in hf:
        out |= {
            "expert_count": hf["num_experts"],
            "expert_used_count": hf["num_experts_per_tok"],
            "expert_feed_forward_length": hf["moe_intermediate_size"],
        }
    return out


def _gguf_tensors(hf: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    out: dict[str, np.ndarray] = {}
    stacks: dict[str, list[np.ndarray]] = {}
    for name, x in arrays.items():
        stem, suffix = name.rsplit(".", 1)
        layer = ""
        if stem.startswith("model.layers."):
            _, _, number, stem = stem.split(".", 3)
            layer = f"blk.{number}."
        if ".experts." in stem:
            part = stem.rsplit(".", 1)[1].removesuffix("_proj")
            stacks.setdefault(f"{layer}ffn_{part}_exps.{suffix}", []).append(x)
            continue
        if hf["model_type"] == "llama" and stem in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = hf["num_attention_heads" if "q_proj" in stem else "num_key_value_heads"]
            x = x.reshape(heads, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
        names = _GGUF_NAMES
        if hf["model_type"] == "gemma3_text":
            names = _GGUF_NAMES | _GGUF_GEMMA
            x = x + np.float32(1) if stem.endswith("norm") else x
        out[f"{layer}{names[stem]}.{suffix}"] = x
    return out | {name: np.stack(parts) for name, parts in stacks.items()}


def _add_tensor(writer: gguf.GGUFWriter, name: str, x: np.ndarray, kind: Kind) -> None:
    if x.ndim == 1 or kind == Kind.F32:
        writer.add_tensor(name, x)
    elif kind == Kind.F16:
        writer.add_tensor(name, x.astype(np.float16))
    else:
        writer.add_tensor(name, gguf.quants.quantize(x, kind), raw_dtype=kind)


def _add_tokenizer(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(f"tokenizer.{key}", value)
    elif isinstance(value, bool):
        writer.add_bool(f"tokenizer.{key}", value)
    elif isinstance(value, int):
        writer.add_uint32(f"tokenizer.{key}", value)
    else:
        writer.add_string(f"tokenizer.{key}", value)


#: A byte-level vocabulary with two merges, GGUF style: special tokens first, then the 256 byte letters.
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def vocabulary() -> dict[str, Any]:
    """``tokenizer.`` fields of a GGUF file."""
    from tokenizers.pre_tokenizers import ByteLevel

    merges = ["h e", "l l", "he ll", "hell o", "1 2"]
    tokens = SPECIAL + sorted(ByteLevel.alphabet()) + ["he", "ll", "hell", "hello", "12"]
    return {
        "ggml.model": "gpt2",
        "ggml.pre": "qwen2",
        "ggml.tokens": tokens,
        "ggml.token_type": [3, 3, 3, 4] + [1] * (len(tokens) - 4),
        "ggml.merges": merges,
        "ggml.bos_token_id": 0,
        "ggml.eos_token_id": 2,
        "ggml.padding_token_id": 0,
        "ggml.add_bos_token": False,
        "chat_template": CHATML,
    }


def pieces(**changes: Any) -> dict[str, Any]:
    """``tokenizer.`` fields of SentencePiece type: pieces with scores, single bytes, a run of spaces as users
    define it, no merges."""
    special, user = ["<pad>", "<eos>", "<bos>", "<unk>"], ["<start_of_turn>", "  ", "\n\n"]
    single = [f"<0x{i:02X}>" for i in range(256)]
    words = [
        "\u2581the",
        "he",
        "th",
        "\u2581th",
        "the",
        "\u2581t",
        "re",
        "ther",
        "there",
        "\u2581",
        *"therabco\n",
    ]
    words = list(dict.fromkeys(words))
    return {
        "ggml.model": "llama",
        "ggml.pre": "default",
        "ggml.tokens": special + user + single + words,
        "ggml.scores": [-1000.0] * (len(special) + len(user) + 256) + [-float(i) for i in range(len(words))],
        "ggml.token_type": [3] * len(special) + [4] * len(user) + [6] * 256 + [1] * len(words),
        "ggml.bos_token_id": 2,
        "ggml.eos_token_id": 1,
        "ggml.unknown_token_id": 3,
        "ggml.padding_token_id": 0,
        "ggml.add_bos_token": True,
        "ggml.add_space_prefix": False,
    } | changes


def small_tokenizer():
    """A transformers tokenizer of the same vocabulary, built without any of our code."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = vocabulary()
    merges = [tuple(m.split()) for m in fields["ggml.merges"]]
    vocab = {t: i for i, t in enumerate(fields["ggml.tokens"])}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in SPECIAL[:3]])
    out = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", bos_token="<|endoftext|>")
    out.chat_template = CHATML
    return out
