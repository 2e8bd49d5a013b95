"""Bytes told before a call against the bytes of its arrays and the compiler's own figures."""

import json

import jax
import pytest
import tiny_files
from typer.testing import CliRunner

import specjax
from specjax import cli, config, testing
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


@pytest.mark.parametrize("name", ["tiny", "saved", "folder"])
def test_shapes_are_enough(tmp_path, name):
    """PRF.5: the same figures without reading or allocating a weight."""
    if name == "saved":
        specjax.save(testing.tiny_drafter(testing.tiny_params(), "draft_model"), tmp_path / "saved")
    if name == "folder":
        hf = tiny_files.config()
        tiny_files.folder(tmp_path / "folder", hf, tiny_files.tensors(hf))
    where = name if name == "tiny" else tmp_path / name
    real, shapes = (specjax.load(where, shapes_only=only, verbose=False) for only in (False, True))
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(shapes))
    told = specjax.explain(shapes, [1, 2, 3], max_new_tokens=8)
    assert told == specjax.explain(real, [1, 2, 3], max_new_tokens=8)
    with pytest.raises(ValueError, match="shapes only"):
        specjax.decode(shapes, [1, 2, 3], max_new_tokens=8)


def test_on_the_command_line():
    """PRF.5: ``specjax explain`` allocates nothing and takes rows, lengths and widths."""
    run = CliRunner().invoke(
        cli.app,
        [
            "explain",
            "tiny",
            "--drafter",
            "ngram",
            "--rows",
            "3",
            "--prompt-tokens",
            "20",
            "-k",
            "2",
            "--json",
        ],
    )
    assert run.exit_code == 0, run.output
    told = json.loads(run.stdout)
    assert told["program"]["rows"] == 3
    assert told["program"]["k"] == 2
    assert told["prompt_tokens"] == [20, 20, 20]
    assert told["total_bytes"] > told["target_bytes"] > 0


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("method", ["fp8", "awq", "gptq", "compressed-tensors"])
def test_quantised_targets_are_refused_by_name(tmp_path, key, method):
    """NUM.3: before any weight is read."""
    hf = tiny_files.config()
    tiny_files.folder(tmp_path / "m", hf | {key: {"quant_method": method}}, tiny_files.tensors(hf))
    with pytest.raises(ValueError, match=f"quantised with '{method}'"):
        specjax.load(tmp_path / "m", verbose=False)
