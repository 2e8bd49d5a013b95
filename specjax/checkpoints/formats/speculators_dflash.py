"""DFlash and DFlash2 drafters of the speculators library.

Conventions: ``aux_hidden_state_layer_ids`` count layers passed, so id x is the input of layer x and 0 the
embedding's output. Layout "shift" if ``sample_from_anchor``, else "fill"; older files that do not say are
read by their number of proposed tokens. A sliding layer sees the ``sliding_window`` positions before the
anchor from every row and is causal in the block unless ``sliding_window_non_causal``; full layers never
are. The head is stored for a reduced vocabulary (``d2t``), else both tables are the target's.
"""

from collections.abc import Mapping
from typing import Any

from specjax.checkpoints.formats import Files, Found, block, stripped

NESTED = "transformer_layer_config"
KEYS = {
    "speculators_model_type", "speculators_version", "speculators_config", NESTED, "draft_vocab_size",
    "block_size", "aux_hidden_state_layer_ids", "mask_token_id", "sliding_window_non_causal",
    "sample_from_anchor", "target_hidden_size",
}  # fmt: skip
#: Values of keys that old files leave out when they equal the library's defaults.
DEFAULT_NON_CAUSAL = {"dflash2": True}


def read(files: Files) -> Found:
    """A DFlash drafter, or DFlash2 by its tensors."""
    settings, names, notes = body(files, set(block.DFLASH2))
    settings |= block.dflash2(files, names, files.hf)
    return Found("dflash", "speculators", settings, names, block.SKIPPED, notes, verifier(files.hf))


def body(files: Files, more: set[str]) -> tuple[dict[str, Any], dict[str, str], tuple[str, ...]]:
    """Settings, names and notes of everything but heads; ``more``: config keys somebody else reads."""
    hf, inner = files.hf, files.hf.get(NESTED) or {}
    notes: list[str] = []
    block.check(files, hf, KEYS | more)
    block.check(files, inner, set())
    names = stripped(files.shapes, "model.")
    shape = block.transformer(files, names, inner)
    if int(hf.get("target_hidden_size") or files.target.hidden_size) != files.target.hidden_size:
        raise ValueError(
            f"{files.where} was made for a target of width {hf['target_hidden_size']}, this one has "
            f"{files.target.hidden_size}"
        )
    slides = block.sliding(shape, shape["num_hidden_layers"])
    settings = {
        "transformer": shape,
        "layout": layout(hf, notes),
        "block_size": hf.get("block_size", 8),
        "mask_id": hf.get("mask_token_id"),
        "taps": _taps(files, notes),
        "vocab_size": inner.get("vocab_size"),
        "causal": _causal(hf, slides),
        "window_from": "anchor" if any(slides) else "row",
        **block.tensors(files, names, hf.get("draft_vocab_size"), inner.get("vocab_size")),
    }
    return settings | _drafts(hf, settings), names, tuple(notes)


def _drafts(hf: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, int]:
    """Drafts per round the file proposes, where its blocks have as many."""
    k = _proposed(hf)
    most = settings["block_size"] - (settings["layout"] == "fill")
    return {"k": k} if isinstance(k, int) and 1 <= k <= most else {}


def _proposed(hf: Mapping[str, Any]) -> Any:
    methods = (hf.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return methods[0].get("speculative_tokens")


def layout(hf: Mapping[str, Any], notes: list[str]) -> str:
    """From ``sample_from_anchor``; in its absence from the number of tokens the file proposes."""
    if hf.get("sample_from_anchor") is not None:
        return "shift" if hf["sample_from_anchor"] else "fill"
    shift = _proposed(hf) == hf.get("block_size", 8)
    found = "shift" if shift else "fill"
    notes.append(
        f"the file does not state its block layout (sample_from_anchor); {found!r} is assumed from "
        f"{_proposed(hf)} proposed tokens of a block of {hf.get('block_size', 8)}: compare "
        "acceptance with the other"
    )
    return found


def _causal(hf: Mapping[str, Any], slides: tuple[bool, ...]) -> tuple[bool, ...]:
    default = DEFAULT_NON_CAUSAL.get(hf["speculators_model_type"], False)
    both_ways = hf.get("sliding_window_non_causal")
    return tuple(s and not (default if both_ways is None else both_ways) for s in slides)


def _taps(files: Files, notes: list[str]) -> tuple[int, ...]:
    ids, layers = files.hf.get("aux_hidden_state_layer_ids"), files.target.num_layers
    if ids is None:
        ids = [2, layers // 2, layers - 3]
        notes.append(f"the file does not state aux_hidden_state_layer_ids; the library's rule gives {ids}")
    return tuple(int(i) for i in ids)


def verifier(hf: Mapping[str, Any]) -> str:
    """The target the file names, or ""."""
    return ((hf.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path") or ""
