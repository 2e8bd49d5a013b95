"""Logits that are not finite: never sampled from, reported with their position, and harmless in a draft."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import CONTEXT, OPTIONS, PROMPTS, greedy, ngram_params, target, told

import specjax
from specjax import testing

NAN, INF = float("nan"), float("inf")


def broken(params, where, value):
    """The params with one value of the weights replaced."""
    weights = params.target
    if where == "head":
        return params.replace(target=weights.replace(head=weights.head.at[75, 0].set(value)))
    return params.replace(target=weights.replace(embed=weights.embed.at[where].set(value)))


def fails(message, call):
    with pytest.raises(FloatingPointError, match=message):
        call()


RUNS = pytest.mark.parametrize("params", [target, told, ngram_params], ids=["plain", "told", "ngram"])


@RUNS
@pytest.mark.parametrize("value", [NAN, INF])
def test_weights_that_are_not_finite(params, value):
    """NUM.1: never sampled from; the error names prompt and position, greedy, sampled and streamed."""
    bad = broken(params(), "head", value)
    # an infinite weight makes logits of either sign: -inf only forbids a token
    wanted = "not finite for prompt 0 at position " + ("6;" if value != INF else "[0-9]+;")
    fails(wanted, lambda: specjax.decode(bad, PROMPTS[0], **OPTIONS))
    fails(wanted, lambda: list(specjax.stream(bad, PROMPTS[0], **OPTIONS)))
    hot = OPTIONS | {"temperature": 1.0}
    fails(wanted, lambda: specjax.decode(bad, PROMPTS[0], **hot))
    fails("position", lambda: specjax.chat(bad, **OPTIONS).send("a"))


@RUNS
def test_a_token_that_breaks_the_model(params):
    """NUM.1: tokens before it come out right in a stream, then the error names the position after it."""
    prompt = PROMPTS[4]
    tokens = greedy(prompt, 40)[0]
    at = next(i for i, t in enumerate(tokens) if t not in prompt + tokens[:i] and i > 8)
    bad, seen = broken(params(), tokens[at], NAN), []

    def run():
        for piece in specjax.stream(bad, prompt, **OPTIONS):
            seen.extend(piece.tokens)

    fails(f"at position {len(prompt) + at + 1}", run)
    assert seen == tokens[: len(seen)]
    assert len(seen) >= at - 4


def test_a_draft_that_breaks_the_model_is_only_a_wrong_draft():
    """NUM.1, KVR.2: a token whose embedding is NaN may be proposed and refused without a trace."""
    prompt, mine = PROMPTS[0], greedy(PROMPTS[0], 40)[0]
    bad = 5  # never spoken
    for at in (0, 2):
        weights = testing.telling([(prompt, mine)], "STOP_INSIDE", size=CONTEXT, texts=8, stop=bad, at=at)
        params = broken(told().replace(drafter=weights), bad, NAN)
        out = specjax.decode(params, prompt, **OPTIONS)
        assert out.tokens == mine
        assert out.stats.proposed > 0
        assert np.isfinite(out.logprobs).all()


def test_overflowing_weights_raise():
    """NUM.1: float16 weights whose logits overflow are reported, not sampled from."""
    big = target().replace(target=jax.tree.map(lambda x: x * 300, target().target))
    half = specjax.cast(big, jnp.float16)
    fails("float32", lambda: specjax.decode(half, PROMPTS[0], max_new_tokens=3))
