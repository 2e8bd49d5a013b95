"""EAGLE-3 drafters as the speculators library writes them.

Embedding and head are stored, copies of the target's where the drafter has none of its own: a reduced head of the
target's rows. ``eagle_aux_hidden_state_layer_ids`` count layers passed.
"""

from specjax.checkpoints.writers import Folder, Given, keys, said, speculators
from specjax.checkpoints.writers.tensors import D2T, EMBED, HEAD, draft_ids, draft_map, table


def problems(given: Given) -> list[str]:
    """What its config has no key for, and what its class would compute otherwise."""
    cfg = given.cfg
    return said(
        *keys.body_problems(cfg.body),
        (cfg.mla is not None, "its attention is latent"),
        (not cfg.taps, "it reads the target's last state in place of taps (use_aux_hidden_state=false)"),
        (
            cfg.body.hidden_size != cfg.target_size,
            f"it is {cfg.body.hidden_size} wide, the target {cfg.target_size}",
        ),
        (cfg.logit_scale != 1, f"logit_scale is {cfg.logit_scale}"),
        (cfg.input_scale != 1, f"input_scale is {cfg.input_scale}"),
        (cfg.softcap is not None, f"softcap is {cfg.softcap}"),
        (
            cfg.reduced and cfg.head_rows == cfg.vocab_size,
            "its draft vocabulary is all of the target's, reordered",
        ),
    )


def plan(given: Given) -> Folder:
    """The folder."""
    cfg, lent = given.cfg, given.target.shared
    embed = table(given, EMBED, lent.embed)
    rows = embed.shape[0]
    ids = draft_ids(given.tensors) if D2T in given.tensors else None
    head = table(given, HEAD, lent.head, ids)
    config = speculators.config(
        given,
        "eagle3",
        "Eagle3DraftModel",
        keys.transformer(cfg.body, given, rows),
        draft_vocab_size=head.shape[0],
        eagle_aux_hidden_state_layer_ids=list(cfg.taps),
        norm_before_residual=cfg.norm_before_residual,
        norm_before_fc=cfg.norm_before_fc,
        fc_norm=cfg.fc_norm,
        norm_output=cfg.norm_output,
        target_hidden_size=None,
        embed_requires_grad=False,
    )
    return Folder(config, {**given.tensors, EMBED: embed, HEAD: head, **draft_map(given.tensors, rows)})
