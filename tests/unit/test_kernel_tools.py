"""The self-check of kernels, a try of their benchmark, and a tuner that outlives a candidate that crashes."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specjax import cli, registry, selftest
from specjax.kernels import check, check_cases, dispatch

FOLDER = Path(__file__).parents[2] / "benchmarks"


def run(script, *options):
    command = [sys.executable, str(FOLDER / script), *options]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=1800).stdout


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
    assert {case.op for case in check_cases.small()} == set(dispatch.KERNELS)  # none goes unchecked
    errors = {"block_attention": 0.3, "kv_injection": 1e-3}

    def case(op):
        return check_cases.Case(
            op, "told", tuple, lambda want: tuple, lambda _: lambda _: errors[op], None, lambda _: 0
        )

    monkeypatch.setattr(dispatch.platform, "backend", lambda: "cuda")
    monkeypatch.setattr(dispatch, "_disabled", {})
    monkeypatch.setattr(check_cases, "small", lambda: [case(op) for op in errors])
    with pytest.warns(
        UserWarning, match="kernel block_attention is switched off by its self-check: relative error"
    ):
        assert check.self_check() == errors
    assert "switched off by its self-check" in dispatch.explain("block_attention").reason
    assert dispatch.explain("kv_injection").implementation == "kernel"


@pytest.mark.gpu
def test_the_self_check_on_the_device():
    """KRN.6."""
    assert set(check.self_check()) >= set(dispatch.KERNELS) - {"packed_attention"}  # which is NVIDIA's


def test_what_a_report_of_the_selftest_says(monkeypatch, tmp_path):
    """A kernel that is wrong, one that ends in an error and one that cannot run here; kept as it is found."""
    monkeypatch.setattr(selftest, "decoded", lambda dtype, prompts, names: [selftest.Decoded("none", dtype)])
    case = check_cases.Case(
        "skinny", "told", tuple, lambda want: tuple, lambda _: lambda _: 0.5, None, lambda _: 0
    )
    broken = dataclasses.replace(case, name="broken", arrays=lambda: 1 / 0)
    cases = [case, broken, dataclasses.replace(case, op="packed_attention")]
    monkeypatch.setattr(check_cases, "small", lambda: cases)
    said, file = [], tmp_path / "report.json"
    assert selftest.start(file, say=said.append) == 1
    text = "\n".join(said)
    assert "never on AMD" in text
    assert "skinny, told: FAILED: relative error 5.0e-01 where 1e-02 is allowed" in text
    assert "skinny, broken: FAILED: ZeroDivisionError: division by zero" in text
    assert "packed_attention, told: skipped: cuDNN" in text
    assert "FAILED: 2 of 3 cases of kernels, 1 decodes" in text
    kept = json.loads(file.read_text())
    assert (kept["passed"], len(kept["failures"]), kept["machine"]["backend"]) == (False, 2, "cpu")
    monkeypatch.setattr(check_cases, "small", lambda: cases[2:])
    assert CliRunner().invoke(cli.app, ["selftest", "--quick"]).exit_code == 0


@pytest.mark.long
def test_the_selftest_passes_on_a_cpu():
    """KRN.3, KRN.6: every kernel interpreted, every drafter gives plain ids, which are those of the table."""
    report = selftest.run()
    assert report.passed, report
    assert {x.drafter for x in report.decoded} == {"none", *registry.DRAFTERS} - {"chain"}
    assert {x.op for x in report.kernels if not x.skipped} == set(dispatch.KERNELS) - {"packed_attention"}
