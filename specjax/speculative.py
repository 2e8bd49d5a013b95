"""The speculative config: vLLM's JSON, read and checked before anything is loaded.

Every key of vLLM is either taken with vLLM's meaning or refused by name with the reason; a key that nobody
knows is an error. docs/speculative-config.md lists them all.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from specjax.config import as_config_dict, positive


@dataclasses.dataclass(frozen=True)
class Speculative:
    """What a speculative config asks for. None: not said.

    ``method`` is the name used here (aliases resolved). ``rule`` is the acceptance rule, ``lookup`` holds the
    keys of the n-gram drafter.
    """

    method: str | None = None
    model: str | None = None
    revision: str | None = None
    k: int | None = None
    drafting: str | None = None
    rule: str = "auto"
    lookup: Mapping[str, Any] = dataclasses.field(default_factory=dict)


LOOKUP = ("prompt_lookup_max", "prompt_lookup_min", "match")
TAKEN = (
    "method", "model", "revision", "num_speculative_tokens", "draft_sample_method", "rejection_sample_method", *LOOKUP,
)  # fmt: skip

#: Other names of methods. vLLM's GPU variant of n-gram proposes the same tokens.
ALIASES = {"ngram_gpu": "ngram", "[ngram]": "ngram"} | dict.fromkeys(
    (
        "deepseek_mtp", "mimo_mtp", "glm4_moe_mtp", "ernie_mtp", "qwen3_next_mtp", "qwen3_5_mtp", "longcat_flash_mtp",
        "gemma4_mtp",
    ),
    "mtp",
)  # fmt: skip

_EAGLE = "EAGLE-1 and EAGLE-2 drafters are not supported; EAGLE-3 is method 'eagle3'"
REFUSED_METHODS = {
    "suffix": "suffix decoding is not implemented; 'ngram' also drafts from text that was seen before",
    "eagle": _EAGLE,
    "peagle": "parallel EAGLE drafters are not supported; 'dflash' and 'dspark' draft a block in one pass",
    "extract_hidden_states": "it writes hidden states and drafts nothing",
}

RULES = {"standard": "auto", "block": "block"}
REFUSED_RULES = {
    "synthetic": "it emits drafts at a made-up rate, so the text is not the target's",
    "fly": "it is lossy: it keeps drafts that the target's distribution rejects",
}

_SERVER = "the drafter runs in the same program as the target, with its placement"
_COMPILED = "everything is compiled; there is nothing to choose per drafter"
#: Keys of vLLM that are refused: the values that say nothing new, and the reason for all others.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "max_model_len": ((), "the positions a drafter knows come from its file; max_len of a call bounds the text"),
    "quantization": ((), "drafter weights have the dtype of the target: load(dtype=...)"),
    "draft_load_config": ((), "drafters are read as targets are: safetensors or GGUF"),
    "code_revision": ((), "code shipped with a checkpoint is never run"),
    "draft_tensor_parallel_size": ((1,), _SERVER),
    "tensor_parallel_size": ((), _SERVER),
    "enforce_eager": ((False,), _COMPILED),
    "moe_backend": (("auto",), _COMPILED),
    "attention_backend": (("auto",), _COMPILED),
    "kv_cache_dtype": (("auto",), "caches have the dtype of the activations: load(dtype=...)"),
    "synthetic_acceptance_rates": ((), REFUSED_RULES["synthetic"]),
    "synthetic_acceptance_length": ((), REFUSED_RULES["synthetic"]),
    "fly_window_size": ((), REFUSED_RULES["fly"]),
    "fly_entropy_threshold": ((0.3,), REFUSED_RULES["fly"]),
    "fly_entropy_top_k": ((3,), REFUSED_RULES["fly"]),
    "num_speculative_tokens_per_batch_size": ((), "a call has one width: pass k= to it"),
    "parallel_drafting": ((False,), "a drafter's file says how it drafts"),
    "disable_padded_drafter_batch": ((False,), "shapes are fixed; rows need no padding of the user's"),
    "use_local_argmax_reduction": ((False,), _SERVER),
    "draft_lm_head_quantization": ((), "a shared head is used as the target stores it"),
    "use_heterogeneous_vocab": ((False,), "target and drafter must share token ids: docs/draft-model.md"),
    "disable_eagle_block_drop": ((False,), "there is no paged prefix cache"),
    "disable_lookahead_block_hashes": ((False,), "there is no paged prefix cache"),
    "index_share_for_mtp_iteration": ((False,), "sparse attention is not implemented"),
    "suffix_decoding_max_tree_depth": ((24,), REFUSED_METHODS["suffix"]),
    "suffix_decoding_max_cached_requests": ((10000,), REFUSED_METHODS["suffix"]),
    "suffix_decoding_max_spec_factor": ((1.0,), REFUSED_METHODS["suffix"]),
    "suffix_decoding_min_token_prob": ((0.1,), REFUSED_METHODS["suffix"]),
    "enable_adaptive_verification": ((False,), "a confidence threshold is a setting of the drafter: drafter_config"),
    "dspark_draft_topk": ((), "drafts are drawn from the whole distribution that the target's test divides by"),
    "xpress_topc": ((0,), "XPress drafters are not supported"),
    "target_model_config": ((), "vLLM fills it in itself"),
    "target_parallel_config": ((), "vLLM fills it in itself"),
    "draft_model_config": ((), "vLLM fills it in itself"),
    "draft_parallel_config": ((), "vLLM fills it in itself"),
    "acceptance_method": ((), "vLLM has removed it; rejection_sample_method chooses the rule"),
    "posterior_threshold": ((), "typical acceptance is lossy, and vLLM has removed it"),
    "typical_acceptance_sampler_posterior_threshold": ((), "typical acceptance is lossy, and vLLM has removed it"),
    "typical_acceptance_sampler_posterior_alpha": ((), "typical acceptance is lossy, and vLLM has removed it"),
    "disable_by_batch_size": ((), "vLLM has removed it; load without a drafter for large batches"),
    "speculative_token_tree": ((), "drafts are chains; vLLM has removed trees"),
}  # fmt: skip


def read(value: Any) -> Speculative:
    """A speculative config given as a dict, JSON text or the path of a JSON file.

    Raises ValueError for a key that is unknown or refused, naming it, and for a value out of range.
    """
    given = {key: item for key, item in as_config_dict(value).items() if item is not None}
    _check_keys(given)
    method, model = _method(given.get("method"), given.get("model"))
    k = given.get("num_speculative_tokens")
    return Speculative(
        method=method,
        model=model,
        revision=_text("revision", given.get("revision")),
        k=None if k is None else positive("num_speculative_tokens", k),
        drafting=_one_of(
            "draft_sample_method", given.get("draft_sample_method"), ("greedy", "probabilistic")
        ),
        rule=_rule(given.get("rejection_sample_method", "standard")),
        lookup={key: given[key] for key in LOOKUP if key in given},
    )


def _check_keys(given: Mapping[str, Any]) -> None:
    unknown = sorted(set(given) - set(TAKEN) - set(REFUSED))
    if unknown:
        raise ValueError(
            f"speculative_config does not know the option(s) {unknown}; known: {', '.join(sorted(TAKEN))} (others of "
            "vLLM are refused with the reason)"
        )
    for key in given.keys() & REFUSED.keys():
        harmless, reason = REFUSED[key]
        if given[key] not in harmless:
            raise ValueError(f"speculative_config: {key}={given[key]!r} is not supported: {reason}")


def _method(method: Any, model: Any) -> tuple[str | None, str | None]:
    """(our name of the method, model) with aliases resolved."""
    if method is not None and not isinstance(method, str):
        raise ValueError(f"speculative_config: method must be a name, got {type(method).__name__}")
    model = None if model is None else str(model)
    if method == "custom_class":
        if model is None:
            raise ValueError("speculative_config: method 'custom_class' needs the module's name as 'model'")
        return model, None
    if model in ("ngram", "[ngram]") and method in (None, "ngram", "ngram_gpu"):
        return "ngram", None
    if method in REFUSED_METHODS:
        raise ValueError(f"speculative_config: method {method!r} is not supported: {REFUSED_METHODS[method]}")
    return (None if method is None else ALIASES.get(method, method)), model


def _rule(name: Any) -> str:
    if name in REFUSED_RULES:
        raise ValueError(
            f"speculative_config: rejection_sample_method={name!r} is not supported: {REFUSED_RULES[name]}"
        )
    return RULES[str(_one_of("rejection_sample_method", name, tuple(RULES)))]


def _one_of(key: str, value: Any, allowed: tuple[str, ...]) -> str | None:
    if value is not None and value not in allowed:
        raise ValueError(f"speculative_config: {key} must be one of {', '.join(allowed)}, got {value!r}")
    return value


def _text(key: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"speculative_config: {key} must be a text, got {value!r}")
    return value
