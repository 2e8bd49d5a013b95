"""Texts to train on, as they are read: the documents of one or more folders (:mod:`specjax.train.store_files`)."""

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int, UInt32, UInt64

from specjax.train.store_files import Document, differences, digest_of, read_meta, read_shard, shard_files


@dataclasses.dataclass(frozen=True)
class Store:
    """Documents of one or more folders, in an order that depends on what they are, not on when they were written.

    Document i has the tokens ``ids[starts[i] : starts[i + 1]]`` and the answers ``spans[firsts[i] : firsts[i + 1]]``
    (relative to its beginning). ``temperature`` is NaN where the answers were given.
    """

    meta: tuple[Mapping[str, Any], ...]  # one per folder
    sources: tuple[str, ...]
    ids: UInt32[np.ndarray, " tokens"]
    starts: Int[np.ndarray, " D+1"]
    spans: Int[np.ndarray, "S 2"]
    firsts: Int[np.ndarray, " D+1"]
    ended: Bool[np.ndarray, " S"]
    source: Int[np.ndarray, " D"]
    prompt: UInt64[np.ndarray, " D"]
    group: UInt64[np.ndarray, " D"]
    sample: Int[np.ndarray, " D"]
    part: Int[np.ndarray, " D"]
    temperature: Any  # float [D]

    def __len__(self) -> int:
        return len(self.source)

    def __repr__(self) -> str:
        """A line per source."""
        return "\n".join(
            f"{name}: {count['documents']:,} texts, {count['trained']:,} of {count['tokens']:,} tokens trained, "
            f"{count['ended']:.1%} of the answers came to their end"
            for name, count in self.counts().items()
        )

    @property
    def lengths(self) -> Int[np.ndarray, " D"]:
        """Tokens per document."""
        return np.diff(self.starts)

    @property
    def trained(self) -> Int[np.ndarray, " D"]:
        """Trained tokens per document."""
        sizes = np.concatenate([[0], np.cumsum(self.spans[:, 1] - self.spans[:, 0])])
        return sizes[self.firsts[1:]] - sizes[self.firsts[:-1]]

    def document(self, i: int) -> Document:
        """Document i by itself."""
        part = slice(self.firsts[i], self.firsts[i + 1])
        return Document(
            self.ids[self.starts[i] : self.starts[i + 1]],
            tuple((int(a), int(b)) for a, b in self.spans[part]),
            tuple(map(bool, self.ended[part])),
            self.sources[self.source[i]],
            *(int(x[i]) for x in (self.prompt, self.group, self.sample, self.part)),
        )

    @functools.cached_property
    def digest(self) -> str:
        """What tells these texts from any others."""
        arrays = (self.ids, self.starts, self.spans, self.firsts, self.prompt, self.sample, self.part)
        return digest_of(dict(enumerate(arrays)))

    def counts(self) -> dict[str, dict[str, float]]:
        """Per source: documents, answers, tokens, trained tokens, and the share of answers that ended by themselves."""
        told = {}
        for s, name in enumerate(self.sources):
            mine = self.source == s
            answers = np.repeat(mine, np.diff(self.firsts))
            told[name] = {
                "documents": int(mine.sum()),
                "answers": int(answers.sum()),
                "tokens": int(self.lengths[mine].sum()),
                "trained": int(self.trained[mine].sum()),
                "ended": round(float(self.ended[answers].mean()), 4) if answers.any() else 0.0,
            }
        return told


def load(*folders: str | Path, partial: bool = False) -> Store:
    """Everything in one or more folders. Checksums are compared.

    Raises FileNotFoundError where there are no texts; ValueError for a damaged shard (naming it), for folders of
    different targets or tokenizers, for one that is not finished unless ``partial``, and when there is no document.
    """
    if not folders:
        raise ValueError("no folder of texts was named")
    metas = [read_meta(Path(folder)) for folder in folders]
    for folder, meta in zip(folders, metas, strict=True):
        if not meta["complete"] and not partial:
            raise ValueError(
                f"{folder} is not finished: prepare it again with the same settings, which goes on where it stopped, "
                "or load it with partial=True"
            )
        if found := differences(metas[0], meta, ("target", "tokenizer")):
            raise ValueError(f"{folders[0]} and {folder} do not belong together: {'; '.join(found)}")
    parts = [
        (read_shard(path), meta)
        for folder, meta in zip(folders, metas, strict=True)
        for path in shard_files(Path(folder))
    ]
    if not any(len(arrays["source"]) for arrays, _ in parts):
        raise ValueError(f"{', '.join(map(str, folders))}: no document")
    return _joined(metas, parts)


def _joined(metas: list[Any], parts: list[tuple[dict[str, np.ndarray], Any]]) -> Store:
    sources = tuple(dict.fromkeys(name for meta in metas for name in meta["sources"]))
    settings = sorted({json.dumps(meta["sampling"], sort_keys=True) for meta in metas})
    kinds = []
    for arrays, meta in parts:
        index = np.array([sources.index(name) for name in meta["sources"]], np.int32)
        temperatures = np.array(meta["sampling"]["temperature"] if meta["sampling"] else [np.nan], np.float64)
        setting = settings.index(json.dumps(meta["sampling"], sort_keys=True))
        more = {
            "source": index[arrays["source"]],
            "temperature": temperatures[np.minimum(arrays["sample"], len(temperatures) - 1)],
            "setting": np.full(len(arrays["source"]), setting, np.int32),
        }
        kinds.append(arrays | more)
    whole = {name: np.concatenate([k[name] for k in kinds]) for name in kinds[0]}
    order = np.lexsort((whole["part"], whole["sample"], whole["setting"], whole["prompt"]))
    _check_distinct({name: whole[name][order] for name in ("prompt", "setting", "sample", "part")})
    starts, firsts = _offsets(whole["lengths"]), _offsets(whole["answers"])
    per_document = ("source", "prompt", "group", "sample", "part", "temperature")
    return Store(
        meta=tuple(metas),
        sources=sources,
        ids=_reordered(whole["ids"], starts, order),
        starts=_offsets(whole["lengths"][order]),
        spans=_reordered(whole["spans"], firsts, order).astype(np.int64),
        firsts=_offsets(whole["answers"][order]),
        ended=_reordered(whole["ended"], firsts, order),
        **{name: whole[name][order] for name in per_document},
    )


def _check_distinct(keys: Mapping[str, np.ndarray]) -> None:
    """A text that is there twice would count twice."""
    same = np.logical_and.reduce([key[1:] == key[:-1] for key in keys.values()])
    if same.any():
        first = int(np.argmax(same))
        raise ValueError(
            f"{int(same.sum())} documents are there twice, the first: prompt {int(keys['prompt'][first]):016x}, sample "
            f"{int(keys['sample'][first])}. Was a folder named twice, or made of the same prompts with the same seed?"
        )


def _offsets(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def _reordered(flat: np.ndarray, starts: np.ndarray, order: np.ndarray) -> np.ndarray:
    sizes = np.diff(starts)[order]
    at = np.repeat(starts[order] - _offsets(sizes)[:-1], sizes) + np.arange(sizes.sum())
    return flat[at]
