"""Small stores of texts without a target."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specjax.train.store import Store, load
from specjax.train.store_files import FORMAT, Document, Writer

META: dict[str, Any] = {
    "format": FORMAT,
    "kind": "own",
    "target": {"family": "llama", "weights": "w"},
    "tokenizer": {"vocabulary": "v"},
    "sampling": {"temperature": [0.0], "seed": 0},
    "sources": ["a", "b"],
    "prompts": {},
}
SAME = ("kind", "target", "tokenizer", "sampling")


def documents(count: int, seed: int = 0, longest: int = 40, samples: int = 1) -> list[Document]:
    """Random documents: one or two answers each, every third prompt a variant of the one before."""
    rng, found = np.random.default_rng(seed), []
    for i in range(count):
        for sample in range(samples):
            n = int(rng.integers(4, longest))
            first = int(rng.integers(1, n - 1))
            spans = ((first, n),) if n - first < 4 else ((first, first + 1), (first + 2, n))
            found.append(
                Document(
                    rng.integers(1, 999, n).astype(np.uint32),
                    spans,
                    tuple(bool(b) for b in rng.integers(0, 2, len(spans))),
                    "ab"[i % 2],
                    prompt=(1 << 60) + i,
                    group=i - (i % 3 == 2),
                    sample=sample,
                )
            )
    return found


def store(folder: Path, given: Sequence[Document], shards: int = 2, **changes: Any) -> Store:
    """Written in shards, and read back."""
    with Writer(folder, META | changes, SAME) as writer:
        for part in np.array_split(np.arange(len(given)), shards):
            writer.write([given[i] for i in part])
        writer.save_meta(complete=True)
    return load(folder)
