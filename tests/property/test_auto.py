"""Widths that change while a text is written (k="auto"): ids, laws and drafters do not notice.

The real pace follows the clock; here widths follow a list, so that every test does the same in every run.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from told import NEW, PROMPTS, model, plain

import specjax
from specjax import calls, testing
from specjax.core import loop, pace, programs, round as rnd
from specjax.core.loop import host_state, prefill_rows
from specjax.core.pace import Step
from specjax.registry import DRAFTERS
from specjax.testing.corrupted import OWN
from specjax.types import Proposal

LONG = pytest.mark.long


def drafters(quick: str):
    """Every drafter; one of them in the quick tests."""
    return pytest.mark.parametrize(
        "name", [pytest.param(n, marks=() if n == quick else LONG) for n in DRAFTERS]
    )


#: (drafts, rounds): plain rounds before, between and after; None = as many as the drafter has.
ORDER = [(None, 1), (0, 2), (1, 1), (0, 3), (None, 2), (1, 2), (0, 1)]


class Listed(pace.Tuned):
    """Widths in a fixed order."""

    order = ORDER
    cuts: tuple[float, ...] = ()

    def _next(self):
        own = min(self.program.pair.drafter_cfg.k, self.program.k)
        widths = [(own if w is None else w, n) for w, n in self.order]
        cuts = lambda w: self.cuts[:w] if self.program.cuts else ()  # noqa: E731
        return [Step(w, n, cuts(w)) for w, n in widths]


@pytest.fixture
def listed(monkeypatch):
    """Calls with k="auto" follow the list."""
    fixed = loop.pace
    follow = lambda program, most: Listed(program, most, pace.Memory(program.k))  # noqa: E731
    monkeypatch.setattr(loop, "pace", lambda p, most: (follow if p.auto else fixed)(p, most))
    return monkeypatch


@functools.cache
def scripted(name: str):
    """A tiny drafter that says the right words, wrong ones, or its own."""
    known = list(zip(PROMPTS, plain(), strict=True))
    modes = ["EVERY_THIRD_WRONG", "ALWAYS_RIGHT", "ALWAYS_WRONG", OWN, "ALWAYS_RIGHT"]
    return testing.corrupted(testing.tiny_drafter(model(), name), known, modes)


@drafters(quick="dspark")
def test_greedy_ids(listed, name):
    """GRD.1, GRD.3, BAT.4: finished rows are refilled; a second call compiles nothing (PRF.3)."""
    params = scripted(name)
    call = functools.partial(specjax.decode, params, PROMPTS, max_new_tokens=NEW, rows=3, k="auto")
    out = call()
    assert out.tokens == plain()
    assert 0 < out.total.accepted < out.total.proposed
    assert out.total.rounds > out.total.drafting_rounds
    compiled = programs.compile_count()
    assert call().tokens == plain()
    assert programs.compile_count() == compiled


@drafters(quick="draft_model")
def test_the_next_proposal_after_plain_rounds(name):
    """KVR.3, KVR.4, I3: after rounds without drafts a drafter proposes what it proposes after a fresh prefill of the
    committed text, so acceptance does not suffer from a change of width."""
    params, inner = scripted(name), testing.tiny_drafter(model(), name)
    call = calls.plan(params, PROMPTS[:3], max_new_tokens=NEW, prefill_chunk=4, k="auto", rows=3)
    engine = call.engines()[0]
    begun = lambda jobs: prefill_rows(engine, host_state(call.program, jobs), 4)[0]  # noqa: E731
    k, pair = inner.meta.drafter_cfg.k, inner.meta.pair
    propose = jax.jit(lambda p, s: rnd.draft(pair, p, s, k)[0])
    state, compared = begun(call.jobs), 0
    for width, rounds in ((k, 2), (0, 3), (0, 1), (k, 1), (0, 2)):
        state, _ = engine.chunk(state, rounds, Step(width, rounds))
        texts = [state.tokens[b, : int(state.length[b])].tolist() for b in range(3)]
        jobs = [
            dataclasses.replace(job, prompt=np.array(text[:-1], np.int32))
            for job, text in zip(call.jobs, texts, strict=True)
        ]
        fresh = begun(jobs)
        cached = propose((inner.target, params.drafter.inner), state)
        anew = propose((inner.target, params.drafter.inner), fresh)
        for b in range(3):
            n = int(anew.count[b])
            if not state.done[b] and int(fresh.tokens[b, len(texts[b]) - 1]) == texts[b][-1]:
                assert cached.tokens[b, :n].tolist() == anew.tokens[b, :n].tolist()
                compared += n
    assert compared > 0


# ---------------------------------------------------------------- sampling, cuts


def test_the_same_seed_gives_plain_ids(listed):
    """RNG.1, RNG.2: without a rule of the call's own, sampled ids do not depend on widths."""
    params = scripted("dspark")
    call = {"max_new_tokens": NEW, "temperature": 1.5, "seed": 5, "rows": 3}
    drawn = specjax.decode(params, PROMPTS[:3], k="auto", **call)
    assert drawn.tokens == specjax.decode(model(), PROMPTS[:3], **call).tokens
    assert drawn.total.proposed > 0


def test_cuts_of_a_confident_drafter(listed):
    """The least chances of a chunk reach the drafts: no draft above 1, every one at 0."""
    params = testing.tiny_drafter(model(), "dspark")
    listed.setattr(Listed, "order", [(None, 4)])
    found = []
    for cuts in ((0.0,) * 8, (1.1,) * 8):
        listed.setattr(Listed, "cuts", cuts)
        out = specjax.decode(params, PROMPTS[:3], max_new_tokens=NEW, rows=3, k="auto")
        assert out.tokens == plain()[:3]
        found.append(out.total.proposed)
    assert found[0] > 0 == found[1]


def test_cut_is_by_the_chance_of_all():
    """The first draft whose chance together with those before it is too small ends a proposal."""
    sure = jnp.array([[0.9, 0.5, 0.9], [0.4, 0.9, 0.9], [0.9, 0.9, 0.9]])
    proposal = Proposal(jnp.zeros((3, 3), jnp.int32), jnp.array([3, 3, 2]), confidence=sure)
    assert rnd.cut(proposal, jnp.array([0.5, 0.0, 0.5])).count.tolist() == [2, 0, 2]
