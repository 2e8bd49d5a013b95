"""Assistants as transformers writes them (``Gemma4AssistantForCausalLM``).

The output head is called ``model.embed_tokens``; keys and values are the target's. How many tokens to draft is in
``generation_config.json``.
"""

from specjax.checkpoints.writers import Folder, Given, keys, models, said
from specjax.checkpoints.writers.tensors import HEAD, as_int64

METHODS = ("assistant",)
_ORDER = "masked_embedding.token_ordering"
_CLUSTERS = {"num_centroids": 2048, "centroid_intermediate_top_k": 32}


def problems(given: Given) -> list[str]:
    """What its class computes otherwise."""
    cfg = given.cfg
    return said(
        (
            cfg.position_offset != 1,
            "its drafts stand before the anchor (position_offset=0); transformers puts them at the anchor",
        ),
        (cfg.softcap is not None, f"softcap is {cfg.softcap}, which transformers' assistant does not apply"),
        (
            cfg.body.num_layers - 1 not in cfg.body.full_layers,
            "its last layer does not attend to all positions",
        ),
    )


def plan(given: Given) -> Folder:
    """The folder."""
    cfg = given.cfg
    clusters = {"num_centroids": cfg.centroids, "centroid_intermediate_top_k": cfg.top_centroids}
    config = {
        "model_type": "gemma4_assistant",
        "architectures": ["Gemma4AssistantForCausalLM"],
        "backbone_hidden_size": cfg.target_size,
        "use_ordered_embeddings": bool(cfg.centroids),
        **(clusters if cfg.centroids else _CLUSTERS),
        "tie_word_embeddings": True,
        "text_config": models.gemma4(cfg.body),
        "dtype": keys.dtype(given),
    }
    tensors = {name if name != HEAD else "model.embed_tokens.weight": x for name, x in given.tensors.items()}
    if _ORDER in tensors:
        tensors[_ORDER] = as_int64(tensors[_ORDER])
    return Folder(config, tensors, {"generation_config": {"num_assistant_tokens": cfg.k}})
