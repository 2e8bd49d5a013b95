"""Reading a Hugging Face ``config.json`` without ignoring anything that would change the output."""

import warnings
from collections.abc import Collection, Mapping
from typing import Any

#: Keys that never change what the network computes.
NEUTRAL = {
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "use_cache", "bos_token_id",
    "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "initializer_range",
    "_name_or_path", "name_or_path",
    "attention_dropout", "tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "auto_map",
    "is_llama_config", "rope_interleaved", "transformers.js_config", "return_dict", "output_hidden_states",
    "output_attentions", "torchscript", "chunk_size_feed_forward", "is_encoder_decoder", "id2label", "label2id",
    "problem_type", "finetuning_task", "_attn_implementation_autoset", "pruned_heads", "task_specific_params",
    "is_decoder", "add_cross_attention", "cross_attention_hidden_size", "tie_encoder_decoder", "prefix",
    "output_router_logits", "router_aux_loss_coef", "bad_words_ids", "num_return_sequences",
    "partial_rotary_factor", "generation_config", "_experts_implementation", "unsloth_version", "unsloth_fixed",
}  # fmt: skip


def check_config(hf: Mapping[str, Any], known: Collection[str], fixed: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise ValueError on a setting this family does not implement; warn about one it has never heard of.

    ``fixed`` maps keys to the values that are supported. ``quantization_config`` is refused. A key that is
    neither in ``known``, ``fixed`` nor :data:`NEUTRAL` gives a UserWarning naming it.
    """
    name = hf.get("model_type", "this model")
    refuse_quantised(hf, name)
    for key, values in fixed.items():
        if key in hf and hf[key] not in values:
            raise ValueError(f"{name}: config has {key}={hf[key]!r}; supported: {list(values)}")
    if hf.get("rope_interleaved"):
        raise ValueError(f"{name}: config has rope_interleaved=True; only half-split rope is supported")
    unknown = sorted(set(hf) - set(known) - set(fixed) - NEUTRAL)
    if unknown:
        warnings.warn(
            f"{name}: the config has setting(s) this version does not understand and ignores: {unknown}; the output "
            "may differ from what the checkpoint was made for",
            UserWarning,
            stacklevel=3,
        )


def text_part(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's settings of a multimodal config: ``text_config``, with what the whole says about
    tied weights and quantisation. A config of text alone is returned as it is."""
    if "text_config" not in hf:
        return dict(hf)
    above = ("tie_word_embeddings", "quantization_config", "compression_config")
    return {**hf["text_config"], **{key: hf[key] for key in above if hf.get(key) is not None}}


def refuse_quantised(hf: Mapping[str, Any], name: str) -> None:
    """ValueError naming the method of a config that says its weights are quantised (FP8, AWQ, GPTQ, ...)."""
    for key in ("quantization_config", "compression_config"):
        if hf.get(key):
            method = hf[key].get("quant_method") or hf[key].get("format") or "unknown"
            raise ValueError(
                f"{name}: weights quantised with {method!r} are not supported; use an unquantised checkpoint"
            )


def only_full_attention(hf: Mapping[str, Any]) -> None:
    """ValueError when ``layer_types`` asks for anything but full attention."""
    other = sorted(set(hf.get("layer_types") or ()) - {"full_attention"})
    if other:
        raise ValueError(
            f"{hf.get('model_type')}: config has layer type(s) {other}; supported: full_attention"
        )
