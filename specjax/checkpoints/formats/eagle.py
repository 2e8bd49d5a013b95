"""EAGLE-3 drafters in the layout of the EAGLE authors: also SpecForge's, lmsys', NVIDIA's and Kimi's.

Conventions: the layer is called ``midlayer``; settings lie at the config's top level or in ``eagle_config``. A list
of tapped layers in ``eagle_config`` counts outputs of layers when its first id is 1, as SpecForge writes them, and
inputs otherwise; one at the top level counts inputs. The embedding is the target's unless it is stored.
"""

from collections.abc import Mapping
from typing import Any

from specjax.checkpoints.formats import Files, Found, eagle_parts as parts
from specjax.drafters.eagle3_config import DEFAULT_K

SECTION, TAPS = "eagle_config", "eagle_aux_hidden_state_layer_ids"
#: Settings of the drafter, in either place. The last two tell where a file comes from.
KEYS = {
    TAPS, "use_aux_hidden_state", "draft_vocab_size", "ttt_length", *parts.FLAGS, *parts.SHOWN, *parts.COUNTS,
    "target_model_type", "target_model_name_or_path",
}  # fmt: skip
#: ModelOpt's switches whose other values are not implemented.
FIXED = {
    "use_input_layernorm_in_first_layer": (True, None),
    "use_last_layernorm": (True, None),
    "use_mtp_layernorm": (False, None),
    "next_layer_regular": (True, None),
    "parallel_draft_step": (1, None),
    "parallel_draft_heads_num_layers": (0, None),
    "has_lm_head": (True, None),
}


def matches(hf: Mapping[str, Any]) -> bool:
    """An EAGLE class, an ``eagle_config``, or a draft vocabulary."""
    said = " ".join(map(str, [hf.get("model_type"), *(hf.get("architectures") or ())])).lower()
    return "eagle" in said or SECTION in hf or "draft_vocab_size" in hf


def read(files: Files) -> Found:
    """An EAGLE-3 drafter. Raises ValueError for settings that are not implemented or contradict the tensors."""
    hf, nested = files.hf, files.hf.get(SECTION) or {}
    parts.check(files, {k: v for k, v in hf.items() if k != SECTION}, KEYS | set(FIXED))
    parts.check(files, nested, KEYS | set(FIXED))
    said = _merged(files, nested)
    names = parts.names(files)
    notes: list[str] = []
    settings = parts.settings(files, names, hf, said)
    settings["use_aux_hidden_state"] = use_aux = bool(said.get("use_aux_hidden_state", True))
    settings["taps"] = _taps(files, nested, notes) if use_aux else ()
    if use_aux:
        parts.check_counts(files, said, settings["taps"])
    settings["k"] = _drafts(said, notes)
    if said.get("norm_output"):
        notes.append(
            "norm_output is true, so the recycled state is normed; files of older SpecForge versions say so and mean "
            "something else: if later drafts are seldom accepted, try false (norm_output=...)"
        )
    made_for = str(said.get("target_model_name_or_path") or "")
    return Found("eagle3", "EAGLE", settings, names, parts.SKIPPED, tuple(notes), made_for)


def _merged(files: Files, nested: Mapping[str, Any]) -> dict[str, Any]:
    """Drafter settings from both places; ValueError for two that differ, or a value that is not implemented."""
    out: dict[str, Any] = {}
    for key in (KEYS | set(FIXED)) - {TAPS}:
        given = [place[key] for place in (nested, files.hf) if place.get(key) is not None]
        if len(given) == 2 and given[0] != given[1]:
            raise ValueError(
                f"{files.where}: {key} is {given[1]!r} at the config's top level and {given[0]!r} in {SECTION}"
            )
        if given:
            out[key] = given[0]
    for key, values in FIXED.items():
        if out.get(key) not in values:
            raise ValueError(f"{files.where}: {key}={out[key]!r} is not supported; supported: {list(values)}")
    return out


def _taps(files: Files, nested: Mapping[str, Any], notes: list[str]) -> tuple[int, ...]:
    ids = [int(i) for i in nested.get(TAPS) or ()]
    if ids:
        outputs = ids[0] == 1
        taps = tuple(i + outputs for i in ids)
        read_as = "outputs of layers because the first is 1" if outputs else "inputs of layers"
        notes.append(
            f"{SECTION} lists layers {ids}, read as {read_as}: taps after {list(taps)} layers (taps=...)"
        )
        return taps
    top = [int(i) for i in files.hf.get(TAPS) or ()]
    return tuple(top) if top else parts.default_taps(files, notes)


def _drafts(said: Mapping[str, Any], notes: list[str]) -> int:
    if said.get("ttt_length") is not None:
        return int(said["ttt_length"])
    notes.append(f"the file does not state how many tokens to draft; {DEFAULT_K} is assumed (k=...)")
    return DEFAULT_K
