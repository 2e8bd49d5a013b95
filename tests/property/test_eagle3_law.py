"""The joint law of three tokens sampled with an EAGLE-3 drafter, against the exact product."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from property import test_distribution as law

from specjax import testing
from specjax.core import round as rnd
from specjax.drafters import eagle3

ROWS = 12_000
CFG = dataclasses.replace(eagle3.tiny(law.TARGET.meta.target_cfg), head_rows=3)


@functools.cache
def drafted():
    """A random drafter that knows three of the five tokens; its proposals depend on the context."""
    params = testing.tiny_drafter(law.TARGET, "eagle3", 4, dataclasses.replace(CFG, k=law.K))
    ids = jnp.asarray([0, 2, 4], jnp.int32)
    weights = params.drafter.replace(d2t=ids - jnp.arange(3), head=3 * params.drafter.head)
    return params.replace(drafter=weights)


@functools.cache
def rounds(rule: str, honest: bool):
    params = drafted()
    weights, pair = (params.target, params.drafter), params.meta.pair

    def one(state, _):
        proposal, state = rnd.draft(pair, weights, state, law.K)
        if not honest:
            proposal = dataclasses.replace(proposal, q=jnp.full_like(proposal.q, 1 / 3))
        state, verdict, _ = rnd.verify(pair, weights, state, proposal, rule)
        return state, (verdict.accepted, jnp.any(proposal.q != proposal.q[:1]))

    @jax.jit
    def run(state):
        state, seen = jax.lax.scan(one, state, length=law.NEW)
        return state.tokens[:, 1 : 1 + law.NEW], *seen

    return run


def sample(rule: str, setting: str, honest: bool = True):
    rows = ROWS - ROWS % len(law.SETTINGS[setting])
    state = law.batch(law.SETTINGS[setting], 0, rows)
    empty = eagle3.init_state(CFG, rows, 16 + law.K + 1, law.K + 1, jnp.float32)
    return map(np.asarray, rounds(rule, honest)(dataclasses.replace(state, drafter=empty)))


@pytest.mark.parametrize(
    ("rule", "setting"),
    [
        ("reject", "temperature"),
        *(
            pytest.param(r, s, marks=pytest.mark.long)
            for r in ("reject", "block")
            for s in ("all filters", "bias")
        ),
    ],
)
def test_joint_law(rule, setting):
    """DST.1, DST.2, DST.3, DST.6: rows with temperatures of their own (0 among them), a reduced vocabulary, drafts on
    the drafter's own recycled state."""
    tokens, accepted, differ = sample(rule, setting)
    assert min(law.p_values(tokens, setting)) > law.ENOUGH
    assert accepted.max() == law.K
    assert differ.all(), "proposals depend on the row"


@pytest.mark.long
def test_a_wrong_q_is_found():
    """PEER.1: the same drafts with another distribution than they were drawn from."""
    tokens, _, _ = sample("reject", "temperature", honest=False)
    assert min(law.p_values(tokens, "temperature")) < law.NEVER
