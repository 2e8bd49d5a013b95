"""Kernels compiled for GPUs that are not there: ``python -m specjax.kernels.rocm`` (``make rocm-check``).

A jitted function is lowered for platform ``rocm`` or ``cuda`` without a device. Each of its Pallas-Triton kernels then
is a custom call that carries Triton's intermediate code, which the package ``triton`` compiles to machine code of
gfx942 (MI300X), gfx950 (MI355X) or sm_90 (H100, H200). What comes out says whether registers are spilled, how much
local memory a program has, and whether products run on matrix units. Since the code for both platforms is the same but
for names of mathematical functions, a run on NVIDIA tests the program that AMD gets. Speed, rounding and faults on AMD
are not seen this way.
"""

import argparse
import collections
import contextlib
import dataclasses
import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from specjax.kernels import configs
from specjax.kernels.building import compiling, told

TARGET = "__gpu$xla.gpu.triton"
#: Platform, and the matrix instructions of its assembly.
ARCHS = {
    "gfx942": ("rocm", r"\bv_mfma_\w+"),
    "gfx950": ("rocm", r"\bv_mfma_\w+"),
    "sm_90": ("cuda", r"\b(?:wgmma\.mma_async|mma\.sync)\.[\w.]+"),
}
_EXTERN = re.compile(r'symbol = "(?:__nv_|__ocml_)(\w+?)(?:_f32|f)?"')


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel in Triton's intermediate code, as text."""

    name: str
    code: str
    warps: int
    stages: int
    grid: tuple[int, int, int]

    @property
    def neutral(self) -> str:
        """The code without what tells platforms apart: names of mathematical functions."""
        return _EXTERN.sub(r'symbol = "\1"', self.code)


@dataclasses.dataclass(frozen=True)
class Report:
    """A kernel compiled for one chip. Sizes are bytes; ``registers`` and ``spilled`` are per lane, AMD's of vectors."""

    case: str
    kernel: str
    chip: str
    warps: int
    registers: int = 0
    spilled: int = 0
    scratch: int = 0
    local: int = 0
    matrix: tuple[tuple[str, int], ...] = ()
    error: str = ""

    def problems(self, matrix: bool, scratch: int = 0) -> list[str]:
        """What is wrong with it; ``matrix``: it should run on matrix units; ``scratch``: bytes that it may spill."""
        if self.error:
            return [f"does not compile: {self.error}"]
        found, chip = [], configs.CHIPS[self.chip]
        if self.spilled or self.scratch > scratch:
            found.append(f"{self.spilled} registers spilled, {self.scratch} bytes of scratch")
        if self.local > chip.local:
            found.append(f"{self.local} bytes of local memory, {chip.local} are there")
        if self.warps * chip.lanes > 1024:
            found.append(f"{self.warps} warps of {chip.lanes} lanes are more than 1024 threads")
        if matrix and not self.matrix:
            found.append("no matrix instructions")
        return found

    def __str__(self) -> str:
        used = " ".join(f"{name} x{n}" for name, n in self.matrix) or "no matrix instructions"
        return (
            f"{self.chip} {self.kernel}: {self.registers} registers, {self.spilled} spilled, "
            f"{self.scratch} bytes of scratch, {self.local} local, {self.warps} warps, {used}"
        )


def kernels(fn: Callable, *shapes, platform: str = "rocm", chip: str = "gfx942") -> list[Kernel]:
    """The distinct kernels of ``fn`` at these shapes, lowered for a platform; no device is needed."""
    with device(chip), compiling():
        lowered = jax.jit(fn).trace(*shapes).lower(lowering_platforms=(platform,))
    found: dict[tuple, Kernel] = {}
    for op in walk(lowered.compiler_ir("stablehlo").operation):
        if op.name == "stablehlo.custom_call" and _text(op.attributes["call_target_name"]) == TARGET:
            kernel, key = _kernel(op.attributes["mhlo.backend_config"])
            found.setdefault(key, kernel)
    return list(found.values())


def compiled(kernel: Kernel, chip: str, case: str = "") -> Report:
    """Compile for a chip with the package ``triton``; errors of the compiler are part of the report."""
    import triton

    platform, pattern = ARCHS[chip]
    base = Report(case, kernel.name, chip, kernel.warps)
    options = {"num_warps": kernel.warps, "num_stages": kernel.stages}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{kernel.name}.ttir"
        path.write_text(kernel.code)
        try:
            target = _simplify(path, chip, options)
            binary = triton.compile(str(path), target=target, options=options)
        except Exception as error:  # of any part of the compiler: reported, the other kernels go on
            return dataclasses.replace(base, error=told(error))
    code = binary.asm["amdgcn" if platform == "rocm" else "ptx"]
    figures = _amd(code) if platform == "rocm" else _nvidia(binary.asm["cubin"])
    count = collections.Counter(re.findall(pattern, code))
    return dataclasses.replace(
        base, local=binary.metadata.shared, matrix=tuple(sorted(count.items())), **figures
    )


def _simplify(path: Path, chip: str, options: dict):
    """Run the compiler's first stage on a file, in place, as XLA does: ``triton.compile`` leaves it out for files. It
    makes sums part of products, without which a kernel needs more registers. Returns the target."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget, Language
    from triton.compiler import make_backend

    target = GPUTarget("hip", chip, 64) if chip.startswith("gfx") else GPUTarget("cuda", int(chip[3:]), 32)
    backend, context = make_backend(target), ir.context()
    stages: dict[str, Callable] = {}
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = ir.parse_mlir_module(str(path), context)
    module.context = context
    backend.add_stages(stages, backend.parse_options(options), Language.TRITON)
    path.write_text(str(stages["ttir"](module, {})))
    return target


def _amd(code: str) -> dict[str, int]:
    number = lambda key: int(re.findall(rf"\.{key}:\s+(\d+)", code)[0])  # noqa: E731
    return {
        "registers": number("vgpr_count"),  # with those of accumulators
        "spilled": number("vgpr_spill_count"),
        "scratch": number("private_segment_fixed_size"),
    }


def _nvidia(cubin: bytes) -> dict[str, int]:
    """Registers and bytes of stack from the attributes of the binary (EIATTR_REGCOUNT, EIATTR_FRAME_SIZE)."""
    found = {0x2F: 0, 0x11: 0}
    for kind in found:
        at = cubin.find(bytes((0x04, kind, 0x08, 0x00)))
        if at >= 0:
            found[kind] = int.from_bytes(cubin[at + 8 : at + 12], "little")
    return {"registers": found[0x2F], "scratch": found[0x11]}


def device(chip: str) -> contextlib.AbstractContextManager:
    """jax 0.11 and newer want to be told which GPU they lower for."""
    if not hasattr(jax.sharding, "AbstractDevice"):
        return contextlib.nullcontext()
    name = chip if chip.startswith("gfx") else "NVIDIA H200"
    device = jax.sharding.AbstractDevice(device_kind=name, num_cores=None, platform="gpu")
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((1,), ("x",), axis_types=auto, abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def walk(op) -> Iterator:
    """All operations inside of one."""
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from walk(inner.operation)


def _kernel(config) -> tuple[Kernel, tuple]:
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir
    from jaxlib.triton import dialect

    config = ir.DictAttr(config)
    number = lambda key: ir.IntegerAttr(config[key]).value  # noqa: E731
    code = ir.StringAttr(config["ir"]).value_bytes  # bytecode; triton takes text only
    context = mlir.make_ir_context()
    dialect.register_dialect(context)
    with context, ir.Location.unknown():
        text = ir.Module.parse(code).operation.get_asm(enable_debug_info=False)
    grid = (number("grid_x"), number("grid_y"), number("grid_z"))
    kernel = Kernel(_text(config["name"]), text, number("num_warps"), number("num_stages"), grid)
    return kernel, (hashlib.sha256(code).digest(), kernel.warps, kernel.stages)


def _text(attribute) -> str:
    from jax._src.lib.mlir import ir

    return ir.StringAttr(attribute).value


def check(case, chips: tuple[str, ...] = tuple(ARCHS), say: Callable = print) -> list[str]:
    """Problems of one case of :mod:`specjax.kernels.rocm_cases` on every chip, and where platforms differ."""
    found = []
    lowered = {chip: kernels(*case.make(chip), platform=ARCHS[chip][0], chip=chip) for chip in chips}
    for chip, list_of in lowered.items():
        if {k.name for k in list_of} != set(case.kernels):
            found.append(
                f"{case.name} {chip}: kernels {[k.name for k in list_of]}, expected {sorted(case.kernels)}"
            )
        for kernel in list_of:
            report = compiled(kernel, chip, case.name)
            say(f"  {report}")
            problems = report.problems(case.kernels.get(kernel.name, False), case.scratch.get(chip, 0))
            found += [f"{case.name} {chip} {kernel.name}: {problem}" for problem in problems]
    return found + unequal(case)


def unequal(case) -> list[str]:
    """Kernels whose code for ROCm and CUDA is not the same up to names of mathematical functions."""
    rocm, cuda = (kernels(*case.make("gfx942"), platform=p, chip="gfx942") for p in ("rocm", "cuda"))
    same = len(rocm) == len(cuda) and all(a.neutral == b.neutral for a, b in zip(rocm, cuda, strict=True))
    return [] if same else [f"{case.name}: the code for ROCm and CUDA differs"]


def main(arguments: list[str] | None = None) -> int:
    """Check every case; the exit status is 1 if something is wrong."""
    from specjax.kernels import rocm_cases

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--chips", default=",".join(ARCHS))
    parser.add_argument("--only", default="", help="cases whose names contain this")
    args = parser.parse_args(arguments)
    os.environ.setdefault(
        "TRITON_DEFAULT_FP_FUSION", "1"
    )  # as XLA compiles it; newer versions of triton differ
    problems, cases = [], [c for c in rocm_cases.cases() if args.only in c.name]
    for case in cases:
        print(case.name, flush=True)
        problems += check(case, tuple(args.chips.split(",")))
    print(f"{len(cases)} cases, {len(problems)} problems", *problems, sep="\n")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
