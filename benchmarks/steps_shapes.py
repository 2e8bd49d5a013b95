"""Shapes that step times are measured on: configs of targets as published, and drafters of the sizes theirs have."""

import dataclasses
from typing import Any

import numpy as np

from specjax import registry
from specjax.drafters import assistant_config
from specjax.drafters.body import Body
from specjax.drafters.markov import Settings
from specjax.layers.rope import RopeConfig
from specjax.targets import qwen3, qwen3_5_config

DRAFT_VOCAB = 32000  # of EAGLE-3's head, and of MTP's where it is reduced
FILLER = "benchmarks.steps_filler"

_QWEN3 = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
    "hidden_act": "silu",
}  # fmt: skip
_LLAMA = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": False,
    "hidden_act": "silu",
}  # fmt: skip
_GEMMA = {
    "model_type": "gemma4_text", "vocab_size": 262144, "vocab_size_per_layer_input": 262144, "head_dim": 256,
    "global_head_dim": 512, "attention_k_eq_v": True, "sliding_window": 1024, "sliding_window_pattern": 6,
    "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6, "final_logit_softcapping": 30.0, "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
_GEMMA_26B = _GEMMA | {
    "hidden_size": 2816, "num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 8,
    "num_global_key_value_heads": 2, "intermediate_size": 2112, "enable_moe_block": True, "num_experts": 128,
    "top_k_experts": 8, "moe_intermediate_size": 704,
}  # fmt: skip
_GEMMA_31B = _GEMMA | {
    "hidden_size": 5376, "num_hidden_layers": 60, "num_attention_heads": 32, "num_key_value_heads": 16,
    "num_global_key_value_heads": 4, "intermediate_size": 21504, "enable_moe_block": False,
}  # fmt: skip
_QWEN36 = {
    "model_type": "qwen3_5_moe_text", "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "rope_theta": 1e7,
    "partial_rotary_factor": 0.25, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip

_SMOLLM2 = _LLAMA | {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 8192,
    "rope_theta": 1e5, "tie_word_embeddings": True,
}  # fmt: skip

#: Name -> config of the target.
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": _SMOLLM2,
    "qwen3-8b": _QWEN3,
    "llama-3.1-8b": _LLAMA,
    "gemma-4-26b-a4b": _GEMMA_26B,
    "gemma-4-31b": _GEMMA_31B,
    "qwen3.6-35b-a3b": _QWEN36,
}
#: What ``--tiny`` makes of any of them: whether everything runs, not how fast.
_TINY = {
    "vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 16,
    "num_global_key_value_heads": 2, "vocab_size_per_layer_input": 512, "num_experts": 8,
    "num_experts_per_tok": 2, "top_k_experts": 2, "moe_intermediate_size": 16, "sliding_window": 16,
    "sliding_window_pattern": 2, "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "max_position_embeddings": 4096,
}  # fmt: skip


def tiny(hf: dict[str, Any]) -> dict[str, Any]:
    """The same family with small sizes."""
    return {key: _TINY.get(key, value) for key, value in hf.items()}


@dataclasses.dataclass(frozen=True)
class Method:
    """What is measured: "plain"; "c" = ``k`` given drafts verified, nothing drafted; or a drafter with ``k`` drafts."""

    name: str
    k: int

    def __str__(self) -> str:
        return {"plain": "plain", "c": f"c({self.k + 1})"}.get(self.name, f"{self.name} {self.k}")


def method(text: str) -> Method:
    """``"plain"``, ``"c8"`` (eight positions verified), ``"dflash-7"`` (seven drafts), ``"mtp32k-3"``."""
    if text == "plain":
        return Method("plain", 0)
    if text.startswith("c") and text[1:].isdigit():
        return Method("c", int(text[1:]) - 1)
    name, _, k = text.rpartition("-")
    if name not in DRAFTERS or not k.isdigit():
        raise SystemExit(f"method {text!r}: plain, c<width>, or one of {', '.join(DRAFTERS)} with -<drafts>")
    return Method(name, int(k))


#: Methods by name -> registered drafter.
DRAFTERS = {
    "ngram": "ngram", "dflash": "dflash", "dspark": "dspark", "eagle3": "eagle3", "mtp": "mtp", "mtp32k": "mtp",
    "assistant": "assistant",
}  # fmt: skip


def drafter(how: Method, cfg: Any) -> tuple[str | None, Any]:
    """Registered name and config of a method's drafter for a target; (None, None) for plain decoding.

    Raises ValueError where the target has no such drafter.
    """
    if how.name == "plain":
        return None, None
    if how.name == "c":
        return FILLER, registry.drafter(FILLER).Config(how.k, cfg.vocab_size)
    name = DRAFTERS[how.name]
    return name, _SIZED[name](how, cfg)


def _ngram(how: Method, cfg: Any) -> Any:
    return dataclasses.replace(registry.drafter("ngram").default("cuda"), k=how.k, costs=None)


def _dflash(how: Method, cfg: Any) -> Any:
    made = registry.drafter("dflash").tiny(cfg)
    taps = tuple(int(x) + 1 for x in np.linspace(1, cfg.num_layers - 3, 5))
    return dataclasses.replace(
        made, k=how.k, body=_body(cfg, 5), taps=taps, rows=how.k + 1, causal=(False,) * 5, drafting="greedy"
    )


def _dspark(how: Method, cfg: Any) -> Any:
    made, plain = registry.drafter("dspark").tiny(cfg), _dflash(how, cfg)
    changes = {name: getattr(plain, name) for name in ("k", "body", "taps", "causal", "drafting")}
    return dataclasses.replace(made, **changes, rows=how.k, markov=Settings(256, "vanilla", cfg.vocab_size))


def _eagle3(how: Method, cfg: Any) -> Any:
    made, n = registry.drafter("eagle3").tiny(cfg), cfg.num_layers
    rows = min(DRAFT_VOCAB, cfg.vocab_size // 2)
    return dataclasses.replace(
        made,
        k=how.k,
        body=_body(cfg, 1),
        taps=(min(2, n - 3), n // 2, n - 1),
        head_rows=rows,
        drafting="greedy",
    )


def _mtp(how: Method, cfg: Any) -> Any:
    if isinstance(cfg, qwen3_5_config.Config):
        family, model = "qwen3_5_text", cfg
    else:  # a dense layer of Qwen3 as wide as the target
        shape = _body(cfg, 1)
        family = "qwen3"
        model = qwen3.config(_QWEN3 | {
            "hidden_size": cfg.hidden_size, "vocab_size": cfg.vocab_size, "intermediate_size": shape.mlp_size,
            "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim, "max_position_embeddings": cfg.max_positions,
        })  # fmt: skip
    more = {"draft_vocab": min(DRAFT_VOCAB, cfg.vocab_size // 2)} if how.name == "mtp32k" else {}
    settings = {"family": family, "model": model, "k": how.k, "drafting": "greedy"} | more
    return registry.drafter("mtp").config(settings, cfg)


def _assistant(how: Method, cfg: Any) -> Any:
    if "gemma" not in type(cfg).__module__:
        raise ValueError("assistants belong to Gemma 4")
    small = cfg.hidden_size < 1024
    size = (
        {"width": 16, "heads": 4, "mlp_size": 32} if small else {"width": 1024, "heads": 16, "mlp_size": 8192}
    )
    types = ("sliding", "sliding", "sliding", "full")
    return assistant_config.shaped(cfg, types, k=how.k, drafting="greedy", **size)


_SIZED = {
    "ngram": _ngram, "dflash": _dflash, "dspark": _dspark, "eagle3": _eagle3, "mtp": _mtp, "assistant": _assistant,
}  # fmt: skip


def _body(cfg: Any, layers: int) -> Body:
    """Layers of a drafter as wide as the target: the target's own heads up to size 128, else 32 of 128.

    What the drafters published for Gemma 4 and Qwen3.6 have is taken for Qwen3-like layers of three times the width.
    """
    head = getattr(cfg, "head_dim", 256)
    small, like = cfg.hidden_size < 256, head <= 128
    if small:
        heads, kv_heads, head, mlp = 4, 2, 16, 48
    else:
        heads = cfg.heads if like else 32
        kv_heads = cfg.kv_heads if like else 8
        head, mlp = (head, cfg.mlp_size) if like else (128, 3 * cfg.hidden_size)
    return Body(
        hidden_size=cfg.hidden_size, heads=heads, kv_heads=kv_heads, head_dim=head, mlp_size=mlp, eps=1e-6,
        rope=RopeConfig(head, 1e6), qk_norm=True, windows=(None,) * layers,
    )  # fmt: skip
