"""Chains: who speaks for a row, what a proposal looks like then, and that all children stay in step."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from told import NEW, PROMPTS, VOCAB, model, plain, told, with_drafter

import specjax
from specjax import testing
from specjax.drafters import chain, draft_model, ngram
from specjax.types import AbsorbIn, Ctx, Proposal, Shared, TapSpec

B, K, V = 4, 3, 6


def proposal(counts, fill, q=False, ids=None, point=None):
    """Tokens ``fill``; q is uniform over 4 columns when ids are given, else over all."""
    columns = V if ids is None else len(ids)
    law = jnp.full((B, K, columns), 1 / columns, jnp.float32) if q else None
    table = None if ids is None else jnp.asarray(ids, jnp.int32)
    tokens = jnp.full((B, K), fill, jnp.int32)
    return Proposal(tokens, jnp.asarray(counts, jnp.int32), law, table, point)


def merged(*parts):
    return jax.tree.map(np.asarray, chain._merged(list(parts), V))


def test_the_first_that_has_something_speaks():
    out = merged(proposal([2, 0, 0, 1], 1), proposal([3, 3, 0, 3], 2), proposal([1, 1, 0, 1], 3))
    assert out.source.tolist() == [0, 1, 0, 0]
    assert out.count.tolist() == [2, 3, 0, 1]
    assert out.tokens[:, 0].tolist() == [1, 2, 1, 1]
    assert out.q is None
    assert out.point is None


@pytest.mark.parametrize("ids", [None, [5, 0, 2, 1]])
def test_one_child_with_probabilities(ids):
    """Its vocabulary is kept; rows of the other are points, with the one-hot row of their token."""
    out = merged(proposal([2, 0, 0, 1], 2), proposal([3, 3, 3, 3], 5, q=True, ids=ids))
    assert out.point.tolist() == [True, False, False, True]
    assert (out.q_ids is None) == (ids is None)
    one_hot = np.eye(V)[2][list(range(V)) if ids is None else ids]
    np.testing.assert_array_equal(out.q[0], np.tile(one_hot, (K, 1)))
    np.testing.assert_allclose(out.q[1], 1 / out.q.shape[-1])


def test_several_children_with_probabilities():
    """Over the target's whole vocabulary; a child's own points stay points."""
    point = jnp.array([False, True, False, False])
    parts = proposal([3, 3, 0, 0], 1, q=True, ids=[5, 0, 2, 1], point=point), proposal([3] * B, 3, q=True)
    out = merged(*parts)
    assert out.q_ids is None
    np.testing.assert_allclose(out.q[0, 0], [0.25, 0.25, 0.25, 0, 0, 0.25])
    np.testing.assert_allclose(out.q[2, 0], np.full(V, 1 / 6))
    assert out.point.tolist() == [False, True, False, False]


@dataclasses.dataclass(frozen=True)
class Child:
    """Config of a child that proposes where ``rows`` says, needs ``taps``, and counts its runs in its state."""

    k: int
    rows: tuple[bool, ...]
    taps: tuple[int, ...] = ()
    hidden: bool = False


def counting(p, shared, cfg, k, dstate, ctx, keys):
    count = jnp.where(jnp.asarray(cfg.rows), k, 0).astype(jnp.int32)
    return Proposal(jnp.full((B, k), k, jnp.int32), count), dstate + 1


def noting(p, shared, cfg, dstate, block):
    assert set(block.taps) == set(cfg.taps)
    assert (block.hidden is not None) == cfg.hidden
    return dstate + 10


FAKE = SimpleNamespace(
    draft=counting,
    absorb=noting,
    NEEDS=lambda cfg: TapSpec(cfg.taps, cfg.hidden),
    varies=lambda cfg: False,
    min_resume=lambda cfg, high_water: cfg.k,
)


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(chain.registry, "drafter", lambda name: FAKE)


def drafted(cfg, k, live=(True,) * B, weights=(None, 1.0)):
    zeros = jnp.zeros((B,), jnp.int32)
    ctx = Ctx(jnp.zeros((B, 8), jnp.int32), zeros + 2, zeros, jnp.asarray(live), None, lambda kind: None)
    lent = Shared(jnp.zeros((V, 2)), jnp.zeros((V, 2)))
    run = jax.jit(lambda s: chain.draft(weights, lent, cfg, k, s, ctx, None))
    return run((zeros, zeros))


@pytest.mark.parametrize(
    ("first", "live", "runs"),
    [
        ([True] * B, [True] * B, 0),
        ([True, False, True, True], [True] * B, 1),
        ([True, False, True, True], [True, False, True, True], 0),
        ([False] * B, [False] * B, 0),
    ],
)
def test_a_child_with_weights_runs_only_when_needed(fake, first, live, runs):
    """Not when every live row has a proposal already; finished rows need none. One without weights always does."""
    cfg = chain.Config(("a", "b"), (Child(2, tuple(first)), Child(3, (True,) * B)))
    out, (one, two) = drafted(cfg, 3, tuple(live))
    assert one.tolist() == [1] * B
    assert two.tolist() == [runs] * B
    assert out.tokens.shape == (B, 3)
    expected = [2 if spoken else 3 * runs for spoken in first]
    assert out.count.tolist() == expected
    assert drafted(cfg, 3, tuple(live), (None, None))[1][1].tolist() == [1] * B


def test_no_child_exceeds_its_own_width(fake):
    """PEER.12: k of the call bounds all, a child's k its own."""
    cfg = chain.Config(("a", "b"), (Child(2, (True, False) * 2), Child(5, (True,) * B)))
    assert cfg.k == 5
    assert chain.varies(cfg)
    assert drafted(cfg, 5)[0].count.tolist() == [2, 5, 2, 5]
    assert drafted(cfg, 3)[0].count.tolist() == [2, 3, 2, 3]
    assert chain.min_resume(cfg, 9) == 5


def test_children_are_shown_what_they_need(fake):
    """TAP.1: the union goes to the target, each child sees its own part."""
    cfg = chain.Config(
        ("a", "b"), (Child(2, (True,) * B, (0, 2)), Child(2, (True,) * B, (1, 2), hidden=True))
    )
    assert chain.NEEDS(cfg) == TapSpec((0, 1, 2), hidden=True)
    assert not chain.varies(cfg)
    zeros = jnp.zeros((B, 2), jnp.int32)
    feature = jnp.zeros((B, 2, 4))
    block = AbsorbIn(zeros, zeros, zeros, zeros[:, 0], feature, dict.fromkeys((0, 1, 2), feature))
    lent = Shared(jnp.zeros((V, 2)), jnp.zeros((V, 2)))
    states = chain.absorb((None, None), lent, cfg, (zeros, zeros + 1), block)
    assert [int(s[0, 0]) for s in states] == [10, 11]


def test_what_makes_no_chain():
    cfg = ngram.tiny(None)
    for names, configs, message in (
        ((), (), "a chain of 0 drafters"),
        (("ngram",), (cfg, cfg), "1 drafters with 2 configs"),
        (("ngram", "chain"), (cfg, cfg), "not chains"),
    ):
        with pytest.raises(ValueError, match=message):
            chain.Config(names, configs)


@functools.cache
def with_itself(first: str = "ngram"):
    """n-grams, then the target as its own draft model."""
    meta = model().meta
    small = draft_model.Config(family="llama", model=meta.target_cfg, vocab_size=VOCAB, k=3)
    if first == "ngram":
        return with_drafter(
            model(),
            "chain",
            chain.Config(("ngram", "draft_model"), (ngram.Config(2, 2, 1), small)),
            (None, model().target),
        )
    wrong = told("ALWAYS_WRONG")
    names = (wrong.meta.drafter, "draft_model")
    configs = (dataclasses.replace(wrong.meta.drafter_cfg, k=5), small)
    return with_drafter(model(), "chain", chain.Config(names, configs), (wrong.drafter, model().target))


def test_every_child_stays_in_step():
    """KVR.3, GRD.1: whatever n-grams were accepted or not in between, the target drafting for itself is always
    right, and the counters say who was."""
    out = specjax.decode(with_itself(), PROMPTS[:3], max_new_tokens=NEW, rows=3)
    assert out.tokens == plain()[:3]
    copied, drawn = zip(out.total.proposed_by, out.total.accepted_by, strict=True)
    assert 0 < copied[1] < copied[0]
    assert drawn[0] == drawn[1] > 0


def test_a_wider_liar_in_front():
    """KVR.4: blocks wider than a child's own drafts, none of them right."""
    out = specjax.decode(with_itself("wrong"), PROMPTS[:3], max_new_tokens=NEW, rows=3)
    assert out.tokens == plain()[:3]
    assert out.total.accepted_by == (0,)


@pytest.mark.parametrize("rule", [pytest.param("reject", marks=pytest.mark.long), "block"])
def test_sampled_rows_of_both_kinds(rule):
    """DST.1: copied rows are points, drawn ones are kept as drawn."""
    params = with_itself()
    call = {"temperature": 0.8, "seed": 1, "rule": rule, "max_new_tokens": NEW, "rows": 3}
    stats = specjax.decode(params, PROMPTS[:3], **call).total
    assert stats.proposed_by[0] > stats.accepted_by[0]
    assert stats.proposed_by[1] == stats.accepted_by[1] > 0


def test_memory_and_weights():
    """CKP.4, PRF.5: weights in order, None without; the state is the children's."""
    params = testing.tiny_drafter(model(), "chain")
    assert params.drafter[0] is None
    told = specjax.explain(params, [1, 2, 3])
    assert told.drafter_bytes == sum(x.nbytes for x in jax.tree.leaves(params.drafter[1]))
