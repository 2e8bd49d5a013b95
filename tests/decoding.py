"""What the tests of ``specjax.decode`` share: the call, its one completion, what must agree in it."""

import pytest
from tiny_models import OPTIONS, target, told

import specjax

TOLERANCE = 1e-4  # of a float32 log-probability
HOT = {"temperature": 2.5, "top_k": 40, "top_p": 0.95, "min_p": 0.01}
BOTH = pytest.mark.parametrize("params", [target, told], ids=["plain", "drafted"])


def decode(params, prompt, **options):
    return specjax.decode(params, prompt, **OPTIONS | options)


def only(out):
    """The one completion of a result."""
    ((completion,),) = out.completions
    return completion


def sound(completion):
    """LGP.2: ids, flags, log-probabilities, counters and text all end at the same token."""
    stats, n = completion.stats, len(completion.tokens)
    assert len(completion.drafted) == n == stats.new_tokens
    assert completion.logprobs is None or len(completion.logprobs) == n
    assert stats.emitted == max(n - 1, 0)  # the prefill's token is no round
    assert sum(completion.drafted) == stats.accepted <= stats.proposed
    return completion
