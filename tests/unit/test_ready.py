"""What is the same work in every round is done once per program, before the loop."""

import dataclasses

import eagle3_tiny
import jax
import pytest
from jax.extend import core

from specjax import calls, testing
from specjax.core import programs
from specjax.core.loop import host_state
from specjax.drafters import chain, mtp, ngram

IDS = (1, 2, 4)


def eagle3():
    """A head of four of the target's rows, which the drafter borrows."""
    return eagle3_tiny.drafted("reduced", own_head=False)


def cut_mtp():
    base = eagle3_tiny.target()
    tiny = mtp.tiny(base.meta.target_cfg)
    given = {"family": tiny.family, "model": tiny.model, "draft_vocab": IDS}
    return testing.tiny_drafter(base, "mtp", 1, mtp.config(given, base.meta.target_cfg))


def chained():
    """n-gram drafts before those of EAGLE-3."""
    params = eagle3()
    first = ngram.default("cpu")
    cfg = chain.Config(("ngram", "eagle3"), (first, params.meta.drafter_cfg))
    meta = dataclasses.replace(params.meta, drafter="chain", drafter_cfg=cfg)
    return params.replace(drafter=(None, params.drafter), meta=meta)


def gathers(jaxpr, shape):
    """Equations that gather rows into a table of a shape, and whether they are within a loop."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "gather" and eqn.outvars[0].aval.shape == shape:
            yield False
        for inner in core.jaxprs_in_params(eqn.params):
            for within in gathers(inner, shape):
                yield within or eqn.primitive.name in ("while", "scan")


@pytest.mark.parametrize(("make", "rows"), [(eagle3, 4), (cut_mtp, 3), (chained, 4)])
def test_a_borrowed_cut_head_is_gathered_before_the_loop(make, rows):
    """PRF.1: reading a table and writing it anew in every round would double what a draft costs."""
    params = make()
    call = calls.plan(params, [1, 2, 3], max_new_tokens=4)
    state = programs.fill_caches(call.program, host_state(call.program, call.jobs))
    fn, count = programs.chunk_program(call.program)
    traced = jax.make_jaxpr(fn)((params.target, params.drafter), state, count)
    assert list(gathers(traced.jaxpr, (rows, eagle3_tiny.WIDTH))) == [False]
