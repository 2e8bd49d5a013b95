"""Settings of an EAGLE-3 drafter and whether they fit each other and the target."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from specjax.drafters import mla as latent_attention
from specjax.drafters.body import Body, body
from specjax.drafters.mla import Latent
from specjax.drafters.pick import Drafting, check_drafting
from specjax.drafters.vocab import check_vocab

DEFAULT_K = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Frozen settings.

    ``taps``: residual streams of the target that are fused, ascending; empty: the state after the final norm is
    the feature and there is no projection. ``vocab_size``, ``target_size``: the target's. ``head_rows``: rows of
    the drafter's head. ``reduced``: they are not the first target ids, the table ``d2t`` says which.
    ``norm_before_residual``: the residual stream starts from the normed feature. ``norm_before_fc``: one norm
    over the joined taps; ``fc_norm``: one per tap. ``norm_output``: what is recycled is normed. ``input_scale``
    multiplies embeddings, ``logit_scale`` logits, before ``softcap``.
    """

    k: int
    drafting: Drafting = "probabilistic"
    body: Body
    mla: Latent | None = None
    taps: tuple[int, ...]
    target_size: int
    vocab_size: int
    head_rows: int
    embed_rows: int
    reduced: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    own_embed: bool = False
    own_head: bool = True
    logit_scale: float = 1.0
    input_scale: float = 1.0
    softcap: float | None = None

    def __post_init__(self):
        check_drafting(self.k, self.drafting)
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}")


FLAGS = (
    "reduced", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "own_embed", "own_head",
)  # fmt: skip
_OPTIONAL = {
    "k", "drafting", "draft_vocab_size", "target_hidden_size", "use_aux_hidden_state", "fc_inputs", "latent",
    "qk_norm", "o_bias", "logit_scale", "input_scale", "softcap", "flavour", "values_from_keys", *FLAGS,
}  # fmt: skip
_REQUIRED = {"transformer", "taps"}


def config(settings: Mapping[str, Any], target_cfg: Any) -> Config:
    """Config from settings, checked against the target.

    ``transformer``: the drafter's layers as Hugging Face keys, ``vocab_size`` included. ``taps``: indices of the
    target's residual stream (0 = embedding output ... L = after the last layer). ``fc_inputs``: width the stored
    projection reads. ``qk_norm``, ``o_bias``, ``latent`` (latent attention), ``flavour``, ``values_from_keys``: facts
    the keys do not tell.
    The rest are fields of :class:`Config` and ``draft_vocab_size``, ``target_hidden_size``,
    ``use_aux_hidden_state`` as checkpoints spell them.

    Raises ValueError for an unknown setting and for whatever does not fit, naming both sides.
    """
    given = {key: value for key, value in settings.items() if value is not None}
    _known(settings, given)
    hf, use_aux = given["transformer"], given.get("use_aux_hidden_state", True)
    layers, mla = _layers(hf, given)
    if given.get("norm_before_fc") and given.get("fc_norm"):
        raise ValueError("norm_before_fc and fc_norm exclude each other, both are set")
    rows = int(hf["vocab_size"])
    head_rows = int(given.get("draft_vocab_size", rows))
    out = Config(
        k=given.get("k", DEFAULT_K),
        drafting=given.get("drafting", "probabilistic"),
        body=layers,
        mla=mla,
        taps=tuple(sorted({int(t) for t in given["taps"]})) if use_aux else (),
        target_size=int(target_cfg.hidden_size),
        vocab_size=int(target_cfg.vocab_size),
        head_rows=head_rows if given.get("own_head", True) or given.get("reduced") else target_cfg.vocab_size,
        embed_rows=rows if given.get("own_embed") else int(target_cfg.vocab_size),
        logit_scale=float(given.get("logit_scale", 1.0)),
        input_scale=float(given.get("input_scale", 1.0)),
        softcap=float(given["softcap"]) if given.get("softcap", 0) > 0 else None,
        **{name: given[name] for name in FLAGS if name in given},
    )
    check_vocab("eagle3", rows, out.vocab_size)
    _check_head(out, rows, head_rows)
    _check_features(out, given, len(tuple(given["taps"])), use_aux, int(target_cfg.num_layers))
    return out


def _known(settings: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    unknown = sorted(set(settings) - _OPTIONAL - _REQUIRED)
    if unknown:
        raise ValueError(
            f"the EAGLE-3 drafter does not know the setting(s) {unknown}; known: {sorted(_OPTIONAL | _REQUIRED)}"
        )
    missing = sorted(_REQUIRED - set(given))
    if missing:
        raise ValueError(
            f"the EAGLE-3 drafter is loaded from a folder with its weights; settings alone lack {missing}"
        )


def _layers(hf: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[Body, Latent | None]:
    layers = body(
        hf,
        bool(given.get("qk_norm", False)),
        given.get("flavour", "plain"),
        bool(given.get("values_from_keys", False)),
    )
    layers = dataclasses.replace(layers, o_bias=bool(given.get("o_bias", layers.o_bias)))
    if not given.get("latent"):
        return layers, None
    if layers.flavour != "plain":
        raise ValueError(f"latent attention in a body of flavour {layers.flavour!r} is not supported")
    if layers.qk_norm:
        raise ValueError(
            "latent attention has norms of its own: q_norm and k_norm per head do not go with it"
        )
    return latent_attention.latent_body(layers, hf), latent_attention.latent(hf)


def _check_head(cfg: Config, rows: int, head_rows: int) -> None:
    if head_rows != rows and not cfg.reduced:
        raise ValueError(
            f"the drafter's vocabulary has {head_rows} tokens, the embedding {rows}, and there is no table d2t that "
            "says which tokens they are"
        )
    if head_rows > rows:
        raise ValueError(f"draft_vocab_size {head_rows} is larger than the vocabulary of {rows}")
    width = cfg.body.hidden_size
    for name, own in (("embedding", cfg.own_embed), ("output head", cfg.own_head)):
        if not own and width != cfg.target_size:
            raise ValueError(
                f"the drafter has no {name} of its own and is {width} wide; the target's is {cfg.target_size} wide"
            )


def _check_features(
    cfg: Config, given: Mapping[str, Any], listed: int, use_aux: bool, target_layers: int
) -> None:
    """TAP: every tap exists, and projection, taps and widths agree."""
    made_for = int(given.get("target_hidden_size", cfg.target_size))
    if made_for != cfg.target_size:
        raise ValueError(
            f"the drafter was made for a target of width {made_for}, this one is {cfg.target_size} wide"
        )
    if not use_aux:
        _check_unfused(cfg, given)
        return
    outside = [t for t in cfg.taps if not 0 <= t <= target_layers]
    if outside:
        raise ValueError(
            f"the drafter taps the residual stream after {outside} layers, but the target has {target_layers} "
            "layers: was this drafter trained for another target?"
        )
    if not cfg.taps or listed != len(cfg.taps):
        raise ValueError(f"taps must be different layers, at least one; got {list(given['taps'])}")
    wanted, stored = len(cfg.taps) * cfg.target_size, given.get("fc_inputs")
    if stored is not None and int(stored) != wanted:
        raise ValueError(
            f"the drafter's projection reads {stored} features, but {len(cfg.taps)} taps {list(cfg.taps)} of a target "
            f"of width {cfg.target_size} give {wanted}"
        )


def _check_unfused(cfg: Config, given: Mapping[str, Any]) -> None:
    """Without taps the feature is the target's final state as it is."""
    if given.get("fc_inputs") is not None or cfg.norm_before_fc or cfg.fc_norm:
        raise ValueError("use_aux_hidden_state is false, but the drafter has a projection of taps (fc)")
    if cfg.body.hidden_size != cfg.target_size:
        raise ValueError(
            f"use_aux_hidden_state is false, so the drafter ({cfg.body.hidden_size} wide) must be as wide as the "
            f"target ({cfg.target_size})"
        )


def tiny(target_cfg: Any) -> Config:
    """One small layer on three taps, half the vocabulary, the target's embedding."""
    layers, vocab = int(target_cfg.num_layers), int(target_cfg.vocab_size)
    return config(
        {
            "transformer": {
                "hidden_size": target_cfg.hidden_size,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": 8,
                "intermediate_size": 16,
                "vocab_size": vocab,
            },
            "taps": {0, layers // 2, layers},
            "draft_vocab_size": max(1, vocab // 2),
            "reduced": True,
        },
        target_cfg,
    )
