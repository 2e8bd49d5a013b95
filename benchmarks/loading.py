"""Host memory and speed of loading a sharded bfloat16 checkpoint of a mixture-of-experts model.

    python benchmarks/loading.py [--out FILE] [--folder FOLDER] [--dtypes bfloat16,float32] [--layouts fused,single]

Writes a synthetic Qwen3.5-MoE checkpoint (2 GB in 8 shards with an index, experts fused or one by one) and loads it
in a process of its own, from disk and once more from the page cache. ``beyond_parameters`` is the peak of resident
memory, less what the process held before and less the parameters where they lie in host memory; it must stay
under two shards.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import numpy as np

CONFIG = {
    "model_type": "qwen3_5_moe_text",
    "vocab_size": 49152,
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 64,
    "num_experts_per_tok": 8,
}


def write_checkpoint(folder: Path, hf: dict[str, Any], fused: bool, shards: int) -> None:
    """A folder as it is published; one shard is in memory at a time."""
    import ml_dtypes
    from safetensors.numpy import save_file

    sizes = dict(tensors(hf, fused))
    total, index, rng = 2 * sum(map(np.prod, sizes.values())), {}, np.random.default_rng(0)
    parts: list[list[str]] = [[]]
    filled = 0
    for name, shape in sizes.items():
        if filled >= total / shards * len(parts):
            parts.append([])
        parts[-1].append(name)
        filled += 2 * int(np.prod(shape))
    for i, names in enumerate(parts):
        file = f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        arrays = {}
        for name in names:
            bits = rng.integers(0, 2**16, sizes[name], np.uint16)
            arrays[name] = ((bits & 0x80FF) | 0x3C00).view(ml_dtypes.bfloat16)  # magnitudes 0.008 to 0.03
        save_file(arrays, folder / file)
        index |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(hf))


def tensors(hf: dict[str, Any], fused: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes in the order of the layers."""
    import jax

    from specjax import registry
    from specjax.types import ArraySpec

    family = registry.target(hf["model_type"])
    specs = jax.tree.leaves(family.abstract(family.config(hf)), is_leaf=lambda x: isinstance(x, ArraySpec))
    whole: dict[str, int] = {}
    for spec in specs:
        if fused and spec.fused and spec.rows:
            whole[spec.fused] = max(whole.get(spec.fused, 0), spec.rows[1])
    for spec in specs:
        if fused and spec.fused:
            rows = whole.get(spec.fused, spec.shape[1])
            yield spec.fused, (spec.shape[0], rows, *spec.shape[2:])
        else:
            shape = spec.shape if len(spec.names) == 1 else spec.shape[1:]
            yield from ((name, shape) for name in spec.names)


# ---------------------------------------------------------------- the process that loads


def status(*fields: str) -> list[int]:
    """Bytes of fields of /proc/self/status."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return [1024 * int(lines[field].split()[0]) for field in fields]


class Sampler(threading.Thread):
    """The largest resident memory seen, by kind, looked at every few milliseconds."""

    def __init__(self):
        super().__init__(daemon=True)
        self.largest, self.over = [0, 0], threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.005):
            self.largest = [
                max(pair) for pair in zip(self.largest, status("RssAnon", "RssFile"), strict=True)
            ]


def load(folder: Path, dtype: str) -> dict[str, Any]:
    """Load once; what it took."""
    import jax

    import specjax
    from specjax import registry
    from specjax.types import tree_bytes

    jax.block_until_ready(jax.numpy.zeros(4) + 1)
    registry.target(CONFIG["model_type"])
    before = status("VmRSS", "RssAnon", "RssFile")
    sampler = Sampler()
    sampler.start()
    began, used = time.perf_counter(), time.process_time()
    params = jax.block_until_ready(specjax.load(folder, dtype=dtype, verbose=False))
    seconds = time.perf_counter() - began
    sampler.over.set()
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    held = tree_bytes(params.target)
    on_host = held if jax.default_backend() == "cpu" else 0
    return {
        "parameter_bytes": held,
        "before_bytes": before[0],
        "peak_bytes": peak,
        "beyond_parameters": peak - before[0] - on_host,
        "peak_anonymous": sampler.largest[0] - before[1],
        "peak_mapped": sampler.largest[1] - before[2],
        "seconds": round(seconds, 2),
        "cpu_seconds": round(time.process_time() - used, 2),
        "load_average": os.getloadavg()[0],  # of the machine; others may have been at work
    }


# ---------------------------------------------------------------- the process that measures


def measure(folder: Path, dtype: str, cold: bool) -> dict[str, Any]:
    """One load in a fresh process. ``cold``: the files are dropped from the page cache before."""
    files = sorted(folder.glob("*.safetensors"))
    sizes = [file.stat().st_size for file in files]
    if cold:
        for file in files:
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
                os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    child = [sys.executable, __file__, "--load", str(folder), "--dtypes", dtype]
    out = subprocess.run(child, stdout=subprocess.PIPE, text=True, check=True)
    told = json.loads(out.stdout.splitlines()[-1])
    return told | {
        "file_bytes": sum(sizes),
        "shards": len(sizes),
        "two_shards": 2 * max(sizes),
        "within": told["beyond_parameters"] <= 2 * max(sizes),
        "gigabytes_per_second": round(sum(sizes) / told["seconds"] / 1e9, 2),
    }


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--folder", type=Path, help="where checkpoints are written and kept; default: temporary"
    )
    parser.add_argument("--layouts", default="fused,single", help="experts fused, or one by one")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.load:
        print(json.dumps(load(args.load, args.dtypes)))
        return 0
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for layout in args.layouts.split(","):
            folder = (args.folder or Path(temporary)) / layout
            if not (folder / "config.json").is_file():
                folder.mkdir(parents=True, exist_ok=True)
                write_checkpoint(folder, CONFIG, layout == "fused", args.shards)
            for dtype in args.dtypes.split(","):
                for pages in ("cold", "cached"):
                    row = {"experts": layout, "dtype": dtype, "pages": pages}
                    rows.append(row | measure(folder, dtype, pages == "cold"))
                    print(rows[-1], flush=True)
    del args.load, args.folder
    common.write(args.out, args, rows)
    return 0 if all(row["within"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
