"""Drafters of every kind after a short run: what they have learned, and that training measures it as decoding does."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from packing import packed

import specjax
from specjax import registry, testing
from specjax.train import evaluate, features, methods, step
from specjax.types import Pair, Params

NEW, PROMPT = 40, 5
BLOCK = {"mask_id": 63, "layers": 2, "drafts": 4}
#: method, settings, steps, learning rate, changes of the recipe.
CASES: dict[str, tuple[str, dict[str, Any], int, float, dict[str, Any]]] = {
    "eagle3": ("eagle3", {"k": 4}, 90, 1e-2, {"unroll": 4}),
    "mtp": ("mtp", {"k": 4}, 60, 1e-2, {"unroll": 4}),
    "assistant": ("assistant", {"k": 4}, 120, 1e-2, {"unroll": 4}),
    "dflash": ("dflash", BLOCK | {"layout": "fill"}, 120, 1e-2, {"anchors": 40}),
    "dspark": ("dspark", BLOCK, 60, 2e-2, {"anchors": 40}),
    "dspark, rnn": ("dspark", BLOCK | {"markov_kind": "rnn"}, 120, 1e-2, {"anchors": 40}),
}
#: Share of rounds that keep the draft at each position, which a drafter of so few texts is beyond.
FLOOR = (0.8, 0.8, 0.8, 0.8)


@functools.cache
def target() -> tuple[Params, list[list[int]], list[list[int]]]:
    """A target of 64 tokens, prompts, and its answers; the first ends in a stop, the others where the budget ends."""
    p = testing.tiny_params(2, vocab=64)
    asked = [[int(t) for t in row] for row in np.random.default_rng(0).integers(0, 63, (3, PROMPT))]
    said = specjax.decode(p, asked, max_new_tokens=NEW, ignore_eos=True).tokens
    stop = next(
        t for i, t in reversed(list(enumerate(said[0]))) if said[0].index(t) == i and t not in said[1]
    )
    p = p.replace(meta=dataclasses.replace(p.meta, eos_ids=(stop,)))
    return p, asked, specjax.decode(p, asked, max_new_tokens=NEW).tokens


def trained(name: str) -> tuple[list[float], Params]:
    """Losses, and the target with a drafter that has seen little else than its answers."""
    p, asked, said = target()
    method, settings, steps, rate, changes = CASES[name]
    batch = packed([[(a + b, PROMPT)] for a, b in zip(asked, said, strict=True)], NEW + 7)
    how = methods.method(method)
    cfg = how.config(settings, p.meta.target_cfg)
    pair = Pair(p.meta.family, p.meta.target_cfg, method, cfg)
    recipe = how.recipe(
        steps=steps,
        rows=3,
        length=NEW + 7,
        learning_rate=rate,
        optimizer="adamw",
        dtype="float32",
        chunks=1,
        terms=(("ce", 1.0),),
        **changes,
    )
    lent = registry.target(p.meta.family).shared(p.target, p.meta.target_cfg)
    state = step.start(how.init(cfg, p.target, lent, jax.random.key(0)), how.frozen(cfg), recipe)
    one, _ = step.compiled(step.Step(pair, recipe))
    given = jax.jit(lambda t: features.extract(t, pair, batch, how.needs(cfg)))(p.target)
    losses = []
    for _ in range(steps):
        state, found = one(state, p.target, batch, given)
        losses.append(float(found["loss"][0] / found["loss"][1]))
    meta = dataclasses.replace(p.meta, drafter=method, drafter_cfg=cfg)
    return losses, p.replace(drafter=step.weights_of(state, "float32"), meta=meta)


@pytest.mark.parametrize(
    "name", [c if c == "dspark" else pytest.param(c, marks=pytest.mark.long) for c in CASES]
)
def test_a_short_run_pays(name):
    """PEER.18: after some steps on three texts nearly all drafts are accepted, at every position. TRD.4: training's
    measure of acceptance is decoding's, to the draft."""
    losses, params = trained(name)
    _, asked, said = target()
    assert np.mean(losses[-5:]) < 0.5 * np.mean(losses[:5])
    out = specjax.decode(params, asked, max_new_tokens=NEW, k=4)
    assert out.tokens == said
    assert set(out.finish_reason) == {"stop", "length"}
    ours = evaluate.of_texts(params, list(zip(asked, said, strict=True)), 4, budget=NEW, rows=2)
    for training, decoding in zip(ours, out.stats, strict=True):
        assert training.accepted_at == decoding.accepted_at
        assert training.proposed_at == decoding.proposed_at
        assert (training.rounds, training.emitted) == (decoding.rounds, decoding.emitted)
    assert all(a > b for a, b in zip(out.total.accepted_per_position, FLOOR, strict=True))


def test_texts_that_cannot_be_measured():
    p, asked, said = target()
    cfg = methods.method("eagle3").config({"k": 4}, p.meta.target_cfg)
    p = p.replace(meta=dataclasses.replace(p.meta, drafter="eagle3", drafter_cfg=cfg))
    with pytest.raises(ValueError, match="text 1 has a prompt or an answer without tokens"):
        evaluate.of_texts(p, [(asked[0], said[0]), (asked[1], [])])
    with pytest.raises(ValueError, match="beyond the"):
        evaluate.of_texts(p, [(asked[0], said[0] * 100)])
    p = p.replace(meta=dataclasses.replace(p.meta, drafter="ngram"))
    with pytest.raises(ValueError, match="no training method for drafters of kind 'ngram'"):
        evaluate.of_texts(p, [(asked[0], said[0])])
