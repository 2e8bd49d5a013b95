"""DFlash, DFlash2 and DSpark drafters as the speculators library writes them.

The embedding is the target's and is not stored; the head is, where the draft vocabulary is reduced.
``aux_hidden_state_layer_ids`` count layers passed. Only sliding layers can be causal, all of them alike.
"""

from typing import Any

from specjax.checkpoints.writers import Folder, Given, keys, said, speculators
from specjax.checkpoints.writers.tensors import draft_map


def problems(given: Given) -> list[str]:
    """What its config has no key for, and what its classes would compute otherwise."""
    cfg, spark = given.cfg, given.method == "dspark"
    slides = [w is not None for w in cfg.body.windows]
    whole_head = cfg.own_head is not None and cfg.draft_vocab is None
    return said(
        *keys.body_problems(cfg.body),
        *plain(given),
        (len(_directions(cfg)) > 1, f"its sliding layers are causal in part: {cfg.causal}"),
        (
            any(c and not s for c, s in zip(cfg.causal, slides, strict=True)),
            "a layer without a window is causal",
        ),
        (any(slides) and cfg.window_from != "anchor", "its windows move with the row (window_from='row')"),
        (cfg.own_embed is not None, "it has an embedding of its own"),
        (whole_head, "it has an output head of its own for the whole vocabulary"),
        (cfg.softcap is not None, f"softcap is {cfg.softcap}"),
        (cfg.output_multiplier != 1, f"output_multiplier is {cfg.output_multiplier}"),
        (cfg.input_scale != 1, f"input_scale is {cfg.input_scale}"),
        ((cfg.conv is None) != (cfg.selector is None), "of DFlash2's parts it has only one"),
        (cfg.draft_vocab == cfg.vocab, "its draft vocabulary is all of the target's, reordered"),
        (spark and cfg.conv is not None, "it has DFlash2's convolutions and DSpark's heads"),
    )


def plain(given: Given) -> list[tuple[Any, str]]:
    """What none of the published layouts of such drafters can hold."""
    cfg = given.cfg
    known = getattr(getattr(cfg, "markov", None), "vocab", cfg.vocab)
    return [
        (known != cfg.vocab, f"its correction knows {known} tokens, the target has {cfg.vocab}"),
        (
            cfg.tap_width != cfg.body.hidden_size,
            f"it is {cfg.body.hidden_size} wide, the target {cfg.tap_width}",
        ),
        (cfg.mask_embedding, "its mask is a vector of its own (mask_embedding), not a token's"),
    ]


def _directions(cfg: Any) -> set[bool]:
    """Whether sliding layers are causal: one answer, if they agree; none without such layers."""
    return {c for c, w in zip(cfg.causal, cfg.body.windows, strict=True) if w is not None}


def plan(given: Given) -> Folder:
    """The folder."""
    cfg, rows = given.cfg, int(given.cfg.vocab)
    kind = "dspark" if given.method == "dspark" else "dflash" if cfg.conv is None else "dflash2"
    model = {"dspark": "DSparkDraftModel", "dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}[kind]
    own = {
        "draft_vocab_size": cfg.draft_vocab or rows,
        "block_size": cfg.rows,
        "target_hidden_size": None,
        "aux_hidden_state_layer_ids": list(cfg.taps),
        "mask_token_id": cfg.mask_id,
        # without sliding layers it means nothing here, but vLLM 0.33 takes a false one for all layers
        "sliding_window_non_causal": _directions(cfg) != {True},
        "sample_from_anchor": cfg.layout == "shift",
    }
    own |= dflash2(cfg) if kind == "dflash2" else heads(cfg) if kind == "dspark" else {}
    layers = keys.transformer(cfg.body, given, rows)
    config = speculators.config(given, kind, model, layers, **own)
    return Folder(config, {**given.tensors, **draft_map(given.tensors, rows)})


def dflash2(cfg: Any) -> dict[str, Any]:
    """Keys of DFlash2's parts; none of those it does not have."""
    conv, selector = cfg.conv, cfg.selector
    return {
        **({} if conv is None else {"conv_kernel_size": conv.taps, "conv_group_size": conv.group}),
        **({} if selector is None else {"selector_rank": selector.rank, "selector_top_k": selector.top}),
    }


def heads(cfg: Any) -> dict[str, Any]:
    """Keys of DSpark's heads."""
    markov = cfg.markov
    return {
        "markov_rank": 0 if markov is None else markov.rank,
        "markov_head_type": "vanilla" if markov is None else markov.kind,
        "enable_confidence_head": cfg.confidence,
        "confidence_head_with_markov": cfg.confidence_markov,
    }
