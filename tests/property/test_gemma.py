"""Gemma targets decode exactly: rings that wrap many times, rejected drafts, cut-back caches, views for drafters."""

import dataclasses
import functools

import gemma_tiny
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import registry, testing
from specjax.types import TapSpec

FAMILIES = tuple(gemma_tiny.CONFIGS)
PROMPTS = [[5], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11, 12, 13], [1, 2, 3], [5] * 7]
NEW, SIZE, TEXTS = 45, 64, 8


def told(name, modes, known, k=4):
    """A drafter that knows how prompts go on; it stays silent on a row it knows nothing about."""
    base = gemma_tiny.params(name)
    cfg = testing.ToldConfig(k, gemma_tiny.VOCAB, TEXTS, SIZE)
    meta = dataclasses.replace(base.meta, drafter="specjax.testing:TOLD", drafter_cfg=cfg)
    return base.replace(drafter=testing.telling(known, modes, SIZE, TEXTS), meta=meta)


@functools.cache
def greedy(name):
    """Continuations without drafts, one position at a time, which one pass over each text confirms."""
    silent = told(name, "ALWAYS_RIGHT", [])
    out = specjax.decode(silent, PROMPTS, max_new_tokens=NEW, rows=3)
    assert all(s.proposed == 0 for s in out.stats)
    texts = [p + t for p, t in zip(PROMPTS, out.tokens, strict=True)]
    logits, _ = feed(name, [t + [0] * (SIZE - len(t)) for t in texts], 0)
    for row, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True)):
        assert logits[row, len(prompt) - 1 : len(text) - 1].argmax(-1).tolist() == text[len(prompt) :]
    assert len({t for tokens in out.tokens for t in tokens}) > 10  # no short cycle
    return out.tokens


@functools.cache
def _run(name, q_max, mode):
    """Logits and cache of a block, compiled once per shape."""
    meta = gemma_tiny.params(name).meta
    module, cfg = registry.target(meta.family), meta.target_cfg

    @jax.jit
    def run(weights, tokens, start, valid, cache):
        pos = start[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        out = module.forward(weights, cfg, tokens, pos, valid, cache, TapSpec(), mode)
        return module.unembed(weights, cfg, out.hidden), out.cache

    def fresh(rows, slots=SIZE + 8):
        return module.init_cache(cfg, rows, slots, q_max, jnp.float32)

    return run, fresh


def feed(name, tokens, start, cache=None, q_max=4, mode="extend", valid=None):
    """(logits, cache) after rows of ``tokens`` at ``start``."""
    run, fresh = _run(name, q_max, mode)
    tokens = np.atleast_2d(tokens).astype(np.int32)
    start, full = np.broadcast_to(np.int32(start), len(tokens)), np.int32(tokens.shape[1])
    valid = np.broadcast_to(full if valid is None else np.int32(valid), len(tokens))
    cache = fresh(len(tokens)) if cache is None else cache
    logits, cache = run(gemma_tiny.params(name).target, tokens, start, valid, cache)
    return np.asarray(logits), cache


@pytest.mark.parametrize("name", FAMILIES)
def test_speculative_is_plain_over_ring_wraps(name):
    """KVR.1, KVR.2, GRD.1: all drafts right, all wrong, some wrong, any number of them; finished rows refilled."""
    known = list(zip(PROMPTS, greedy(name), strict=True))
    for mode in ("ALWAYS_RIGHT", "ALWAYS_WRONG", "EVERY_THIRD_WRONG", "RANDOM_COUNT"):
        out = specjax.decode(told(name, mode, known), PROMPTS, max_new_tokens=NEW, rows=3)
        assert out.tokens == greedy(name), mode
        accepted, proposed = (sum(getattr(s, f) for s in out.stats) for f in ("accepted", "proposed"))
        assert (accepted == 0) == (mode == "ALWAYS_WRONG")
        assert (accepted == proposed) == (mode in ("ALWAYS_RIGHT", "RANDOM_COUNT"))


@pytest.mark.long
@pytest.mark.parametrize("k", [1, 2, 5, 7])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_draft_width(name, k):
    """KVR.1: rings of every size that goes with a draft width, shorter and longer than the window; loops take turns."""
    loop = ("device", "host")[(k // 2 + FAMILIES.index(name)) % 2]
    plain = specjax.decode(gemma_tiny.params(name), PROMPTS, max_new_tokens=NEW, rows=3)
    assert plain.tokens == greedy(name)
    known = list(zip(PROMPTS, greedy(name), strict=True))
    for mode in ("ALWAYS_RIGHT", "EVERY_THIRD_WRONG"):
        params = told(name, mode, known, k)
        out = specjax.decode(params, PROMPTS, max_new_tokens=NEW, rows=3, k=k, loop=loop)
        assert out.tokens == greedy(name)


LONG = [pytest.param(name, marks=pytest.mark.long) for name in FAMILIES[1:]]


@pytest.mark.parametrize("name", [FAMILIES[0], *LONG])
def test_cut_back_as_far_as_min_resume_says(name):
    """KVR.2: a cache that held ``high`` positions goes on from an earlier length as if it had never been further."""
    module, cfg = (
        registry.target(gemma_tiny.params(name).meta.family),
        gemma_tiny.params(name).meta.target_cfg,
    )
    rng = np.random.default_rng(0)
    for high in (4, 7, 8, 13, 30):
        length = module.min_resume(cfg, high)
        assert length == (1 if high <= gemma_tiny.WINDOW + 1 else high - 1)
        text, other = rng.integers(0, gemma_tiny.VOCAB, (2, 34))
        _, cache = feed(name, text, 0, q_max=1, valid=high)
        kept = np.concatenate([text[: length - 1], other])[:34]
        got, _ = feed(name, kept[length - 1 : length + 3], length - 1, cache, q_max=1)
        want, _ = feed(name, kept, 0, q_max=1)
        np.testing.assert_allclose(got[0], want[0, length - 1 : length + 3], atol=1e-3)


@pytest.mark.parametrize("name", FAMILIES)
def test_views_show_what_the_last_layer_of_a_kind_holds(name):
    """Keys, values and positions that attention sees, whatever was rejected on the way."""
    params = gemma_tiny.params(name)
    module, cfg = registry.target(params.meta.family), params.meta.target_cfg
    rng = np.random.default_rng(1)
    text, garbage = rng.integers(0, gemma_tiny.VOCAB, (2, 20))
    clean = rejected = None
    for at in range(0, 20, 4):
        block = slice(at, at + 4)
        _, clean = feed(name, text[block], at, clean, mode="verify")
        _, rejected = feed(name, garbage[block], at, rejected, mode="verify")
        _, rejected = feed(name, text[block], at, rejected, mode="verify")
    for kind in ("full", "sliding"):
        a, b = (module.kv_view(params.target, cfg, cache, kind) for cache in (clean, rejected))
        held = np.asarray(a.pos[0])
        seen = (held >= 0) & (held < 20)
        np.testing.assert_array_equal(b.pos[0][seen], held[seen])
        assert set(held[seen]) == set(range(20) if kind == "full" else range(20 - gemma_tiny.WINDOW - 4, 20))
        for x, y in ((a.k, b.k), (a.v, b.v)):
            np.testing.assert_allclose(x[0][:, seen], y[0][:, seen], atol=1e-5)


def test_keys_made_of_values_are_the_keys():
    """The same weights with a projection for values, a copy of that for keys, cache what the view rebuilds."""
    params = gemma_tiny.params("gemma4_moe")
    module, cfg = registry.target("gemma4_text"), params.meta.target_cfg
    other = dataclasses.replace(cfg, keys_from_values=False)
    layers = tuple(x if x.v is not None else x.replace(v=x.k) for x in params.target.layers)
    copied = params.target.replace(layers=layers)

    @functools.partial(jax.jit, static_argnums=1)
    def view(weights, config):
        ids = jnp.arange(9, dtype=jnp.int32)[None]
        cache = module.init_cache(config, 1, 16, 4, jnp.float32)
        out = module.forward(weights, config, ids, ids, jnp.array([9]), cache, TapSpec(), "extend")
        return module.kv_view(weights, config, out.cache, "full")

    views = view(params.target, cfg), view(copied, other)
    np.testing.assert_allclose(views[0].k[:, :, :9], views[1].k[:, :, :9], atol=1e-5)
    np.testing.assert_allclose(views[0].v[:, :, :9], views[1].v[:, :, :9], atol=1e-5)


def test_a_value_that_overflows_stays_where_it_is():
    """NUM.1: in a cache of values, a draft that is not finite spoils what sees it and nothing before it."""
    name = "gemma4_moe"
    params = gemma_tiny.params(name)
    text = np.random.default_rng(2).integers(0, 40, 12)
    spoiled = params.replace(target=params.target.replace(embed=params.target.embed.at[47].set(jnp.inf)))
    run, fresh = _run(name, 4, "extend")

    def ask(tokens):
        padded = np.resize(tokens, (4, SIZE)).astype(np.int32)  # the shape of another test
        logits, _ = run(spoiled.target, padded, np.zeros(4, np.int32), np.full(4, 12, np.int32), fresh(4))
        return np.asarray(logits)[0, :12]

    bad = text.copy()
    bad[9] = 47
    clean, got = ask(text), ask(bad)
    np.testing.assert_array_equal(got[:9], clean[:9])
    assert np.isfinite(clean).all()
    assert np.isnan(got[9:]).all()


def test_windows_bound_the_memory():
    """KVR.1: rings do not grow with the number of positions; shared layers and keys made of values hold nothing."""
    sizes = {}
    for name in FAMILIES:
        _, fresh = _run(name, 4, "extend")
        small, large = (jax.tree.map(lambda x: x.shape, fresh(1, slots)) for slots in (64, 128))
        for kv in large:
            assert ("pos" in vars(kv)) == (kv in small)
        sizes[name] = [len(jax.tree.leaves(kv, is_leaf=lambda x: isinstance(x, tuple))) for kv in large]
    assert sizes == {"gemma3": [3, 2, 3], "gemma4_moe": [1, 3, 1], "gemma4_small": [3, 2]}
