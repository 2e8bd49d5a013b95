"""Block drafters over packed batches, and the same blocks one by one through the functions that decode."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from block_tiny import context, shared
from packing import packed, random_rows

from specjax import testing
from specjax.drafters import dflash
from specjax.drafters.body import Body
from specjax.drafters.dflash_config import Convolution, Selection
from specjax.drafters.markov import Settings
from specjax.layers.rope import RopeConfig
from specjax.train import methods
from specjax.train.types import Features
from specjax.types import Params

VOCAB = 8  # a random drafter is right once in a while
LENGTHS = [[9, 20, 1, 2], [33], [14, 15]]


@functools.cache
def target() -> Params:
    """Two layers; logits far apart."""
    return testing.tiny_params(3, vocab=VOCAB, max_positions=2048)


def _gemma() -> Body:
    return Body(
        hidden_size=32, heads=4, kv_heads=2, head_dim=8, mlp_size=48, eps=1e-6, rope=RopeConfig(8), qk_norm=True,
        windows=(None, 6), flavour="gemma4", values_from_keys=True,
    )  # fmt: skip


def head(kind: str):
    return {"markov": Settings(6, kind, VOCAB)}


#: Method and changes of its ``tiny`` config: two layers, one full and one sliding (6 positions) and causal.
KINDS: dict[str, tuple[str, dict]] = {
    "fill": ("dflash", {}),
    "shift": ("dflash", {"layout": "shift", "rows": 4}),
    "anchor window": ("dflash", {"window_from": "anchor", "causal": (False, False)}),
    "causal": ("dflash", {"causal": (True, True), "layout": "shift", "rows": 6, "k": 6}),
    "fewer rows": ("dflash", {"rows": 3, "k": 2}),
    "mask": ("dflash", {"mask_embedding": True, "own_embed": VOCAB, "input_scale": 3.0}),
    "reduced": ("dflash", {"draft_vocab": 5, "own_head": 5, "softcap": 4.0, "output_multiplier": 0.5}),
    "dflash2": ("dflash", {"conv": Convolution(2, 8), "selector": Selection(6, 4), "softcap": 8.0}),
    "gemma4": ("dflash", {"body": _gemma(), "input_scale": 5.0}),
    "vanilla": ("dspark", head("vanilla")),
    "gated": ("dspark", head("gated")),
    "rnn": ("dspark", {**head("rnn"), "layout": "fill", "rows": 5}),
    "reduced rnn": ("dspark", {**head("rnn"), "draft_vocab": 5, "own_head": 5}),
    "no markov": ("dspark", {"markov": None, "confidence_markov": False}),
}


@functools.cache
def params(kind: str) -> Params:
    """The target with a drafter of random weights."""
    name, changes = KINDS[kind]
    p = testing.tiny_drafter(target(), name, 5, **changes)
    if "draft_vocab" not in changes:
        return p
    d2t = jnp.array([1, 2, 4, 5, 7]) - jnp.arange(5)
    held = p.drafter if name == "dflash" else p.drafter.backbone
    held = dataclasses.replace(held, d2t=d2t.astype(jnp.int32))
    return p.replace(drafter=held if name == "dflash" else dataclasses.replace(p.drafter, backbone=held))


def backbone(p: Params) -> dflash.Weights:
    return getattr(p.drafter, "backbone", p.drafter)


def batch(lengths=LENGTHS, length: int = 36, seed: int = 0):
    return packed(random_rows(VOCAB, lengths, seed), length)


def features(cfg, at, seed: int = 1, dtype=jnp.float32) -> Features:
    """Random ones for a batch; padding is NaN."""
    rng = np.random.default_rng(seed)
    draw = lambda: np.where(  # noqa: E731
        np.asarray(at.doc)[..., None] < 0, np.nan, rng.standard_normal((*at.doc.shape, cfg.tap_width))
    )
    return Features(jnp.asarray(draw(), dtype), {j: jnp.asarray(draw(), dtype) for j in set(cfg.taps)})


def decoded_rows(p: Params, at, given: Features, anchors):
    """Rows of the blocks at ``(row, index)`` anchors as decoding makes them: each document's positions before the
    anchor are injected into a cache of its own."""
    cfg, weights = p.meta.drafter_cfg, backbone(p)
    doc, pos, tokens = (np.asarray(x) for x in (at.doc, at.pos, at.tokens))
    taps = np.concatenate([np.asarray(given.taps[j]) for j in cfg.taps], -1)
    slots = int(pos.max()) + 1
    past, starts = np.zeros((len(anchors), slots, taps.shape[-1]), np.float32), []
    for b, (r, t) in enumerate(anchors):
        (here,) = np.nonzero(doc[r] == doc[r, t])
        here = here[here < t]
        past[b, : len(here)] = taps[r, here]
        starts.append(len(here))
        assert len(here) == pos[r, t]
    return _rows(
        weights, shared(p), cfg, past, np.array(starts), np.array([tokens[r, t] for r, t in anchors])
    )


@functools.partial(jax.jit, static_argnums=2)
def _rows(weights, lent, cfg, past, starts, anchors):
    n, slots = past.shape[:2]
    state = dflash.init_state(cfg, n, slots, cfg.rows, jnp.float32)
    pos = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (n, slots))
    state = dflash.inject(weights, cfg, state, past, pos, starts.astype(jnp.int32), "extend")
    return dflash.drafting_rows(weights, lent, cfg, dflash.max_k(cfg), state, context(starts + 1, anchors))


def method(kind: str):
    """How a kind is trained."""
    return methods.method(KINDS[kind][0])
