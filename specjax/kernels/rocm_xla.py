"""XLA's own AMD compiler for a chip that is not there: a jitted function to machine code, and figures of it.

For a process of its own (:mod:`specjax.kernels.rocm_round` starts one per program): it makes jax believe that it runs
on that chip, and the dynamic linker must find the libraries of :mod:`specjax.kernels.rocm_stubs`. The compiler has no
device to time variants on, so products are its Triton kernels; on a real device some are hipBLASLt's.
"""

import collections
import dataclasses
import os
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.core import platform
from specjax.kernels import dispatch, rocm

#: Per chip: bytes of local memory, processors, bytes per second, GHz.
CHIPS = {"gfx942": (64 * 1024, 304, 5.3e12, 2.1), "gfx950": (160 * 1024, 256, 8.0e12, 2.4)}
_PALLAS = re.compile(r'op_name="[^"]*?(\w+)/pallas_call"')
_NOTE, _KIND = b"AMDGPU\0\0", 32  # of the list of kernels within a code object


@dataclasses.dataclass(frozen=True)
class Code:
    """A kernel of a code object: vector registers with those of accumulators, spilled ones, bytes of scratch and of
    local memory that is known beforehand."""

    name: str
    chip: str
    registers: int
    spilled: int
    scratch: int
    local: int


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program compiled for a chip; bytes and seconds.

    ``code_bytes`` of all code objects, ``kernels`` in them. ``launches``: operations that start a kernel or copy, each
    counted once however often a loop runs it. ``pallas``: calls of our kernels by name; ``library``: calls of ROCm's
    libraries by name. ``spilling``: kernels that spill vector registers or use scratch.
    """

    seconds_to_lower: float
    seconds_to_compile: float
    code_bytes: int
    temporary_bytes: int
    argument_bytes: int
    output_bytes: int
    aliased_bytes: int
    kernels: int
    launches: int
    most_registers: int
    spilling: dict[str, str]
    pallas: dict[str, int]
    library: dict[str, int]


def description(chip: str) -> str:
    """What XLA wants to know of a device that it does not see (a GpuTargetConfig in text form)."""
    local, processors, bandwidth, clock = CHIPS[chip]
    return f"""gpu_device_info {{ threads_per_block_limit: 1024 threads_per_warp: 64
      shared_memory_per_block: {local} shared_memory_per_block_optin: {local} shared_memory_per_core: {local}
      threads_per_core_limit: 2048 core_count: {processors} fpus_per_core: 128
      block_dim_limit_x: 2147483647 block_dim_limit_y: 65536 block_dim_limit_z: 65536
      memory_bandwidth: {int(bandwidth)} l2_cache_size: 4194304 clock_rate_ghz: {clock}
      device_memory_size: {192 * 2**30} registers_per_core_limit: 131072 registers_per_block_limit: 131072
      rocm_compute_capability {{ gcn_arch_name: "{chip}:sramecc+:xnack-" }} }}
      platform_name: "ROCM" dnn_version_info {{ }} device_description_str: "{chip}" """


class Compiler:
    """Compiles for one chip with the plug-in at ``library``; from then on this process takes itself to run there."""

    def __init__(self, library: Path, chip: str):
        from jax._src import xla_bridge
        from jax._src.lib import xla_client
        from jax.experimental import topologies

        self.chip, self._kept = chip, Path(tempfile.mkdtemp())
        # where XLA leaves the code objects it linked, small ones too
        os.environ |= {"TF_XLA_HSACO_CACHE_DIR": str(self._kept), "TF_XLA_HSACO_BITCODE_SIZE_THRESHOLD": "0"}
        options = {**xla_client.generate_pjrt_gpu_plugin_options(), "platform_name": "ROCM"}
        xla_bridge.register_plugin("rocm", priority=0, library_path=str(library), options=options)
        described = topologies.get_topology_desc(
            platform="rocm", topology_name="1x1x1", topology="1x1x1", target_config=description(chip)
        )
        devices = described.devices[:1]
        mesh = jax.sharding.Mesh(np.array(devices), ("x",))
        self._where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        self._believe(devices)

    def _believe(self, devices: list[Any]) -> None:
        """What is decided at trace time is decided as on the chip. Kernels are not tried one by one: the first tiles of
        the table are compiled with the program."""
        here: Any = jax  # functions of modules are replaced
        table: Any = dispatch
        here.default_backend = lambda: "rocm"
        here.devices = lambda *_: devices
        table._failure = lambda *_: None

    def __call__(self, function: Callable, *shapes: Any, donate: tuple[int, ...] = ()) -> Compiled:
        """Compile ``function`` at ``shapes`` with the options that decoding uses on ROCm."""
        place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._where)  # noqa: E731
        began = time.perf_counter()
        with rocm.device(self.chip), rocm.compiling():
            lowered = jax.jit(function, donate_argnums=donate).lower(*jax.tree.map(place, shapes))
            middle = time.perf_counter()
            done = lowered.compile(compiler_options=platform.compiler_options("rocm"))
        memory: Any = done.memory_analysis()
        text = str(done.as_text())
        objects = [path.read_bytes() for path in sorted(self._kept.iterdir())]
        codes = [code for one in objects for code in kernels(one)]
        return Compiled(
            seconds_to_lower=round(middle - began, 2),
            seconds_to_compile=round(time.perf_counter() - middle, 2),
            code_bytes=sum(map(len, objects)),
            temporary_bytes=memory.temp_size_in_bytes,
            argument_bytes=memory.argument_size_in_bytes,
            output_bytes=memory.output_size_in_bytes,
            aliased_bytes=memory.alias_size_in_bytes,
            kernels=len(codes),
            launches=launches(text),
            most_registers=max((code.registers for code in codes), default=0),
            spilling={
                c.name: f"{c.spilled} registers, {c.scratch} bytes of scratch"
                for c in codes
                if c.spilled or c.scratch
            },
            **calls(text),
        )


def launches(text: str) -> int:
    """Fusions, calls of kernels, and copies in an optimised program's text, apart from those within fusions."""
    return len(
        re.findall(r"^\s+(?:ROOT )?%\S+ = .*? (?:fusion|custom-call|copy|sort|copy-start)\(", text, re.M)
    )


def calls(text: str) -> dict[str, dict[str, int]]:
    """``pallas`` and ``library`` of :class:`Compiled`, from an optimised program's text."""
    found = [line for line in text.splitlines() if "custom_call_target=" in line]
    target = lambda line: line.partition('custom_call_target="')[2].partition('"')[0]  # noqa: E731
    ours = [_PALLAS.search(line) for line in found if target(line) == rocm.TARGET]
    library = collections.Counter(target(line) for line in found if target(line) != rocm.TARGET)
    return {
        "pallas": dict(collections.Counter(x[1] if x else "unnamed" for x in ours)),
        "library": dict(library),
    }


def kernels(blob: bytes) -> list[Code]:
    """Kernels that the note of an AMD code object lists."""
    import msgpack  # flax brings it

    found = []
    for mark in re.finditer(_NOTE, blob):
        size, kind = (int.from_bytes(blob[mark.start() - n : mark.start() - n + 4], "little") for n in (8, 4))
        if kind != _KIND or not 0 < size <= len(blob) - mark.end():
            continue
        note = msgpack.unpackb(blob[mark.end() : mark.end() + size], strict_map_key=False)
        for k in note.get("amdhsa.kernels", ()):
            number = lambda key, of=k: int(of.get(key, 0))  # noqa: E731
            found.append(
                Code(
                    name=k[".name"],
                    chip=str(note.get("amdhsa.target", "")),
                    registers=number(".vgpr_count"),
                    spilled=number(".vgpr_spill_count"),
                    scratch=number(".private_segment_fixed_size"),
                    local=number(".group_segment_fixed_size"),
                )
            )
    return found
