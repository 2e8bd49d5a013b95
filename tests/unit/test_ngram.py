"""The n-gram drafter: settings, worked cases, contract."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafters import ngram
from specjax.types import AbsorbIn, Ctx, TapSpec


def drafts(row, k=4, high=3, low=1, match="recent", size=32):
    buffer = np.full((1, size), 9, np.int32)
    buffer[0, : len(row)] = row
    length = jnp.array([len(row)], jnp.int32)
    ctx = Ctx(jnp.asarray(buffer), length, length, length > 0, None, None)
    proposal, state = ngram.draft(None, None, ngram.Config(k, high, low, match), k, (), ctx, None)
    assert state == ()
    return [int(t) for t in proposal.tokens[0, : int(proposal.count[0])]]


def test_copies_what_followed():
    assert drafts([1, 2, 3, 4, 5, 1, 2, 3]) == [4, 5, 1, 2]


def test_longest_match_beats_a_nearer_short_one():
    assert drafts([1, 2, 3, 7, 5, 3, 8, 1, 2, 3], k=1) == [7]


def test_tie_rules():
    row = [1, 2, 5, 1, 2, 6, 1, 2]
    assert drafts(row, k=1, match="recent") == [6]
    assert drafts(row, k=1, match="earliest") == [5]


def test_match_touching_the_end_gives_only_real_tokens():
    """The occurrence right before the suffix is followed by one token only."""
    assert drafts([4, 4], k=4) == [4]
    assert drafts([1, 2, 1, 2], k=4) == [1, 2]


@pytest.mark.parametrize("row", [[1], [1, 2], [1, 2, 3, 4, 5]])
def test_no_match_proposes_nothing(row):
    """NGR.2."""
    assert drafts(row) == []


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_row_too_short_for_the_ngram_proposes_nothing(length):
    """NGR.2: an n-gram and a continuation need n + 1 tokens."""
    assert drafts([6] * length, high=5, low=5) == []
    assert drafts([6] * 6, high=5, low=5) == [6]


def test_buffer_as_long_as_the_row():
    assert drafts([1, 2, 3, 1], size=4) == [2, 3, 1]
    assert drafts([1], size=1, high=5) == []


def test_wider_than_the_buffer():
    assert drafts([1, 2, 1], k=8, size=4) == [2, 1]


def test_no_quadratic_intermediate():
    """A buffer of 8192 must not make arrays of T x T."""
    spec = jax.ShapeDtypeStruct((4, 8192), jnp.int32), jax.ShapeDtypeStruct((4,), jnp.int32)
    jaxpr = jax.make_jaxpr(lambda t, n: ngram.longest_match(ngram.default("cpu"), t, n))(*spec)
    assert max(v.aval.size for e in jaxpr.eqns for v in e.outvars) <= 2 * 4 * 8192


def test_contract():
    cfg = ngram.default("cpu")
    assert ngram.varies(cfg)
    assert ngram.NEEDS(cfg) == TapSpec()
    assert ngram.abstract(cfg) is None
    assert ngram.init_state(cfg, 2, 64, 4, jnp.float32) == ()
    assert ngram.min_resume(cfg, 100) == 1
    z = jnp.zeros((2, 3), jnp.int32)
    assert ngram.absorb(None, None, cfg, (), AbsorbIn(z, z, z, z[:, 0], None, {})) == ()


def test_defaults():
    for platform, k in ngram.DEFAULT_K.items():
        cfg = ngram.default(platform)
        assert (cfg.k, cfg.lookup_max, cfg.lookup_min, cfg.match) == (k, 3, 1, "recent")
    assert ngram.default("another") == ngram.default("gpu")


@pytest.mark.parametrize(
    ("given", "lengths"),
    [
        ({}, (5, 5)),
        ({"prompt_lookup_max": 4}, (4, 4)),
        ({"prompt_lookup_min": 2}, (2, 2)),
        ({"prompt_lookup_max": 4, "prompt_lookup_min": 2}, (4, 2)),
        ({"prompt_lookup_max": None, "prompt_lookup_min": None, "method": "ngram"}, (5, 5)),
    ],
)
def test_speculative_config(given, lengths):
    """vLLM's meaning of the lookup lengths, and its choice of the earliest match."""
    assert ngram.config({"num_speculative_tokens": 6, **given}) == ngram.Config(6, *lengths, "earliest")


def test_speculative_config_match():
    assert ngram.config({"num_speculative_tokens": 6, "match": "recent"}).match == "recent"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"prompt_lookup_maxx": 3}, "prompt_lookup_maxx"),
        ({"model": None}, "model"),
        ({"prompt_lookup_max": 0}, "prompt_lookup_max"),
        ({"prompt_lookup_min": -1}, "prompt_lookup_min"),
        ({"prompt_lookup_max": 2, "prompt_lookup_min": 3}, "prompt_lookup_min"),
        ({"prompt_lookup_max": 2.0}, "prompt_lookup_max"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens"),
        ({"num_speculative_tokens": None}, "num_speculative_tokens"),
        ({"match": "latest"}, "latest"),
        ({"method": "suffix"}, "suffix"),
    ],
)
def test_bad_settings_are_named(given, named):
    with pytest.raises(ValueError, match=named):
        ngram.config({"num_speculative_tokens": 4, **given})


def test_bad_direct_config():
    with pytest.raises(ValueError, match="lookup_min"):
        ngram.Config(4, 2, 3)
    with pytest.raises(ValueError, match="k must"):
        ngram.Config(0, 2, 2)
