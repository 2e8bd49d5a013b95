"""Kernels for GPUs that are not there: the same program for ROCm and CUDA, which AMD's and NVIDIA's compilers take."""

import dataclasses

import pytest

from specjax.kernels import rocm, rocm_cases

CASES = {case.name: case for case in rocm_cases.cases()}


@pytest.mark.parametrize(
    "name", ["attention window and soft cap", pytest.param("injection of 8", marks=pytest.mark.long)]
)
def test_platforms_get_the_same_program(name):
    """Up to names of mathematical functions: what runs on NVIDIA tests what AMD gets."""
    case = CASES[name]
    assert rocm.unequal(case) == []
    assert {k.name for k in rocm.kernels(*case.make("gfx942"))} == set(case.kernels)


def test_what_a_report_complains_about():
    fine = rocm.Report("case", "kernel", "gfx942", 4, 200, 0, 0, 64 * 1024, (("v_mfma", 1),))
    assert fine.problems(matrix=True) == []
    said = lambda **changes: " ".join(dataclasses.replace(fine, **changes).problems(matrix=True))  # noqa: E731
    assert "3 registers spilled" in said(spilled=3)
    assert "65537 bytes of local memory, 65536 are there" in said(local=65537)  # KRN.1
    assert "more than 1024 threads" in said(warps=17)  # KRN.4
    assert "no matrix instructions" in said(matrix=())
    assert "does not compile: no" in said(error="no")


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_kernels_compile(name):
    """KRN.1, KRN.4: no spilled registers, local memory that is there, products on matrix units. Every kernel for the
    chip with the least local memory, every third one for all chips; ``make rocm-check`` compiles each for each."""
    chips = tuple(rocm.ARCHS) if list(CASES).index(name) % 3 == 0 else ("gfx942",)
    assert rocm.check(CASES[name], chips) == []
