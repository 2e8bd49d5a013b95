"""Tiny random transformers models and their exact answers: logits and the residual after every layer."""

import dataclasses
from pathlib import Path

import numpy as np
import torch
import transformers

COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32}
QWEN3 = {"rms_norm_eps": 1e-6, "head_dim": 32}
MOE = {
    "head_dim": 32,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-6,
}


def _rope(theta: float) -> dict:
    return {"rope_type": "default", "rope_theta": theta}


#: name -> (class stem, settings beyond COMMON)
MODELS = {
    "llama": ("Llama", {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_parameters": _rope(1e5)}),
    "llama3_rope": ("Llama", {"rms_norm_eps": 1e-5, "tie_word_embeddings": False, "rope_parameters": LLAMA3}),
    "llama_bias": ("Llama", {"rms_norm_eps": 1e-5, "attention_bias": True, "rope_parameters": _rope(1e4)}),
    "qwen2": ("Qwen2", {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_parameters": _rope(1e6)}),
    "qwen3": (
        "Qwen3",
        QWEN3 | {"tie_word_embeddings": True, "rope_parameters": _rope(1e6)},
    ),
    "qwen3_yarn": ("Qwen3", QWEN3 | {"rope_parameters": YARN}),
    "qwen3_moe": (
        "Qwen3Moe",
        MOE
        | {
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "tie_word_embeddings": False,
            "rope_parameters": _rope(1e6),
        },
    ),
    "qwen3_moe_mixed": (
        "Qwen3Moe",
        MOE
        | {"num_hidden_layers": 4, "norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
    ),
}


@dataclasses.dataclass(frozen=True)
class Answer:
    """What transformers computes for ``ids [B T]``: residuals[j] is un-normed, after j layers."""

    ids: np.ndarray
    logits: np.ndarray
    residuals: list[np.ndarray]
    hidden: np.ndarray


def build(name: str, seed: int = 0):
    """Float32 model with no weight at its trivial initial value."""
    stem, extra = MODELS[name]
    return make(f"{stem}ForCausalLM", getattr(transformers, f"{stem}Config")(**COMMON | extra), seed)


def make(model_class: str, config, seed: int = 0):
    """Float32 model of a transformers class, every weight seeded and none trivial."""
    config._attn_implementation = "eager"
    config.get_text_config()._attn_implementation = "eager"
    model = getattr(transformers, model_class)(config).float().eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for key, p in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" not in key:
                _randomise(key, p)
        if config.tie_word_embeddings:
            model.tie_weights()
    return model


def _randomise(key: str, p) -> None:
    if "conv1d" in key:
        p.copy_(0.4 * torch.randn_like(p))
    elif p.ndim >= 2:
        p.copy_(torch.randn_like(p) * 0.6 / p.shape[-1] ** 0.5)
    elif "A_log" in key:
        p.uniform_(-1, 1)
    elif "norm" in key:
        p.add_(0.2 * torch.randn_like(p))
    else:
        p.copy_(0.3 * torch.randn_like(p))


def save(model, folder: Path, **kwargs) -> Path:
    """``save_pretrained`` to ``folder``."""
    model.save_pretrained(folder, **kwargs)
    return folder


def answer(model, ids: np.ndarray) -> Answer:
    """Run the whole of ``ids`` at once."""
    residual = []
    text = getattr(model.model, "language_model", model.model)
    hook = text.norm.register_forward_pre_hook(lambda _, args: residual.append(args[0]))
    with torch.no_grad():
        out = model(torch.tensor(ids), output_hidden_states=True, use_cache=False)
    hook.remove()
    states = [h.numpy() for h in out.hidden_states]  # the last of these is normed
    return Answer(ids, out.logits.numpy(), [*states[:-1], residual[0].numpy()], states[-1])
