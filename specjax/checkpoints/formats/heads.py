"""DSpark's heads in a file: which there are follows from the tensors, and the config must agree."""

from collections.abc import Mapping
from typing import Any

from specjax.checkpoints.formats import Files

#: Settings of the heads.
KEYS = {"markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"}
_KINDS = {"markov_head.gate_proj.weight": "gated", "markov_head.joint_proj.weight": "rnn"}
_W1, _CONFIDENCE = "markov_head.markov_w1.weight", "confidence_head.proj.weight"


def find(files: Files, names: Mapping[str, str], said: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the heads that are there, {} without any.

    ``said``: the config's own settings. Raises ValueError where they contradict the tensors.
    """
    shape = {short: files.shapes[name] for short, name in names.items()}
    rank = shape[_W1][1] if _W1 in shape else 0
    out: dict[str, Any] = {}
    if rank:
        kind = next((kind for name, kind in _KINDS.items() if name in shape), "vanilla")
        out = {"markov_rank": rank, "markov_kind": kind, "markov_rows": shape[_W1][0]}
        _agree(files, said, "markov_head_type", kind)
    _agree(files, said, "markov_rank", rank)
    has = _CONFIDENCE in shape
    _agree(files, said, "enable_confidence_head", has)
    if has:
        extra = shape[_CONFIDENCE][1] - shape["norm.weight"][0]
        if extra not in (0, rank):
            raise ValueError(
                f"{files.where}: {_CONFIDENCE} reads {shape[_CONFIDENCE][1]} channels; the drafter is "
                f"{shape['norm.weight'][0]} wide and its Markov head has rank {rank}"
            )
        out |= {"confidence": True, "confidence_markov": extra > 0}
        _agree(files, said, "confidence_head_with_markov", extra > 0)
    return out


def _agree(files: Files, said: Mapping[str, Any], key: str, found: Any) -> None:
    if said.get(key) is not None and said[key] != found:
        raise ValueError(f"{files.where}: config has {key}={said[key]!r}, the tensors say {found!r}")
