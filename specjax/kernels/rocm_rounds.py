"""Decode programs of real shapes, with few layers and no weights, for compilers of GPUs that are not there."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from specjax import calls, registry
from specjax.checkpoints import tree
from specjax.config import Meta
from specjax.core import programs
from specjax.core.loop import host_state
from specjax.train.methods import assistant, dflash, dspark, eagle3, mtp
from specjax.types import Params, State

LAYERS = 4  # of targets that have more: each is compiled anew
#: Widths, heads and vocabularies as published.
TARGETS: dict[str, dict[str, Any]] = {
    "Qwen3-8B": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False, "hidden_act": "silu",
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "max_position_embeddings": 40960,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False, "hidden_act": "silu",
    },
    "Qwen3.5-9B": {
        "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 4096, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 12288, "max_position_embeddings": 262144,
        "hidden_act": "silu", "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    },
    "Gemma-4-31B": {
        "model_type": "gemma4_text", "vocab_size": 262144, "hidden_size": 5376, "num_attention_heads": 32,
        "num_key_value_heads": 16, "head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": 4,
        "attention_k_eq_v": True, "intermediate_size": 21504, "max_position_embeddings": 262144,
        "sliding_window": 1024, "final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 0,
        "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    },
    "Qwen3-0.6B": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True, "hidden_act": "silu",
    },
}  # fmt: skip


def _draft_model(settings: Mapping[str, Any], target_cfg: Any) -> Any:
    small = registry.target("qwen3").config(TARGETS["Qwen3-0.6B"] | {"num_hidden_layers": LAYERS})
    return registry.drafter("draft_model").config({"family": "qwen3", "model": small, **settings}, target_cfg)


def _chain(settings: Mapping[str, Any], target_cfg: Any) -> Any:
    children = _default({}, target_cfg), _draft_model(settings, target_cfg)
    return registry.drafter("chain").Config(("ngram", "draft_model"), children)


def _default(settings: Mapping[str, Any], target_cfg: Any) -> Any:
    del settings, target_cfg
    return registry.drafter("ngram").default("rocm")


@dataclasses.dataclass(frozen=True)
class Round:
    """A target and a drafter (None: plain), whose config ``make`` takes from ``settings`` and the target's."""

    target: str
    drafter: str | None = None
    make: Callable[[Mapping[str, Any], Any], Any] | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_BLOCK = {"mask_id": 151669, "layers": 5, "layout": "fill"}
ROUNDS: dict[str, Round] = {
    "plain": Round("Qwen3-8B"),
    "ngram": Round("Qwen3-8B", "ngram", _default),
    "eagle3": Round("Qwen3-8B", "eagle3", eagle3.config, {"draft_vocab": 32000}),
    "dflash": Round("Qwen3-8B", "dflash", dflash.config, _BLOCK | {"drafts": 15}),
    "dspark": Round("Qwen3-8B", "dspark", dspark.config, _BLOCK | {"drafts": 7}),
    "draft_model": Round("Qwen3-8B", "draft_model", _draft_model, {"k": 4}),
    "chain": Round("Qwen3-8B", "chain", _chain, {"k": 4}),
    "mtp": Round("Qwen3.5-9B", "mtp", mtp.config),
    "assistant": Round("Gemma-4-31B", "assistant", assistant.config, {"width": 1024}),
    "plain, experts": Round("Qwen3-30B-A3B"),
    "eagle3, experts": Round("Qwen3-30B-A3B", "eagle3", eagle3.config, {"draft_vocab": 32000}),
}


def params(case: Round, dtype: str = "bfloat16") -> Params:
    """Params that hold shapes instead of weights."""
    hf = TARGETS[case.target]
    hf = hf | {"num_hidden_layers": len(hf.get("layer_types", ())) or LAYERS}
    target = registry.target(hf["model_type"])
    cfg = target.config(hf)
    meta = Meta(family=hf["model_type"], target_cfg=cfg, name=case.target)
    weights = None
    if case.drafter is not None and case.make is not None:
        own = case.make(case.settings, cfg)
        specs = registry.drafter(case.drafter).abstract(own)
        weights = None if specs is None else tree.shapes(specs, dtype)
        meta = dataclasses.replace(meta, drafter=case.drafter, drafter_cfg=own)
    return Params(tree.shapes(target.abstract(cfg), dtype), weights, meta)


@dataclasses.dataclass(frozen=True)
class Parts:
    """What one program takes: a function and its arguments as shapes; argument 1 is given up."""

    function: Callable
    shapes: tuple[Any, Any, Any]
    k: int


def parts(case: Round, rows: int, prompt: int, part: str, dtype: str = "bfloat16") -> Parts:
    """The loop of rounds (``part`` "decode") or the pass over prompts ("prefill") of ``rows`` prompts of ``prompt``
    tokens, as :func:`specjax.decode` compiles them."""
    given = params(case, dtype)
    call = calls.plan(given, [[0] * prompt] * rows, max_new_tokens=256, rows=rows)
    program = call.program
    host = host_state(program, list(call.jobs))
    state: State = jax.eval_shape(lambda: programs.fill_caches(program, host))
    run, last = (
        programs.chunk_program(program) if part == "decode" else programs.prefill_program(program, prompt)
    )
    return Parts(run, ((given.target, given.drafter), state, last), program.k)
