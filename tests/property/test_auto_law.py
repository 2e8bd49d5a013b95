"""The joint law of sampled tokens when widths follow from past rounds and drafts are cut where their drafter doubts."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import testing
from specjax.core import loop, pace, round as rnd
from specjax.core.pace import Step

V, K, NEW, ROWS, PROMPT = 5, 3, 3, 16_000, [2]
ENOUGH, NEVER = 1e-4, 1e-7
LEAST = (0.5, 0.4, 0.3)  # chances at which drafts are worth verifying
TABLE = testing.bigram(K, V, seed=5)
TARGET = testing.micro_params(V, period=3, seed=3, spread=1.2)
PARAMS = TARGET.replace(
    meta=dataclasses.replace(TARGET.meta, drafter="specjax.testing:SAMPLED", drafter_cfg=TABLE)
)
OPTIONS = {"max_new_tokens": 16, "temperature": 1.0}


def exact(before: int, length: int) -> np.ndarray:
    """Law of the tokens at positions ``length`` and later; ``before`` is the one before them."""
    table = np.asarray(TARGET.target.table, np.float64)
    law = np.exp(table) / np.exp(table).sum(-1, keepdims=True)
    step = lambda past: law[(length - 1 + len(past)) % 3, past[-1] if past else before]  # noqa: E731
    return testing.joint_law(step, V, NEW)


def doubted(state, sees: bool):
    """Drafts drawn from a table, with a confidence made of the token before each, or (``sees``) of the draft."""
    anchor = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, 1)[:, 0]
    ctx = SimpleNamespace(anchor=anchor, length=state.length, temperature=state.sampling.temperature)
    proposal, _ = testing.SAMPLED.draft(None, None, TABLE, K, (), ctx, rnd._draft_keys(state))
    said = jnp.concatenate([anchor[:, None], proposal.tokens], 1)
    said = said[:, 1:] if sees else said[:, :-1]
    return dataclasses.replace(proposal, confidence=jnp.where(said % 2 == 0, 0.9, 0.45))


def p_value(rule: str, sees: bool = False) -> float:
    """Rounds in which each row's width follows from what was kept of its last one, and then the cut."""
    one = specjax.start(TARGET, [PROMPT], seed=1, **OPTIONS)
    keys = jax.random.key_data(jax.random.split(jax.random.key(0), ROWS))
    state = dataclasses.replace(jax.tree.map(lambda x: jnp.repeat(x, ROWS, 0), one), key_data=keys)

    def step(carry, _):
        state, kept = carry
        proposal = rnd.cut(doubted(state, sees), jnp.array(LEAST))
        count = jnp.minimum(proposal.count, jnp.array([1, 3, 0, 2])[kept])
        proposal = dataclasses.replace(proposal, count=count)
        state, verdict, _ = rnd.verify(TARGET.meta.pair, (TARGET.target, None), state, proposal, rule)
        return (state, jnp.minimum(verdict.accepted, K)), count

    run = jax.jit(lambda s: jax.lax.scan(step, (s, jnp.ones_like(s.length)), length=NEW))
    (after, _), counts = run(state)
    assert set(np.unique(counts)) == {0, 1, 2, 3}
    begin = int(one.length[0])
    tokens = np.asarray(after.tokens[:, begin : begin + NEW])
    law = exact(int(one.tokens[0, begin - 1]), begin)
    return testing.chisquare(testing.histogram(tokens, V), law)


LATER = [pytest.param(rule, marks=pytest.mark.long) for rule in ("match", "block")]


@pytest.mark.parametrize("rule", ["reject", *LATER])
def test_joint_law(rule):
    """DST.1, PEER.1: widths that follow from past rounds and cuts that follow from earlier drafts leave the law."""
    assert p_value(rule) > ENOUGH


def test_a_cut_that_sees_the_draft_is_found():
    """PEER.1: a confidence that looks at the draft under test bends the law."""
    assert p_value("reject", sees=True) < NEVER


def test_public_calls_follow_the_target(monkeypatch):
    """DST.1, DST.7: widths that change from round to round, through ``decode``."""

    class Listed(pace.Tuned):
        def _next(self):
            return [Step(1, 1), Step(0, 1), Step(3, 1)]

    monkeypatch.setattr(loop, "pace", lambda program, most: Listed(program, most, pace.Memory(program.k)))
    call = {"n": 1500, "rows": 1500, "seed": 3, "rule": "reject", "k": "auto"}
    out = specjax.decode(PARAMS, [PROMPT], **OPTIONS | call)
    found = testing.histogram([t[:NEW] for t in out.tokens[0]], V)
    assert testing.chisquare(found, exact(PROMPT[-1], len(PROMPT))) > ENOUGH
    assert out.total.accepted > 200
    assert out.total.rounds > out.total.drafting_rounds
