"""What is trained in a comparison with another package, and on what."""

import argparse
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from train_features import packed
from train_steps import answers

from specjax.train.types import Batch, Features

DECAY, UNROLL, GAMMA, DRAFTS, BATCHES = 0.8, 7, 4.0, 7, 4


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained. ``sharpness``: gain of the target's final norm, which makes its distributions peaked."""

    name: str
    method: str
    taps: tuple[int, ...]
    terms: tuple[tuple[str, float], ...]
    their_terms: dict[str, float]
    their_call: dict[str, Any]
    layers: int = 1
    mask_id: int = 16
    sharpness: float = 4.0


def case_of(name: str, args: argparse.Namespace) -> Case:
    """A case by its name, ``<method>-<loss>``. Our coefficients make up for what the package divides by."""
    method, loss = name.split("-")
    theirs = {"kl": "kl_div", "ce": "ce"}[loss]
    if method == "eagle3":
        call = {"ttt_steps": UNROLL, "ttt_step_loss_decay": DECAY}
        total = sum(DECAY**k for k in range(UNROLL))
        return Case(name, method, (2, 15, 27), ((loss, total),), {theirs: 1.0}, call)
    call = {"gamma": GAMMA, "max_anchors": args.rows * args.anchors}
    mean = float(np.exp(-np.arange(DRAFTS) / GAMMA).mean())
    return Case(name, method, (2, 9, 15, 21, 28), ((loss, mean),), {theirs: 1.0}, call, layers=4)


def make(
    case: Case, table: np.ndarray, ids: np.ndarray, args: argparse.Namespace
) -> list[tuple[Batch, Features]]:
    """Batches of texts that are the target's likeliest of the draft vocabulary, with random features."""
    given = []
    best = jax.jit(lambda hidden, rows: jnp.argmax(hidden @ rows.T, -1))
    for seed in range(BATCHES):
        _, batch, _ = packed(args.rows, args.length, 0, seed)
        batch, keys = answers(batch), jax.random.split(jax.random.key(seed), len(case.taps) + 1)
        draw = lambda key: jax.random.normal(key, (args.rows, args.length, table.shape[1]), args.dtype)  # noqa: E731
        hidden = draw(keys[0]).astype(jnp.float32)
        hidden = (hidden * jax.lax.rsqrt(jnp.mean(hidden**2, -1, keepdims=True))).astype(args.dtype)
        said = jax.lax.map(lambda h: best(h, jnp.asarray(table[ids], args.dtype)), hidden)
        tokens = np.roll(ids[np.asarray(said)], 1, 1)
        tokens = np.where(np.asarray(batch.doc) >= 0, tokens, 0).astype(np.int32)
        batch = jax.device_put(Batch(tokens, batch.doc, batch.pos, batch.trained))
        given.append(
            (batch, Features(hidden, {t: draw(k) for t, k in zip(case.taps, keys[1:], strict=True)}))
        )
    return given


def documents(case: Case, batch: Batch, features: Features) -> list[dict[str, np.ndarray]]:
    """The documents of a batch one by one."""
    doc = np.asarray(batch.doc)
    host = lambda x: np.asarray(x, np.float32)  # noqa: E731
    arrays = {
        "tokens": np.asarray(batch.tokens),
        "trained": np.asarray(batch.trained),
        "hidden": host(features.hidden),
        "taps": np.concatenate([host(features.taps[t]) for t in case.taps], -1),
    }
    found = []
    for r in range(len(doc)):
        for d in range(doc[r].max() + 1):
            found.append({name: x[r, doc[r] == d] for name, x in arrays.items()})
    return found
