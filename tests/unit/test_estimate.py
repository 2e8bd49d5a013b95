"""Bytes told before a call against the bytes of its arrays and the compiler's own figures."""

import pytest

import specjax
from specjax import config, testing
from specjax.core import accept, programs

SHAPES = {
    "a long prompt": ({"rows": 4, "max_new_tokens": 100}, 400, {"vocab": 64, "width": 32}),
    "sampled": ({"rows": 8, "max_new_tokens": 50, "temperature": 1.0, "top_p": 0.9}, 20, {"vocab": 30_000}),
    "drafted": ({"rows": 4, "k": 7, "max_new_tokens": 50}, 20, {"vocab": 30_000}),
}


@pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES)
def test_within_five_percent_of_what_is_allocated(case):
    """PRF.5: weights, caches and temporaries of the largest program, before anything exists."""
    options, length, sizes = case
    params = testing.tiny_params(**{"max_positions": 1024} | sizes)
    if "k" in options:
        params = testing.tiny_drafter(params, "ngram")
    prompts = [[i % 60 for i in range(length)]] * options["rows"]
    before = programs.compile_count()
    told = specjax.explain(params, prompts, **options)
    assert programs.compile_count() == before
    exact = specjax.explain(params, prompts, compile=True, **options)
    assert programs.compile_count() == before + 2
    assert abs(told.total_bytes / exact.total_bytes - 1) < 0.05
    assert "estimated" in str(told)
    assert "compiled" in str(exact)


def test_compiled_programs_serve_the_call():
    """PRF.4: explaining with compile=True is a warm-up, not waste."""
    params = testing.tiny_params(seed=9, intermediate_size=72)
    specjax.explain(params, [1, 2, 3], compile=True, max_new_tokens=8)
    before = programs.compile_count()
    specjax.decode(params, [1, 2, 3], max_new_tokens=8)
    assert programs.compile_count() == before + 1  # the empty state


def test_large_batches_are_bounded(monkeypatch):
    """PRF.8: logits of verification and scores of prefill stay under their limits, whatever the batch."""
    params = testing.tiny_params(vocab=30_000, max_positions=1024)
    prompts, options = [list(range(1, 200))] * 64, {"rows": 64, "max_new_tokens": 300, "verbose": False}
    free = specjax.explain(params, prompts, **options)
    monkeypatch.setattr(config, "SCORE_BYTES", 2**24)
    assert free.prefill_width == 256
    small = specjax.explain(params, prompts, **options)
    assert small.prefill_width == 16
    assert small.transient_bytes < 2 * 2**24 + accept.LOGIT_BYTES
    monkeypatch.setattr(config, "SCORE_BYTES", 1)
    assert specjax.explain(params, prompts, **options).prefill_width == config.PREFILL_MIN


@pytest.mark.real
@pytest.mark.long
def test_a_real_model():
    """PRF.5: SmolLM2 in float32, a batch with long rows."""
    params = specjax.load("smollm2-135m", drafter="ngram", dtype="float32", verbose=False)
    prompts, options = [list(range(5, 405))] * 4, {"max_new_tokens": 300, "verbose": False}
    told = specjax.explain(params, prompts, **options)
    exact = specjax.explain(params, prompts, compile=True, **options)
    assert abs(told.total_bytes / exact.total_bytes - 1) < 0.05
