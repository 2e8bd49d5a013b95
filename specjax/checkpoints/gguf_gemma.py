"""Gemma 3 in GGUF: what its file calls things, what it leaves out, and norm weights that are stored plus one."""

from collections.abc import Callable
from typing import Any

import numpy as np

ARCHITECTURE = "gemma3"

#: GGUF names of parts of a block that other architectures lack or use for something else.
BLOCK = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYERS_OF_27B = 62


def settings(get: Callable[..., Any], head_dim: int) -> dict[str, Any]:
    """Settings beyond those of every architecture; ``get(key, default)`` reads a metadata field.

    The rope of sliding layers and the pattern of layers are Gemma 3's own where the file is silent, and so is
    the scale of attention scores: that of the size of a head, but in the 27B model of width over heads.
    """
    wide = get("block_count") == _LAYERS_OF_27B
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": get("attention.sliding_window"),
        "sliding_window_pattern": get("attention.sliding_window_pattern", 6),
        "rope_local_base_freq": get("rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": get("embedding_length") // get("attention.head_count") if wide else head_dim,
        "final_logit_softcapping": get("final_logit_softcapping") or None,
        "attn_logit_softcapping": get("attn_logit_softcapping") or None,
    }


def plain_norm(name: str, x: np.ndarray) -> np.ndarray:
    """A tensor as Hugging Face checkpoints hold it: norm weights less the one that was added."""
    return x.astype(np.float32) - 1 if name.endswith("norm.weight") else x
