"""The shipped test helpers: drafters that misbehave as announced, statistics that can fail."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import registry, testing
from specjax.core import round as rnd
from specjax.types import Ctx, TapSpec

VOCAB, SIZE = 20, 32
KNOWN = [((1, 2, 3), tuple(range(4, 16))), ((1, 2), (7, 7, 8, 8, 9, 9)), ((5,), ())]
CFG = testing.script(4, VOCAB, KNOWN, stop=19, at=1)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _draft(drafter, cfg, k, tokens, length, p, keys):
    anchor = jnp.take_along_axis(tokens, length[:, None] - 1, 1)[:, 0]
    proposal, _ = drafter.draft(
        p, None, cfg, k, (), Ctx(tokens, length, anchor, length > 0, None, None), keys
    )
    return proposal


def drafted(drafter, rows, k=4, cfg=CFG, p=None, keys=None):
    buffer = np.full((len(rows), SIZE), 3, np.int32)
    for line, row in zip(buffer, rows, strict=True):
        line[: len(row)] = row
    return _draft(drafter, cfg, k, jnp.asarray(buffer), jnp.array([len(r) for r in rows], jnp.int32), p, keys)


def listed(proposal):
    return [list(map(int, t[:c])) for t, c in zip(np.asarray(proposal.tokens), proposal.count, strict=True)]


ROWS = [[1, 2, 3, 4, 5], [1, 2, 7], [5, 0], [8, 8], [1, 2, 3, *range(4, 14)]]


@pytest.mark.parametrize("k", range(1, 9))
def test_always_right_finds_each_row_by_its_prompt(k):
    """Also: longest prompt wins, nothing after the reference's end, nothing for strangers."""
    full = [list(range(6, 16)), [7, 8, 8, 9, 9], [], [], [14, 15]]
    assert listed(drafted(testing.ALWAYS_RIGHT, ROWS, k)) == [f[:k] for f in full]


def test_rows_do_not_matter_to_each_other():
    """A refilled row is recognised by its new prompt."""
    alone = [listed(drafted(testing.ALWAYS_RIGHT, [row]))[0] for row in ROWS]
    assert listed(drafted(testing.ALWAYS_RIGHT, ROWS[::-1])) == alone[::-1]


def test_always_wrong_is_wrong_everywhere():
    right, wrong = (drafted(d, ROWS) for d in (testing.ALWAYS_RIGHT, testing.ALWAYS_WRONG))
    assert np.array_equal(right.count, wrong.count)
    assert not np.any(right.tokens == wrong.tokens)
    assert np.all((wrong.tokens >= 0) & (wrong.tokens < VOCAB))


def test_every_third_wrong_follows_the_continuation():
    same = [
        bool(drafted(testing.EVERY_THIRD_WRONG, [[1, 2, 3, *range(4, 4 + n)]]).tokens[0, 0] == 4 + n)
        for n in range(9)
    ]
    assert same == [True, True, False] * 3


def test_random_count_takes_every_value():
    long = testing.script(4, VOCAB, [((1,), tuple(i % VOCAB for i in range(1, 30)))])
    rows = [[1, *(i % VOCAB for i in range(1, n))] for n in range(1, 26)]
    counts = {int(c) for c in drafted(testing.RANDOM_COUNT, rows, cfg=long).count}
    assert counts == {0, 1, 2, 3, 4}
    assert testing.RANDOM_COUNT.varies(None)


def test_stop_inside_replaces_one_draft():
    assert listed(drafted(testing.STOP_INSIDE, [[1, 2, 3]])) == [[4, 19, 6, 7]]


def test_scripts_need_prompts():
    with pytest.raises(ValueError, match="prompt"):
        drafted(testing.ALWAYS_RIGHT, ROWS, cfg=testing.script(4, VOCAB, []))


@pytest.mark.parametrize(
    "name", ["ALWAYS_RIGHT", "ALWAYS_WRONG", "EVERY_THIRD_WRONG", "RANDOM_COUNT", "STOP_INSIDE"]
)
def test_named_in_the_registry(name):
    drafter = registry.drafter(f"specjax.testing:{name}")
    assert drafter.Config is testing.Script
    assert drafter.NEEDS(CFG) == TapSpec()
    assert drafter.init_state(CFG, 1, 1, 1, jnp.float32) == ()
    assert drafter.abstract(CFG) is None
    assert hash(CFG) == hash(testing.script(4, VOCAB, KNOWN, stop=19, at=1))


@pytest.mark.parametrize("ids", [(), (9, 2, 5)])
def test_sampled_drafts_follow_the_reported_law(ids):
    """DST.2: what is drawn is what q says, at every position given the draft before it."""
    n, vocab, k = 6000, 12 if ids else 4, 3
    cfg = testing.bigram(k, vocab, seed=1, ids=ids)
    keys = jax.vmap(jax.random.key)(jnp.arange(n))
    proposal = drafted(testing.SAMPLED, [[1, 3]] * n, k, cfg, keys=keys)
    assert proposal.q.shape == (n, k, len(ids) or vocab)
    assert not proposal.point.any()
    column = {t: i for i, t in enumerate(ids)} if ids else {t: t for t in range(vocab)}
    tokens = np.asarray(proposal.tokens)
    columns = np.vectorize(column.get)(tokens)
    table = np.array(cfg.table)
    names = list(ids) or list(range(vocab))
    law = testing.joint_law(lambda past: table[names[past[-1]] if past else 3], len(names), k)
    assert testing.chisquare(testing.histogram(columns, len(names)), law) > 1e-3
    previous = np.concatenate([np.full((n, 1), 3), tokens[:, :-1]], 1)
    np.testing.assert_allclose(proposal.q, table[previous], rtol=1e-6)


def test_sampled_is_a_point_when_greedy():
    """PEER.7, DST.1: without probabilities the rule is "match", with them it is the ratio test."""
    proposal = drafted(testing.SAMPLED, [[1, 3]], 2, testing.bigram(2, 4))
    assert proposal.q is None
    assert proposal.point is None
    assert rnd.natural_rule(proposal) == "match"
    drawn = drafted(
        testing.SAMPLED, [[1, 3]], 2, testing.bigram(2, 4), keys=jax.random.split(jax.random.key(0), 1)
    )
    assert rnd.natural_rule(drawn) == "reject"


def _greedy(params, rows, new):
    """Continuations by whole forward passes, and the smallest gap between the two best logits."""
    target, cfg = registry.target("llama"), params.meta.target_cfg
    size = max(map(len, rows)) + new

    @jax.jit
    def last(tokens, length):
        cache = target.init_cache(cfg, 1, size, size, jnp.float32)
        pos = jnp.arange(size, dtype=jnp.int32)[None]
        out = target.forward(params.target, cfg, tokens, pos, length, cache, TapSpec(), "extend")
        return target.unembed(params.target, cfg, out.hidden[:, length[0] - 1])[0]

    gap, out = np.inf, []
    for row in rows:
        tokens = np.zeros((1, size), np.int32)
        tokens[0, : len(row)] = row
        for n in range(len(row), len(row) + new):
            logits = np.asarray(last(tokens, np.array([n], np.int32)))
            tokens[0, n] = logits.argmax()
            gap = min(gap, np.diff(np.sort(logits)[-2:])[0])
        out.append(tokens[0, len(row) : len(row) + new].tolist())
    return out, gap


@pytest.mark.parametrize(("seed", "vocab"), [(0, 64), (1, 64), (0, 256)])
def test_tiny_params_have_clear_gaps_and_varied_output(seed, vocab):
    params = testing.tiny_params(seed, vocab=vocab)
    rows, gap = _greedy(params, [[3], [1, 2, 3], [9, 8, 7, 6], [5] * 7], 30)
    assert gap > 1e-3
    assert all(len(set(row)) > 5 for row in rows)
    assert len({tuple(row) for row in rows}) == 4
    again = testing.tiny_params(seed, vocab=vocab)
    assert all(map(np.array_equal, jax.tree.leaves(params), jax.tree.leaves(again)))


def test_self_drafter_continues_as_the_target():
    params = testing.tiny_params(drafter_weights="target")
    rows = [[3], [1, 2, 3], [9, 8, 7, 6, 5, 4]]
    cfg = testing.SelfConfig(5, "llama", params.meta.target_cfg)
    expected, _ = _greedy(params, rows, 5)
    assert listed(drafted(testing.SELF, rows, 5, cfg, params.drafter)) == expected
    assert params.drafter is params.target


def test_chisquare_accepts_the_right_law_and_rejects_a_wrong_one():
    """PEER.1: the test itself is shown to fail."""
    rng = np.random.default_rng(0)
    law = np.array([0.5, 0.3, 0.15, 0.05, 0.0])
    counts = np.bincount(rng.choice(5, 4000, p=law), minlength=5)
    assert testing.chisquare(counts, law) > 0.01
    assert testing.chisquare(counts, np.array([0.45, 0.35, 0.15, 0.05, 0.0])) < 1e-4
    assert testing.chisquare(counts + np.eye(5, dtype=int)[4], law) == 0.0
    rare = np.array([0.4, 0.5998, 0.0001, 0.0001])  # two cells too small to stand alone, even together
    assert testing.chisquare(np.array([400, 599, 1, 0]), rare) > 0.01
    with pytest.raises(ValueError, match="sum"):
        testing.chisquare(counts, law / 2)
    with pytest.raises(ValueError, match="too few"):
        testing.chisquare(counts // 1000, law)


def test_joint_law_is_the_product():
    first, second = np.array([0.25, 0.75]), np.array([[0.5, 0.5], [0.1, 0.9]])
    law = testing.joint_law(lambda past: second[past[-1]] if past else first, 2, 2)
    np.testing.assert_allclose(law, first[:, None] * second)
    assert testing.histogram([(0, 1), (0, 1), (1, 1)], 2).tolist() == [[0, 2], [0, 1]]
