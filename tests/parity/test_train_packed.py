"""A packed row gives every document what it gets alone, in every family (PEER.13, TRD.3)."""

import functools
from typing import Any

import families
import gemma_tiny
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import registry, testing
from specjax.testing.models import tiny_config
from specjax.train import features, packed
from specjax.train.types import Batch, Features
from specjax.types import KVView, Pair, Params, TapSpec

VOCAB, LENGTH = 48, 20
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
QWEN = {"max_window_layers": 2, "use_sliding_window": False}
#: Documents of each packed row: windows of 6 positions are crossed within and between them.
ROWS = [[9, 1, 8], [13, 5], [20]]


def _config(kind: str, **more: Any) -> dict[str, Any]:
    return tiny_config(vocab=VOCAB) | {"model_type": kind} | more


FAMILIES = {
    "llama": lambda: testing.tiny_params(hf=_config("llama")),
    "qwen2": lambda: testing.tiny_params(hf=_config("qwen2", **QWEN)),
    "qwen3": lambda: testing.tiny_params(hf=_config("qwen3", **QWEN)),
    "qwen3_moe": lambda: testing.tiny_params(hf=_config("qwen3_moe", **QWEN, **MOE)),
    "deepseek": lambda: testing.tiny_params(5, hf=families.LATENT | {"vocab_size": VOCAB}),
    "qwen3_5": lambda: testing.tiny_params(1, hf=families.HYBRID | {"vocab_size": VOCAB}),
} | {name: functools.partial(testing.tiny_params, hf=hf) for name, hf in gemma_tiny.CONFIGS.items()}
QUICK = {"llama", "gemma4_small"}
NAMES = [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in FAMILIES]


def batch_of(rows, seed=0) -> tuple[Batch, list[np.ndarray]]:
    """Packed random documents of these lengths, and the documents."""
    rng, texts = np.random.default_rng(seed), []
    out = {name: np.zeros((len(rows), LENGTH), np.int32) for name in ("tokens", "doc", "pos")}
    out["doc"] -= 1
    for r, lengths in enumerate(rows):
        start = 0
        for d, n in enumerate(lengths):
            texts.append(rng.integers(1, VOCAB, n).astype(np.int32))
            at = slice(start, start + n)
            out["tokens"][r, at], out["doc"][r, at], out["pos"][r, at] = texts[-1], d, np.arange(n)
            start += n
    return Batch(**out, trained=out["doc"] >= 0), texts


@functools.partial(jax.jit, static_argnums=(0, 1))
def alone(pair: Pair, needs: TapSpec, target, texts, valid) -> tuple[Features, jax.Array]:
    """Every document in a row of its own, with the caches that decoding has."""
    family, cfg = registry.target(pair.family), pair.target_cfg
    pos = jnp.broadcast_to(jnp.arange(texts.shape[1]), texts.shape)
    cache = family.init_cache(cfg, len(texts), texts.shape[1], texts.shape[1], jnp.float32)
    out = family.forward(target, cfg, texts, pos, valid, cache, needs, "extend")
    views = {}
    for kind in ("full", "sliding") if needs.kv else ():
        try:
            views[kind] = family.kv_view(target, cfg, out.cache, kind)
        except ValueError:
            continue
    return Features(out.hidden, out.taps, views), family.unembed(target, cfg, out.hidden)


@functools.partial(jax.jit, static_argnums=(0, 1))
def together(pair: Pair, needs: TapSpec, target, batch) -> tuple[Features, jax.Array]:
    out = features.extract(target, pair, batch, needs)
    return out, registry.target(pair.family).unembed(target, pair.target_cfg, out.hidden)


@functools.cache
def made(name: str) -> tuple[Params, Pair, TapSpec]:
    params = FAMILIES[name]()
    pair = Pair(params.meta.family, params.meta.target_cfg)
    return params, pair, TapSpec((0, 1, pair.target_cfg.num_layers), True, kv=name != "deepseek")


@pytest.mark.parametrize("name", NAMES)
def test_packed_equals_alone(name):
    """PEER.13, TRD.3: ids exactly, values to 1e-5, keys and values where they are seen."""
    params, pair, needs = made(name)
    rows = ROWS if packed.packable(pair) else [[9], [1], [20]]
    batch, texts = batch_of(rows)
    features.check(pair, batch)
    got, logits = together(pair, needs, params.target, batch)
    padded = np.stack([np.pad(t, (0, LENGTH - len(t))) for t in texts])
    want, wanted = alone(pair, needs, params.target, padded, np.array([len(t) for t in texts], np.int32))
    i = 0
    for r, row in enumerate(rows):
        for d in range(len(row)):
            at, n = batch.doc[r] == d, len(texts[i])
            np.testing.assert_allclose(got.hidden[r, at], want.hidden[i, :n], atol=1e-5, rtol=1e-5)
            for tap in needs.taps:
                np.testing.assert_allclose(got.taps[tap][r, at], want.taps[tap][i, :n], atol=1e-5, rtol=1e-5)
            assert (np.argmax(logits[r, at], -1) == np.argmax(wanted[i, :n], -1)).all()
            for kind, view in (got.kv or {}).items():
                _same_view(view, r, at, want.kv[kind], i, n)
            i += 1
    assert set(got.kv or {}) == set(want.kv)
    pad = batch.doc < 0
    for x in [got.hidden, *got.taps.values()]:
        assert not np.asarray(x)[pad].any()


def _same_view(view: KVView, r: int, at: np.ndarray, own: KVView, i: int, n: int) -> None:
    """Every position the decoder's cache still holds has the same key and value."""
    assert (np.asarray(view.pos[r])[at] == np.arange(n)).all()
    held = np.asarray(own.pos[i])
    slots = np.flatnonzero((held >= 0) & (held < n))
    assert len(slots) >= min(n, 6)
    for name in ("k", "v"):
        ours, theirs = np.asarray(getattr(view, name)[r])[:, at], np.asarray(getattr(own, name)[i])
        np.testing.assert_allclose(ours[:, held[slots]], theirs[:, slots], atol=1e-5, rtol=1e-5)
