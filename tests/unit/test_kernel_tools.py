"""The self-check of kernels, a try of their benchmark, and a tuner that outlives a candidate that crashes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from specjax.kernels import check, dispatch

FOLDER = Path(__file__).parents[2] / "benchmarks"


def run(script, *options):
    command = [sys.executable, str(FOLDER / script), *options]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout


@pytest.mark.long
def test_the_tuner_goes_on_after_a_crash(tmp_path):
    """KRN.2."""
    small = {"size": 16, "heads": 2, "groups": 1, "rows": 1, "slots": 64, "batch": 1, "most": 3, "crash": 1}
    small = [word for name, value in small.items() for word in (f"--{name}", str(value))]
    said = run("tune_kernels.py", "attention", "--tiny", *small, "--out", str(tmp_path / "tuned.json"))
    assert "2 of 3 ran" in said
    first, second, third = json.loads((tmp_path / "tuned.json").read_text())["results"]
    assert "microseconds" in first
    assert "microseconds" in third
    assert "the process ended" in second["error"]


@pytest.mark.long
def test_the_benchmark_goes_on_where_it_stopped(tmp_path):
    out = tmp_path / "kernels.json"
    options = "--tiny", "--rounds", "1", "--runs", "1", "--out", str(out)
    assert "attention" not in run("kernels.py", *options, "--only", "injection").split("errors:")[1]
    said = run("kernels.py", *options)
    assert "injection T1:" not in said
    assert "attention S64 B1 N4: floor" in said
    assert len(json.loads(out.read_text())["results"]) == 6


def test_a_kernel_that_fails_its_check_is_switched_off(monkeypatch):
    """KRN.6."""
    assert check.self_check() == {}  # on a CPU no kernel runs
    monkeypatch.setattr(dispatch.platform, "backend", lambda: "cuda")
    monkeypatch.setattr(dispatch, "_disabled", {})
    monkeypatch.setattr(check, "CHECKS", {"block_attention": lambda: 0.3, "kv_injection": lambda: 1e-3})
    with pytest.warns(
        UserWarning, match="kernel block_attention is switched off by its self-check: relative error"
    ):
        assert check.self_check() == {"block_attention": 0.3, "kv_injection": 1e-3}
    assert "switched off by its self-check" in dispatch.explain("block_attention").reason
    assert dispatch.explain("kv_injection").implementation == "kernel"


@pytest.mark.gpu
def test_the_self_check_on_the_device():
    """KRN.6."""
    assert set(check.self_check()) == set(check.CHECKS)
    assert check.main() == 0
