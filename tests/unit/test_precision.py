"""Low precision: what has which type, and that no weight is copied to a wider one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import PROMPTS, ngram_params, target, told

import specjax
from specjax.core import round as rnd

PARAMS = {"plain": target, "ngram": ngram_params, "told": told, "stateful": lambda: told(drafter="WITNESS")}
EACH = pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@EACH
def test_every_type_decodes(params, dtype):
    """NUM.2: weights, caches and activations have the type asked for, scores are float32; the ids are plain
    decoding's up to the near-ties of the type."""
    params = specjax.cast(params(), dtype)
    state = specjax.start(params, PROMPTS[:2], max_new_tokens=12)
    assert {x.dtype.name for x in jax.tree.leaves(state.target)} == {dtype}
    shapes = jax.eval_shape(
        lambda p, s: specjax.verify_step(p, *proposed(p, s), logprobs=True)[1], params, state
    )
    assert shapes.logprobs.dtype == jnp.float32
    if params.meta.drafter is None:
        out = specjax.decode(params, PROMPTS[:2], max_new_tokens=12)
        assert [len(tokens) for tokens in out.tokens] == [12, 12]
        return
    report = specjax.audit(params, PROMPTS[:2], max_new_tokens=12)
    assert report.dtype == dtype
    assert report.speculative.new_tokens == 24
    assert all(row.identical or row.gap <= 0.5 for row in report.rows)  # two steps of logits near 40


def proposed(params, state):
    proposal, state = specjax.draft_step(params, state)
    return state, proposal


def operations(jaxpr):
    """Every operation of a program, those inside loops and calls included."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")):
            if hasattr(value, "jaxpr"):
                yield from operations(getattr(value.jaxpr, "jaxpr", value.jaxpr))


def widened(fn, params, *args):
    """Shapes of weights that a program turns into a wider type as a whole."""
    weights = {x.shape for x in jax.tree.leaves(params.target) if x.ndim > 1}
    found = []
    for eqn in operations(jax.make_jaxpr(fn)(params, *args).jaxpr):
        if eqn.primitive.name == "convert_element_type":
            old, new = eqn.invars[0].aval, eqn.outvars[0].aval
            if old.shape in weights and new.dtype.itemsize > old.dtype.itemsize:
                found.append(old.shape)
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@EACH
def test_no_weight_is_promoted(params, dtype):
    """NUM.2: neither in a round nor in a prefill is a whole weight array made wider; and the check can fail."""
    params = specjax.cast(params(), dtype)
    state = specjax.start(params, PROMPTS[:2], max_new_tokens=12)
    pair = params.meta.pair
    feed = lambda p, s: rnd.prefill(pair, (p.target, p.drafter), s, jnp.zeros(2, jnp.int32), 16)  # noqa: E731
    assert widened(lambda p, s: specjax.verify_step(p, *proposed(p, s)), params, state) == []
    assert widened(feed, params, state) == []
    promoted = widened(lambda p: p.target.embed.astype(jnp.float32)[0], params)
    assert promoted == [np.shape(params.target.embed)]
