"""Memory told beforehand against the compiler's own figures, for every kind of target and every method.

Sizes are such that what a program always needs (a few megabytes) is no matter. Nothing is allocated: configs alone
are loaded, and programs are compiled for shapes.
"""

import json
from pathlib import Path
from typing import Any

import pytest

import specjax

pytestmark = pytest.mark.filterwarnings("ignore:drafter .*:UserWarning")

_ANY = {"hidden_size": 512, "vocab_size": 16000, "max_position_embeddings": 8192, "intermediate_size": 1536}
_ANY |= {"tie_word_embeddings": False}
_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "hidden_act": "silu"}
_WIDE = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128}
_ROUTED = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256}
_WINDOW = {"hidden_activation": "gelu_pytorch_tanh", "sliding_window": 256}
_GEMMA4 = _WINDOW | {
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_global_key_value_heads": 1, "head_dim": 64,
    "global_head_dim": 128, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "num_hidden_layers": 4,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
}  # fmt: skip
LLAMA = _ANY | _HEADS | {"model_type": "llama", "num_hidden_layers": 4}
HYBRID = _ANY | _WIDE | {
    "model_type": "qwen3_5_text", "num_hidden_layers": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "mtp_num_hidden_layers": 1,
}  # fmt: skip
TARGETS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "experts": LLAMA | _ROUTED | {"model_type": "qwen3_moe", "num_hidden_layers": 3, "norm_topk_prob": True},
    "hybrid": HYBRID,
    "hybrid experts": HYBRID | _ROUTED | {
        "model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 256,
    },
    "latent": _ANY | _ROUTED | {
        "model_type": "deepseek_v3", "num_hidden_layers": 3, "num_attention_heads": 8, "n_routed_experts": 32,
        "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5, "q_lora_rank": 256, "kv_lora_rank": 128, "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32, "v_head_dim": 64, "num_nextn_predict_layers": 1, "hidden_act": "silu",
    },
    "rings": _ANY | _WIDE | _WINDOW | {"model_type": "gemma3_text", "num_hidden_layers": 6},
    "gemma4": _ANY | _GEMMA4 | {"model_type": "gemma4_text", "final_logit_softcapping": 30.0},
}  # fmt: skip
del TARGETS["latent"]["num_experts"]
_BLOCK = _ANY | _HEADS | {
    "model_type": "qwen3", "num_hidden_layers": 3, "num_target_layers": 4, "block_size": 8, "mask_token_id": 5,
    "target_layer_ids": [0, 1, 2],
}  # fmt: skip
EAGLE3 = _ANY | _HEADS | {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
    "draft_vocab_size": 8000, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]},
}  # fmt: skip
_LENT = {key: value for key, value in (_ANY | _GEMMA4).items() if key != "tie_word_embeddings"}
#: Method -> the target it is tried on, and its config (or name).
METHODS: dict[str, tuple[str, Any]] = {
    "eagle3": ("llama", EAGLE3),
    "dflash": ("llama", _BLOCK | {"architectures": ["DFlashDraftModel"]}),
    "dspark": ("llama", _BLOCK | {
        "architectures": ["Qwen3DSparkModel"], "num_anchors": 512, "markov_rank": 64, "markov_head_type": "vanilla",
        "enable_confidence_head": True, "confidence_head_with_markov": True,
    }),
    "mtp": ("hybrid", "mtp"),
    "mtp experts": ("hybrid experts", "mtp"),
    "mtp latent": ("latent", "mtp"),
    "assistant": ("gemma4", {
        "model_type": "gemma4_assistant", "architectures": ["Gemma4AssistantForCausalLM"], "backbone_hidden_size": 512,
        "text_config": _LENT | {
            "model_type": "gemma4_text", "hidden_size": 256, "intermediate_size": 1024, "num_kv_shared_layers": 4,
        },
    }),
    "draft_model": ("llama", LLAMA | {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 768}),
    "chain": ("llama", ("ngram", EAGLE3)),
    "ngram": ("rings", "ngram"),
}  # fmt: skip
#: A long prompt, whose prefill is what counts, and many rows that sample.
CALLS = {
    "prompt": (500, {"rows": 4, "max_new_tokens": 100}),
    "sampled": (60, {"rows": 8, "max_new_tokens": 400, "temperature": 1.0}),
}
DAILY = {("eagle3", "prompt"), ("mtp", "prompt"), ("assistant", "prompt")}
#: The others take turns with the calls.
ONE_CALL = {"dflash": "sampled", "dspark": "prompt", "mtp experts": "sampled", "mtp latent": "prompt"}
ONE_CALL |= {"draft_model": "sampled", "chain": "sampled", "ngram": "prompt"}


def _cases():
    for name in ("llama", "experts"):  # alone; the others with their drafters
        yield pytest.param(name, None, "prompt", id=f"{name}, prompt", marks=pytest.mark.long)
    for method, (target, drafter) in METHODS.items():
        for call in [ONE_CALL[method]] if method in ONE_CALL else CALLS:
            marks = () if (method, call) in DAILY else pytest.mark.long
            yield pytest.param(target, drafter, call, id=f"{method}, {call}", marks=marks)


def folder(path: Path, hf: dict[str, Any]) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(hf))
    return path


@pytest.mark.parametrize(("target", "drafter", "call"), list(_cases()))
def test_within_five_percent(tmp_path, target, drafter, call):
    """PRF.5: weights, caches and temporaries together, before anything exists."""
    place = lambda i, x: folder(tmp_path / f"drafter{i}", x) if isinstance(x, dict) else x  # noqa: E731
    if isinstance(drafter, tuple):
        drafter = tuple(place(i, x) for i, x in enumerate(drafter))
    params = specjax.load(
        folder(tmp_path / "target", TARGETS[target]),
        drafter=place(0, drafter),
        shapes_only=True,
        dtype="float32",
        verbose=False,
    )
    length, options = CALLS[call]
    prompts = [[i % 60 for i in range(length)]] * options["rows"]
    told = specjax.explain(params, prompts, **options)
    exact = specjax.explain(params, prompts, compile=True, **options)
    assert told.total_bytes == pytest.approx(exact.total_bytes, rel=0.05)
    assert told.transient_bytes > 0.6 * exact.transient_bytes
