"""The tool that compiles whole programs for AMD GPUs: what it reads and writes, without the compiler."""

import argparse
import json
import zipfile
from importlib import metadata

import jax
import msgpack
import pytest

from specjax.kernels import rocm_round, rocm_rounds, rocm_stubs, rocm_xla

HEADERS = """
Dynamic Section:
  NEEDED               librocblas.so.5
  NEEDED               libamdhip64.so.7
  NEEDED               libc.so.6

Version References:
  required from libamdhip64.so.7:
    0x0f062772 0x00 34 hip_4.2
    0x0f062773 0x00 40 hip_6.0
  required from libc.so.6:
    0x09691a75 0x00 04 GLIBC_2.2.5
"""
SYMBOLS = """
                 U hipMalloc@hip_4.2
                 U hipLaunch@hip_6.0
                 U hipFree@hip_4.2
                 U rocblas_gemm
                 U malloc@GLIBC_2.2.5
                 U _ZTISt9exception
                 w __gmon_start__
"""


def test_stand_ins_have_what_is_asked_for_and_nothing_of_the_system():
    blas, hip = rocm_stubs.wanted(HEADERS, SYMBOLS)
    assert (blas.name, blas.functions, blas.versions) == (
        "librocblas.so.5",
        (("rocblas_gemm", ""),),
        "",
    )
    assert hip.versions == "hip_4.2 { global: hipMalloc; hipFree; };\nhip_6.0 { global: hipLaunch; };\n"
    assert [name in hip.source for name in ("hipLaunch:", "malloc:", "exception")] == [True, False, False]


def test_kernels_of_a_code_object():
    note = {"amdhsa.target": "amdgcn-amd-amdhsa--gfx942", "amdhsa.kernels": [
        {".name": "fusion", ".vgpr_count": 70, ".vgpr_spill_count": 2, ".private_segment_fixed_size": 8,
         ".group_segment_fixed_size": 512}]}  # fmt: skip
    packed = msgpack.packb(note)
    sizes = (8).to_bytes(4, "little") + len(packed).to_bytes(4, "little") + (32).to_bytes(4, "little")
    blob = b"\x7fELF" + sizes + b"AMDGPU\0\0" + packed + b"rest AMDGPU\0\0"
    assert rocm_xla.kernels(blob) == [rocm_xla.Code("fusion", "amdgcn-amd-amdhsa--gfx942", 70, 2, 8, 512)]


def test_calls_in_a_program():
    text = """
  %a = bf16[2] fusion(%p), kind=kLoop
  ROOT %b = f32[2]{0} custom-call(%a), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(f)/x/join/pallas_call"}
  %c = (f32[2], s8[4]) custom-call(%a), custom_call_target="__cublas$lt"
"""  # noqa: E501
    assert rocm_xla.calls(text) == {"pallas": {"join": 1}, "library": {"__cublas$lt": 1}}
    assert rocm_xla.launches(text) == 3


def test_the_plugin_is_taken_out_of_its_wheel_and_kept(tmp_path, monkeypatch):
    def download(folder, version):
        wheel = folder / "x.whl"
        with zipfile.ZipFile(wheel, "w") as files:
            files.writestr("jax_plugins/xla_rocm7/xla_rocm_plugin.so", version)
        return wheel

    monkeypatch.setattr(rocm_round, "_download", download)
    assert rocm_round.plugin(tmp_path, "1.2.3").read_text() == "1.2.3"
    monkeypatch.setattr(rocm_round, "_download", None)  # not asked again
    assert rocm_round.plugin(tmp_path, "1.2.3").exists()
    with zipfile.ZipFile(tmp_path / "y.whl", "w") as files:
        files.writestr("other", "")
    with pytest.raises(OSError, match=r"y\.whl holds no xla_rocm_plugin\.so"):
        rocm_round.unpack(tmp_path / "y.whl", tmp_path / "out")
    assert metadata.version("jaxlib").startswith(rocm_round.release())


def test_what_is_said_of_failures(tmp_path, monkeypatch, capsys):
    died = "I0000 hello\nF0000 12:00 Check failed: size > 0\nAborted"
    assert rocm_round.failure(died, -6) == "F0000 12:00 Check failed: size > 0 (signal 6)"
    assert rocm_round.failure("", 1) == "no message (exit status 1)"
    monkeypatch.setattr(rocm_round.platform, "machine", lambda: "riscv64")
    assert rocm_round.main([]) == 2
    assert "riscv64" in capsys.readouterr().err
    monkeypatch.setattr(rocm_round, "missing", list)
    assert rocm_round.main(["--only", "nobody"]) == 2
    assert "unknown drafter(s) ['nobody']" in capsys.readouterr().err


def test_results_are_kept_as_they_come(tmp_path):
    args = argparse.Namespace(out=tmp_path / "a" / "b.json", rows=2, prompt=512)
    rocm_round._write(args, "0.10.2", [{"drafter": "plain", "compiled": False, "error": "no"}])
    kept = json.loads(args.out.read_text())
    assert kept["versions"]["jax-rocm7-pjrt"] == "0.10.2"
    assert kept["results"][0]["error"] == "no"
    about = {"drafter": "plain", "chip": "gfx942", "program": "decode", "kernels_setting": "auto"}
    assert rocm_round.line(about | {"compiled": False, "error": "no"}).endswith("FAILED: no")


@pytest.mark.parametrize("name", ["plain", "assistant", pytest.param("chain", marks=pytest.mark.long)])
def test_rounds_have_real_shapes_and_no_weights(name):
    parts = rocm_rounds.parts(rocm_rounds.ROUNDS[name], 2, 64, "decode")
    assert callable(parts.function)
    assert {type(x).__name__ for x in jax.tree.leaves(parts.shapes)} == {"ShapeDtypeStruct"}
