"""EAGLE-3 drafters of the speculators library (``Eagle3Speculator``, ``Eagle3DraftModel``).

Conventions: ``eagle_aux_hidden_state_layer_ids`` count layers passed: id x is the input of layer x. The layers'
config is nested. The embedding is stored, usually as a copy of the target's; the head always is the drafter's.
"""

from collections.abc import Mapping
from typing import Any

from specjax.checkpoints.formats import Files, Found, eagle_parts as parts

NESTED, TAPS = "transformer_layer_config", "eagle_aux_hidden_state_layer_ids"
KEYS = {
    "speculators_model_type", "speculators_version", "speculators_config", NESTED, TAPS, "draft_vocab_size",
    "embed_requires_grad", "has_no_defaults_at_init", *parts.FLAGS, *parts.SHOWN, *parts.COUNTS,
}  # fmt: skip


def read(files: Files) -> Found:
    """An EAGLE-3 drafter. Raises ValueError for settings that are not implemented or contradict the tensors."""
    hf, inner = files.hf, files.hf.get(NESTED) or {}
    parts.check(files, hf, KEYS)
    parts.check(files, inner, set())
    names = parts.names(files)
    notes: list[str] = []
    layers = {**inner, "tie_word_embeddings": hf.get("tie_word_embeddings")}
    settings = parts.settings(files, names, layers, hf)
    if "norm_before_residual" not in settings:
        settings["norm_before_residual"] = True
        notes.append(
            "the file does not state norm_before_residual; true is assumed, as in vLLM (norm_before_residual=...)"
        )
    taps = hf.get(TAPS)
    settings["taps"] = parts.default_taps(files, notes) if taps is None else tuple(int(t) for t in taps)
    parts.check_counts(files, hf, settings["taps"])
    settings |= _drafts(hf)
    made_for = ((hf.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path") or ""
    return Found("eagle3", "speculators", settings, names, parts.SKIPPED, tuple(notes), made_for)


def _drafts(hf: Mapping[str, Any]) -> dict[str, int]:
    """Drafts per round the file proposes."""
    methods = (hf.get("speculators_config") or {}).get("proposal_methods") or [{}]
    k = methods[0].get("speculative_tokens")
    return {} if k is None else {"k": int(k)}
