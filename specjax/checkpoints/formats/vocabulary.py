"""A reduced draft vocabulary as files store it: ``d2t`` offsets, and ``t2d`` marks used in training."""

from collections.abc import Mapping

import numpy as np

from specjax.checkpoints.formats import Files

D2T, T2D = "d2t", "t2d"

#: Tensors of the map that are never read by a drafter.
SKIPPED = {T2D: "which target ids the drafter knows: used in training, and to check d2t"}


def reduced(
    files: Files, names: Mapping[str, str], said: int | None = None, full: int | None = None
) -> int | None:
    """Size of the reduced vocabulary, or None when the drafter has the target's.

    ``said`` and ``full``: sizes of the draft vocabulary and of its target's, as the config states them. Draft
    id i is target id ``i + d2t[i]``, so zeros are the identity. Raises ValueError for a reduced vocabulary
    without a map, and for a map that leaves the target's vocabulary, repeats an id or contradicts ``t2d``.
    """
    vocab = files.target.vocab_size
    if D2T not in names:
        if said is not None and said != (full or vocab):
            raise ValueError(
                f"{files.where}: the draft vocabulary has {said} ids and the target's {full or vocab}, but there is "
                "no map between them (d2t)"
            )
        return None
    offsets = np.asarray(files.get(names[D2T])).reshape(-1).astype(np.int64)
    size = len(offsets)
    if said is not None and said != size:
        raise ValueError(f"{files.where}: d2t maps {size} ids, the config says {said}")
    ids = np.arange(size) + offsets
    if size == vocab and not offsets.any():
        return None
    if ids.min() < 0 or ids.max() >= vocab or len(np.unique(ids)) != size:
        raise ValueError(
            f"{files.where}: d2t must map each draft id to another id of the target's vocabulary [0, {vocab})"
        )
    _check_marks(files, names, ids, vocab)
    return size


def _check_marks(files: Files, names: Mapping[str, str], ids: np.ndarray, vocab: int) -> None:
    if T2D not in names:
        return
    marked = np.flatnonzero(np.asarray(files.get(names[T2D])).reshape(-1))
    if not np.array_equal(marked, np.sort(ids)):
        raise ValueError(
            f"{files.where}: t2d marks {len(marked)} target ids that are not the {len(ids)} ids d2t maps to (target "
            f"vocabulary {vocab})"
        )
