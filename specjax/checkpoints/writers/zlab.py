"""z-lab's folders (package ``dflash``): DFlash and DFlash2.

Settings in ``dflash_config``; taps are outputs of layers counted from 0; layout "fill"; embedding and head are the
target's. A window counts the row itself and moves with it; sliding layers are causal and the others not, unless
``is_causal`` decides for all.
"""

from specjax.checkpoints.writers import Folder, Given, keys, said, speculators_dflash as block

METHODS = ("dflash",)


def problems(given: Given) -> list[str]:
    """What its config has no key for, and what its classes would compute otherwise."""
    cfg, layers = given.cfg, int(given.target.cfg.num_layers)
    slides = tuple(w is not None for w in cfg.body.windows)
    return said(
        *keys.body_problems(cfg.body),
        *block.plain(given),
        (cfg.layout != "fill", f"its layout is {cfg.layout!r}, z-lab's is 'fill'"),
        (cfg.causal != slides and len(set(cfg.causal)) > 1, f"its layers are causal in part: {cfg.causal}"),
        (any(slides) and cfg.window_from != "row", "its windows stand at the anchor (window_from='anchor')"),
        (
            layers in cfg.taps,
            f"it taps the stream after all {layers} layers, which the package takes after a norm",
        ),
        (cfg.own_embed is not None, "it has an embedding of its own"),
        (cfg.own_head is not None, "it has an output head of its own"),
        ((cfg.conv is None) != (cfg.selector is None), "of DFlash2's parts it has only one"),
    )


def plan(given: Given) -> Folder:
    """The folder."""
    cfg, rows = given.cfg, int(given.cfg.vocab)
    slides = tuple(w is not None for w in cfg.body.windows)
    own = {
        "block_size": cfg.rows,
        "mask_token_id": cfg.mask_id,
        "target_layer_ids": [t - 1 for t in cfg.taps],
    }
    changed = {
        "input_embedding_scale": (cfg.input_scale, 1.0),
        "output_multiplier": (cfg.output_multiplier, 1.0),
        "final_logit_softcapping": (cfg.softcap, None),
    }
    own |= {key: value for key, (value, usual) in changed.items() if value != usual}
    config = {
        "architectures": ["DFlashDraftModel" if cfg.conv is None else "DFlash2DraftModel"],
        **keys.transformer(cfg.body, given, rows),
        "dtype": keys.dtype(given),
        "num_target_layers": int(given.target.cfg.num_layers),
        **({} if cfg.causal == slides else {"is_causal": cfg.causal[0]}),
        "dflash_config": own | block.dflash2(cfg),
    }
    return Folder(config, given.tensors)
