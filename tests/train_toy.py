"""A drafter small enough to train in no time, and data for it: tests of the trainer."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import testing
from specjax.train.methods import METHODS
from specjax.train.types import Batch, Recipe
from specjax.types import TapSpec

NAME, VOCAB = "train_toy", 32
METHODS[NAME] = __name__


@dataclasses.dataclass(frozen=True)
class Config:
    k: int = 2


@struct.dataclass
class Weights:
    """Logits of the next token are rows of ``table`` by this one, plus ``bias``; ``fixed`` is not trained."""

    table: jax.Array
    bias: jax.Array
    fixed: jax.Array
    ids: jax.Array


def recipe(**changes: Any) -> Recipe:
    small = {
        "steps": 12,
        "rows": 4,
        "length": 16,
        "learning_rate": 0.1,
        "dtype": "float32",
        "weight_decay": 0.0,
    }
    return Recipe(method=NAME, **{**small, **changes})


def init(cfg, target, shared, key):
    del cfg, target, shared
    table = 0.1 * jax.random.normal(key, (VOCAB, VOCAB))
    return Weights(table, jnp.zeros(VOCAB), jnp.ones(3), jnp.arange(4))


def frozen(cfg):
    del cfg
    return ("fixed",)


def needs(cfg):
    del cfg
    return TapSpec(hidden=True)


def loss(p, shared, cfg, recipe, batch, features, key):
    """Cross entropy of the next token; with ``recipe.gamma`` = 0 it is not finite once it has learned a little."""
    del shared, cfg, key
    labels, on = _labels(batch)
    logits = p.table[batch.tokens] + p.bias + 0 * features.hidden.astype(p.table.dtype).mean()
    ce = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0]
    weight = jnp.maximum(on.sum(), 1).astype(jnp.float32)
    total = jnp.where(on, ce, 0).sum()
    right = jnp.where(on, logits.argmax(-1) == labels, False).sum()
    if recipe.gamma == 0.0:
        total = total + jnp.where(p.table.max() > 0.8, jnp.nan, 0.0) * p.bias.sum()
    return total / weight, {"loss": (total, weight), "accuracy_0": (right.astype(jnp.float32), weight)}


def matches(p, shared, cfg, batch, features, k):
    del shared, cfg, features
    labels, on = _labels(batch)
    right = (p.table[batch.tokens] + p.bias).argmax(-1) == labels
    steps = [jnp.roll(right & on, -i, 1) for i in range(k)]
    return jnp.stack(steps, -1) & on[..., None]


def _labels(batch: Batch):
    labels = jnp.roll(batch.tokens, -1, 1)
    same = (jnp.roll(batch.doc, -1, 1) == batch.doc) & (batch.doc >= 0)
    return labels, same & jnp.roll(batch.trained, -1, 1) & (jnp.arange(labels.shape[1]) < labels.shape[1] - 1)


class Data:
    """Rows that count upwards in steps of the document's own; every batch is a function of its step."""

    def __init__(self, rows: int = 4, length: int = 16, validation: bool = True):
        self.identity = {"name": "counting", "rows": rows, "length": length}
        self._shape, self._validation = (rows, length), validation

    def batch(self, seed: int) -> Batch:
        rows, length = self._shape
        start = np.random.default_rng(seed).integers(0, VOCAB, (rows, 1))
        tokens = ((start + np.arange(length)) % VOCAB).astype(np.int32)
        doc = np.where(np.arange(length) < length - 2, 0, -1) + np.zeros((rows, 1), np.int32)
        pos = np.where(doc >= 0, np.arange(length), 0)
        trained = (doc >= 0) & (pos >= 3)
        return Batch(np.where(doc >= 0, tokens, 0), doc.astype(np.int32), pos.astype(np.int32), trained)

    def batches(self, step: int):
        while True:
            yield self.batch(step), None
            step += 1

    def validation(self):
        return [(self.batch(10_000), None)] if self._validation else []


def target(folder: Path | None = None):
    """A tiny target of the data's vocabulary."""
    del folder
    return testing.tiny_params(vocab=VOCAB)
