"""Random calls: batch, budgets, stops, options and driving drawn together; drafted equals plain, streamed whole.

Every sampling option is on in every sampled call, so that the calls share their programs.
"""

import random

import numpy as np
import pytest
from tiny_models import PROMPTS, VOCAB, ngram_params, target, told

import specjax

HOT = {
    "temperature": (1.7, 0.0),
    "top_k": (60, 0),
    "top_p": (0.97, 1.0),
    "min_p": (0.001, 0.0),
    "repetition_penalty": (1.05, 1.0),
    "presence_penalty": (0.1, 0.0),
    "frequency_penalty": (0.1, 0.0),
}
DRAFTERS = {
    "ngram": ngram_params,
    "told": told,
    "any number": lambda: told("RANDOM_COUNT"),
    "stateful": lambda: told("EVERY_THIRD_WRONG", "WITNESS"),
}


def drawn(rng):
    """Prompts and options of a call."""
    n = rng.choice([1, 3, 5])
    prompts = [some_prompt(rng) for _ in range(n)]
    budget = [0, 1, 2, 3, 7, 20, 33]
    options = {"max_len": 64, "logprobs": True, "rows": 3, "loop": rng.choice(["device", "device", "host"])}
    options["max_new_tokens"] = [rng.choice(budget) for _ in range(n)] if rng.random() < 0.6 else 33
    options |= {"rounds": rng.choice([1, 2, 5, 16]), "prefill_chunk": rng.choice([16, 512])}
    if rng.random() < 0.6:  # the first row keeps every option compiled in
        options |= {
            name: [on, *(rng.choice([on, off]) for _ in prompts[1:])] for name, (on, off) in HOT.items()
        }
        options |= {"seed": [rng.randrange(100) for _ in prompts], "rule": "match", "logit_bias": {75: 0.5}}
    if rng.random() < 0.4:
        options["stop"] = rng.sample([75, 79, 263, 260, "he", "ll2", "b", " ", "!o"], 2)
    return prompts, options


def some_prompt(rng):
    own = [rng.randrange(4, VOCAB) for _ in range(rng.choice([1, 3, 15, 16, 17, 20]))]
    return rng.choice([rng.choice(PROMPTS), own, rng.choice(["hello", "a", "12 c!"])])


@pytest.mark.long
@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)
@pytest.mark.parametrize("seed", range(40))
def test_random_calls(drafter, seed):
    """GRD.1, BAT.1, STP.5, LGP.1, LGP.2, I7."""
    prompts, options = drawn(random.Random(seed))
    plain = specjax.decode(target(), prompts, **options)
    out = specjax.decode(drafter(), prompts, **options)
    assert (out.tokens, out.text, out.finish_reason) == (plain.tokens, plain.text, plain.finish_reason)
    pieces = list(specjax.stream(drafter(), prompts, **options))
    for index, ((a,), (b,)) in enumerate(zip(plain.completions, out.completions, strict=True)):
        np.testing.assert_allclose(b.logprobs, a.logprobs, atol=2e-4)
        own = [p for p in pieces if p.index == index]
        assert [t for p in own for t in p.tokens] == b.tokens
        assert "".join(p.text for p in own) == b.text
        assert own[-1].finish_reason == b.finish_reason
        assert len(b.drafted) == len(b.tokens) == b.stats.new_tokens
        assert sum(b.drafted) == b.stats.accepted
