"""Settings of a DFlash drafter: what the file says, checked against the target before anything compiles."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from specjax.drafters.body import Body, body
from specjax.drafters.pick import Drafting
from specjax.drafters.vocab import check_vocab
from specjax.layers.rope import RopeConfig

#: "fill": row i of the block predicts the token at its own position, and the anchor's row is not used.
#: "shift": row i predicts the token after it, and the anchor's row gives the first draft.
Layout = Literal["fill", "shift"]
#: How far back a sliding layer sees. "row": W positions up to the row itself, moving with it; it limits the
#: block too. "anchor": the W positions before the anchor for every row, and all of the block.
WindowFrom = Literal["row", "anchor"]


@dataclasses.dataclass(frozen=True)
class Convolution:
    """DFlash2's convolutions along the block: ``taps`` rows, channels in groups of ``group``."""

    taps: int
    group: int


@dataclasses.dataclass(frozen=True)
class Selection:
    """DFlash2's candidate selector: ``top`` candidates per row, scored at rank ``rank``."""

    rank: int
    top: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Frozen settings.

    ``rows``: rows N of the block, always all of them as trained. ``taps``: residual indices in the order of
    ``fc``'s columns. ``causal``: per layer, whether a row sees only the rows up to itself. ``vocab``: the
    target's; ``draft_vocab``: size of a reduced one, None = the target's. ``own_embed`` and ``own_head``: rows
    of the drafter's own table, None = the target's is used. ``mask_embedding``: the file has the mask's
    input vector.
    """

    k: int
    rows: int
    layout: Layout
    mask_id: int
    taps: tuple[int, ...]
    tap_width: int
    body: Body
    causal: tuple[bool, ...]
    vocab: int
    window_from: WindowFrom = "row"
    draft_vocab: int | None = None
    own_embed: int | None = None
    own_head: int | None = None
    mask_embedding: bool = False
    input_scale: float = 1.0
    output_multiplier: float = 1.0
    softcap: float | None = None
    drafting: Drafting = "probabilistic"
    conv: Convolution | None = None
    selector: Selection | None = None

    @property
    def first(self) -> int:
        """Index of the block row that predicts the first draft."""
        return 1 if self.layout == "fill" else 0

    def __post_init__(self):
        for name, kind in (("layout", Layout), ("window_from", WindowFrom), ("drafting", Drafting)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} must be one of {get_args(kind)}, got {getattr(self, name)!r}")
        if self.rows - self.first < 1:
            raise ValueError(
                f"a block of {self.rows} rows in layout {self.layout!r} has no row left to draft with"
            )
        check_k(self, self.k)
        if len(self.causal) != self.body.layers:
            raise ValueError(f"causal says {len(self.causal)} layers, the drafter has {self.body.layers}")


def max_k(cfg: Config) -> int:
    """Most drafts a block gives: every row predicts one, but in layout "fill" the anchor's."""
    return cfg.rows - cfg.first


def check_k(cfg: Config, k: int) -> None:
    """ValueError unless a block of this drafter gives ``k`` drafts."""
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= max_k(cfg):
        raise ValueError(
            f"k must be from 1 to {max_k(cfg)}, what a block of {cfg.rows} rows in layout {cfg.layout!r} gives; "
            f"got {k!r}"
        )


#: Settings of :func:`fields`. Those a user may want to give are ``k``, ``drafting``, ``layout``, ``taps`` and
#: ``mask_id``; the rest describes the file.
SETTINGS = {
    "k", "drafting", "layout", "taps", "mask_id", "block_size", "fc_width", "transformer", "causal", "window_from",
    "vocab_size", "draft_vocab", "own_embed", "own_head", "embed_rows", "head_rows", "mask_embedding",
    "input_scale", "output_multiplier", "softcap", "conv", "selector", "target_layers",
    "flavour", "values_from_keys",
}  # fmt: skip


def config(settings: Mapping[str, Any], target_cfg: Any) -> Config:
    """Config from the settings a format read, perhaps changed by the user.

    Raises ValueError for a setting that does not exist, for one that does not fit the target (taps, widths,
    vocabularies, mask id), and for a ``k`` the block does not give.
    """
    check_names(settings, SETTINGS, "DFlash")
    return Config(**fields(settings, target_cfg))


def check_names(settings: Mapping[str, Any], known: set[str], kind: str) -> None:
    """ValueError naming the settings that do not exist."""
    unknown = sorted(set(settings) - known)
    if unknown:
        raise ValueError(f"a {kind} drafter does not know the setting(s) {unknown}; known: {sorted(known)}")


def fields(settings: Mapping[str, Any], target_cfg: Any) -> dict[str, Any]:
    """Checked fields of :class:`Config`; keys a drafter built on DFlash adds are left to it."""
    flavour, from_keys = settings.get("flavour") or "plain", bool(settings.get("values_from_keys"))
    shape = body(settings["transformer"], True, flavour, from_keys)
    layout, rows = settings["layout"], int(settings["block_size"])
    own_embed = int(settings["embed_rows"]) if settings.get("own_embed") else None
    own_head = int(settings["head_rows"]) if settings.get("own_head") else None
    out = {
        "k": settings.get("k") or max(rows - (layout == "fill"), 1),
        "rows": rows,
        "layout": layout,
        "mask_id": _mask_id(settings.get("mask_id"), own_embed, target_cfg),
        "taps": _taps(settings, target_cfg),
        "tap_width": target_cfg.hidden_size,
        "body": shape,
        "causal": tuple(bool(c) for c in settings["causal"]),
        "vocab": target_cfg.vocab_size,
        "draft_vocab": _draft_vocab(settings, own_head, target_cfg),
        "own_embed": own_embed,
        "own_head": own_head,
        "softcap": float(settings["softcap"]) if (settings.get("softcap") or 0) > 0 else None,
        "conv": Convolution(*settings["conv"]) if settings.get("conv") else None,
        "selector": Selection(*settings["selector"]) if settings.get("selector") else None,
    }
    given = ("window_from", "mask_embedding", "input_scale", "output_multiplier", "drafting")
    out |= {name: settings[name] for name in given if settings.get(name) is not None}
    _check_tables(shape, own_embed, own_head, out["draft_vocab"], target_cfg)
    _check_parts(out, target_cfg)
    return out


def _mask_id(mask: Any, own_embed: int | None, target_cfg: Any) -> int:
    size = own_embed or target_cfg.vocab_size
    if isinstance(mask, bool) or not isinstance(mask, int):
        raise ValueError(f"the mask token id must be given by the drafter's config, got {mask!r}")
    if not 0 <= mask < size:
        raise ValueError(f"mask token id {mask} is outside the embedding, which has {size} rows")
    return mask


def checked(cfg: Config, target_cfg: Any) -> Config:
    """The config itself; ValueError for a mask token that is outside the embedding."""
    _mask_id(cfg.mask_id, cfg.own_embed, target_cfg)
    return cfg


def _taps(settings: Mapping[str, Any], target_cfg: Any) -> tuple[int, ...]:
    taps, layers = tuple(int(t) for t in settings["taps"]), target_cfg.num_layers
    trained = settings.get("target_layers")
    if trained is not None and int(trained) != layers:
        raise ValueError(f"the drafter was made for a target of {trained} layers, this one has {layers}")
    if not taps or min(taps) < 0 or max(taps) > layers:
        raise ValueError(
            f"the drafter taps the residual stream after {taps} layers, but the target has {layers}: was it made for "
            "another target?"
        )
    width, need = int(settings["fc_width"]), len(taps) * target_cfg.hidden_size
    if width != need:
        raise ValueError(
            f"fc reads {width} channels, but {len(taps)} taps of a target of width {target_cfg.hidden_size} make {need}"
        )
    return taps


def _draft_vocab(settings: Mapping[str, Any], own_head: int | None, target_cfg: Any) -> int | None:
    size, said = settings.get("draft_vocab"), settings.get("vocab_size")
    if said is not None:
        check_vocab("DFlash", int(said), target_cfg.vocab_size)
    if size is not None:
        if own_head is None:
            raise ValueError(
                f"a reduced vocabulary of {size} needs an output head of its own (lm_head.weight)"
            )
        if own_head != size:
            raise ValueError(f"lm_head.weight has {own_head} rows for a reduced vocabulary of {size}")
    return size


def _check_tables(
    shape: Body, own_embed: int | None, own_head: int | None, reduced: int | None, target_cfg: Any
) -> None:
    lacks = [name for name, own in (("embedding", own_embed), ("output head", own_head)) if own is None]
    if lacks and shape.hidden_size != target_cfg.hidden_size:
        raise ValueError(
            f"the drafter is {shape.hidden_size} wide and uses the target's {' and '.join(lacks)}, which is "
            f"{target_cfg.hidden_size} wide"
        )
    for rows in (own_embed, own_head if reduced is None else None):
        if rows is not None:
            check_vocab("DFlash", rows, target_cfg.vocab_size)


def _check_parts(out: Mapping[str, Any], target_cfg: Any) -> None:
    conv, selector = out["conv"], out["selector"]
    if conv is not None and (out["body"].hidden_size % conv.group or not 1 <= conv.taps <= out["rows"]):
        raise ValueError(
            f"convolutions of {conv.taps} rows in groups of {conv.group} channels do not fit a block of "
            f"{out['rows']} rows of width {out['body'].hidden_size}"
        )
    if selector is not None and out["draft_vocab"] is not None:
        raise ValueError("a candidate selector needs the target's whole vocabulary")
    if selector is not None and not 1 <= selector.top <= target_cfg.vocab_size:
        raise ValueError(f"{selector.top} candidates of a vocabulary of {target_cfg.vocab_size}")


def tiny_fields(target_cfg: Any, layout: Layout = "fill") -> dict[str, Any]:
    """Fields of a drafter of two small layers, one full and one sliding and causal."""
    layers: Sequence[int] = range(target_cfg.num_layers + 1)
    shape = Body(
        hidden_size=target_cfg.hidden_size,
        heads=4,
        kv_heads=2,
        head_dim=8,
        mlp_size=2 * target_cfg.hidden_size,
        eps=1e-6,
        rope=RopeConfig(8),
        qk_norm=True,
        windows=(None, 6),
    )
    return {
        "k": 4,
        "rows": 5 if layout == "fill" else 4,
        "layout": layout,
        "mask_id": target_cfg.vocab_size - 1,
        "taps": tuple(layers[-2:]),
        "tap_width": target_cfg.hidden_size,
        "body": shape,
        "causal": (False, True),
        "vocab": target_cfg.vocab_size,
    }
