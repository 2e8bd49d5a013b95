"""The target's pass over packed rows in training, on an accelerator: time, memory, and what kept features cost.

    python benchmarks/train_features.py [--rows 32] [--length 512] [--dtype bfloat16] [--out FILE]

The target has the sizes of SmolLM2-135M and random weights; rows are full of documents of about 300 tokens. Times are
medians over runs that wait for the device. Prints one JSON line per figure:

* ``forward``: extraction with five taps, once with the kernel for packed attention and once as XLA compiles it, with
  the largest difference between the two and to float32;
* ``kept``: writing records of a batch to a device buffer and reading a batch in another packing, with its bandwidth;
* ``host``: the same from host memory.
"""

import argparse
import functools
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np

from specjax import registry
from specjax.kernels import dispatch
from specjax.train import records, sources
from specjax.train.types import Batch
from specjax.types import ArraySpec, Pair, TapSpec

SMOLLM2 = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
TAPS = (2, 9, 15, 21, 28)


def weights(cfg: Any, dtype: str) -> Any:
    """Random weights of the target."""
    rng = np.random.default_rng(0)

    def make(spec: ArraySpec):
        scale = (
            rng.standard_normal(spec.shape, np.float32) * 0.04
            if spec.init == "normal"
            else np.ones(spec.shape)
        )
        return jnp.asarray(scale, dtype)

    specs = registry.target("llama").abstract(cfg)
    return jax.tree.map(make, specs, is_leaf=lambda x: isinstance(x, ArraySpec))


def packed(rows: int, length: int, first: int, seed: int) -> tuple[list[list[int]], Batch, list[int]]:
    """Rows filled with documents numbered from ``first``, the batch, and the lengths of the documents."""
    rng, named, lengths = np.random.default_rng(seed), [], []
    shape = (rows, length)
    doc, pos = np.full(shape, -1, np.int32), np.zeros(shape, np.int32)
    tokens = rng.integers(0, SMOLLM2["vocab_size"], shape).astype(np.int32)
    for r in range(rows):
        start, named_here = 0, []
        while length - start >= 32:
            n = int(min(length - start, rng.integers(100, 500)))
            doc[r, start : start + n], pos[r, start : start + n] = len(named_here), np.arange(n)
            named_here.append(first + len(lengths))
            lengths.append(n)
            start += n
        named.append(named_here)
    return named, Batch(np.where(doc >= 0, tokens, 0), doc, pos, doc >= 0), lengths


def timed(run, times: int = 20) -> float:
    """Median milliseconds of a call that has run before."""
    jax.block_until_ready(run())
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        jax.block_until_ready(run())
        taken.append(time.perf_counter() - start)
    return 1e3 * statistics.median(taken)


def forward(args: argparse.Namespace, extract: sources.Extract, target: Any, batch: Batch) -> list[dict]:
    """Extraction with and without the kernel."""
    batch, found, outs = jax.device_put(batch), [], []
    for kernels in ("on", "off"):
        os.environ["SPECJAX_KERNELS"] = kernels
        run = jax.jit(lambda t, b: extract(t, b))  # a new function, so that it is traced again
        start = time.perf_counter()
        compiled = run.lower(target, batch).compile()
        seconds = time.perf_counter() - start
        memory = compiled.memory_analysis()
        outs.append(compiled(target, batch))
        found.append(
            {
                "figure": "forward",
                "kernels": kernels,
                "ms": timed(lambda c=compiled: c(target, batch)),
                "compile_s": seconds,
                "temp_gib": getattr(memory, "temp_size_in_bytes", 0) / 2**30,
                "attention": dispatch.explain("packed_attention").__dict__,
            }
        )
        found[-1]["tokens_per_s"] = args.rows * args.length / found[-1]["ms"] * 1e3
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), target)
    outs.append(
        jax.jit(lambda t, b: sources.Extract(extract.pair, extract.needs, "float32")(t, b))(exact, batch)
    )
    hidden = [np.asarray(x.hidden, np.float32) for x in outs]
    size = float(np.abs(hidden[2]).mean())
    far = lambda a, b: float(np.abs(hidden[a] - hidden[b]).mean() / size)  # noqa: E731
    found.append(
        {"figure": "difference", "kernel_xla": far(0, 1), "kernel_f32": far(0, 2), "xla_f32": far(1, 2)}
    )
    return found


def kept(args: argparse.Namespace, extract: sources.Extract, target: Any) -> list[dict]:
    """Buffers on device and host: filled in one packing, read in another."""
    made = [packed(args.rows, args.length, 0, 0)]
    made.append(packed(args.rows, args.length, len(made[0][2]), 1))
    lengths = [n for *_, more in made for n in more]
    found = []
    shape = extract.layout(target)
    size = args.rows * args.length * shape.bytes_per_token
    tokens = max(sum(lengths), int(args.buffer_gib * 2**30 / shape.bytes_per_token))
    for where, kind in (("device", records.DeviceRecords), ("host", records.HostRecords)):
        table = records.Table(lengths)
        buffer = kind(tokens if where == "device" else sum(lengths), shape)
        source = sources.Hybrid(sources.Online(extract, target), extract.needs, table, buffer)
        for rows, batch, _ in made:
            source.get(rows, batch)
        crossed = [a if i % 2 else b for i, (a, b) in enumerate(zip(made[0][0], made[1][0], strict=True))]
        pick = lambda x, y: np.stack([a if i % 2 else b for i, (a, b) in enumerate(zip(x, y, strict=True))])  # noqa: E731
        batch = jax.tree.map(pick, made[0][1], made[1][1])
        milliseconds = timed(functools.partial(source.get, crossed, batch))
        online = sources.Online(extract, target).get(crossed, batch)
        same = jax.tree.map(lambda a, b: bool((a == b).all()), source.get(crossed, batch), online)
        found.append(
            {
                "figure": "kept",
                "where": where,
                "read_ms": milliseconds,
                "gb_per_s": size / milliseconds / 1e6,
                "buffer_gib": buffer.shape.bytes_per_token * getattr(buffer, "size", sum(lengths)) / 2**30,
                "equal_to_online": all(jax.tree.leaves(same)),
            }
        )
    return found


def main() -> None:
    """Everything, line by line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--buffer-gib", type=float, default=0.0, help="size of the device buffer, at least what is used"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cfg = registry.target("llama").config(SMOLLM2 | {"num_hidden_layers": args.layers})
    target = weights(cfg, args.dtype)
    taps = tuple(t for t in TAPS if t <= args.layers)
    extract = sources.Extract(Pair("llama", cfg), TapSpec(taps, True), args.dtype)
    found = forward(args, extract, target, packed(args.rows, args.length, 0, 0)[1])
    os.environ.pop("SPECJAX_KERNELS")
    found += kept(args, extract, target)
    for line in found:
        print(json.dumps(line))
    common.write(args.out, args, found)


if __name__ == "__main__":
    main()
