"""Which kernels a round's time goes to, and the bytes that each has to move.

Times are those of ``jax.profiler``. Bytes are what an operation of the compiled program reads and writes, taken from
its text by the operation's name; "?" where the device names a kernel otherwise (library calls).
"""

import collections
import re
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from steps_run import Contender

_OPERATION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_ARRAY = re.compile(r"\b(pred|[sufb]\w*?\d+\w*)\[([\d,]*)\]")
_HOLDERS = ("while", "conditional", "call", "tuple", "get-tuple-element", "parameter", "bitcast", "constant")
_BITS = re.compile(r"(\d+)")


def profile(contender: Contender, rounds: int = 8, most: int = 25) -> list[dict[str, Any]]:
    """Kernels of a round, the longest first: name, microseconds, calls, bytes of one call and bytes per second."""
    engine = contender.engine
    text = engine.compile_chunk(contender.shapes).as_text() or ""
    state, _ = engine.chunk(contender.state(), 2)
    jax.block_until_ready(state)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(engine.chunk(state, rounds))
        found = _kernels(Path(folder))
    sizes = operation_bytes(text)
    rows = []
    for name, took in found.items():
        size = sizes.get(name) or sizes.get(name.replace("_", "."))
        per_call = 1e6 * sum(took) / len(took)
        row = {"kernel": name, "us": 1e6 * sum(took) / rounds, "calls": len(took) / rounds, "bytes": size}
        rows.append(row | {"bytes_per_second": None if size is None else 1e6 * size / per_call})
    return sorted(rows, key=lambda row: -row["us"])[:most]


def _kernels(folder: Path) -> dict[str, list[float]]:
    """Seconds of every run of every operation; of devices alone if there are any in the trace."""
    planes = [
        plane
        for path in folder.glob("plugins/profile/*/*.xplane.pb")
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes
    ]
    devices = [plane for plane in planes if plane.name.startswith("/device:")]
    found = collections.defaultdict(list)
    for plane in devices or planes:
        for line in plane.lines:
            if devices and not line.name.startswith("Stream"):
                continue  # what is derived of the streams would count twice
            for event in line.events:
                operation = next((str(v) for k, v in event.stats if k == "hlo_op"), None)
                if operation is None and not devices:
                    continue
                if operation is None or operation.split(".")[0] not in _HOLDERS:
                    found[operation or event.name].append(1e-9 * event.duration_ns)
    return dict(found)


def operation_bytes(text: str) -> dict[str, int]:
    """Bytes that each operation of a compiled program reads and writes, by name. Slices of large arrays count whole."""
    results, operands = {}, {}
    for line in text.splitlines():
        if match := _OPERATION.match(line):
            name, shape, kind, rest = match.groups()
            results[name] = _size(shape)
            if kind not in _HOLDERS:
                operands[name] = re.findall(r"%([\w.\-]+)", rest.split("), ")[0])
    return {name: results[name] + sum(results.get(x, 0) for x in given) for name, given in operands.items()}


def _size(shapes: str) -> int:
    total = 0
    for kind, dims in _ARRAY.findall(shapes):
        bits = _BITS.search(kind)
        one = 1 if kind == "pred" or bits is None else max(1, int(bits[1]) // 8)
        total += one * int(np.prod([int(d) for d in dims.split(",") if d] or [1]))
    return total


def table(rows: list[dict[str, Any]], round_ms: float) -> str:
    """The rows as text."""
    lines = [f"{'kernel':48} {'us/round':>9} {'share':>6} {'calls':>6} {'MB/call':>8} {'TB/s':>6}"]
    for row in rows:
        size, speed = row["bytes"], row["bytes_per_second"]
        mb = "?" if size is None else f"{size / 1e6:.2f}"
        rate = "?" if speed is None else f"{speed / 1e12:.2f}"
        share = f"{row['us'] / (1e3 * round_ms):.1%}"
        lines.append(
            f"{row['kernel'][:48]:48} {row['us']:9.1f} {share:>6} {row['calls']:6.1f} {mb:>8} {rate:>6}"
        )
    return "\n".join(lines)
