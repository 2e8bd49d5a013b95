"""What the host holds while a sharded checkpoint is loaded, and what is told meanwhile."""

import os
import pty
import sys
import threading
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny_files

import specjax
from specjax import checkpoints
from specjax.checkpoints import hub, safetensors
from specjax.types import tree_bytes

SHARDS = 8
#: 30 MB in bfloat16, no tensor larger than a shard.
MOE = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "num_hidden_layers": 12,
    "num_experts": 16,
    "moe_intermediate_size": 96,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module", params=["one by one", "fused"])
def folder(request, tmp_path_factory) -> Path:
    hf = tiny_files.config(**tiny_files.QWEN3_MOE | MOE)
    arrays = {}
    for name, x in tiny_files.tensors(hf).items():
        arrays[name] = x.astype(ml_dtypes.bfloat16)
    if request.param == "fused":
        arrays = _fused(arrays, MOE["num_hidden_layers"], MOE["num_experts"])
    return tiny_files.folder(tmp_path_factory.mktemp("moe"), hf, arrays, shards=SHARDS)


def _fused(arrays, layers: int, experts: int):
    out = {name: x for name, x in arrays.items() if ".experts." not in name}
    for i in range(layers):
        prefix = f"model.layers.{i}.mlp.experts."
        gate, up, down = (
            np.stack([arrays[f"{prefix}{e}.{part}_proj.weight"] for e in range(experts)])
            for part in ("gate", "up", "down")
        )
        out |= {prefix + "gate_up_proj": np.concatenate([gate, up], 1), prefix + "down_proj": down}
    return out


def mapped(folder: Path) -> int:
    """Bytes of the folder's files that are mapped into this process."""
    try:
        lines = [x for x in Path("/proc/self/maps").read_bytes().splitlines() if os.fsencode(folder) in x]
    except OSError:  # the file is Linux's
        return 0
    ends = [[int(end, 16) for end in line.split()[0].split(b"-")] for line in lines]
    return sum(high - low for low, high in ends)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_never_more_than_two_shards_beside_the_parameters(folder, dtype):
    """A model as large as the machine's memory can be loaded; shards count in the type asked for. Arrays of numpy
    are counted by tracemalloc, those of jax are not, unless one took numpy's memory as it was (by chance of its
    alignment): what is there in the end is no surplus."""
    largest = max(file.stat().st_size for file in folder.glob("*.safetensors"))
    largest *= jnp.dtype(dtype).itemsize // 2
    pages = []

    def look(done: int, total: int, name: str) -> None:
        if done % 8 == 0 or done == total:
            pages.append(mapped(folder))

    tracemalloc.start()
    try:
        loaded = checkpoints.load_target(hub.resolve(folder), jnp.dtype(dtype), progress=look)
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert tree_bytes(loaded.weights) > 5 * largest
    assert peak - after + max(pages) < 2 * largest


def test_parts_of_fused_tensors_are_read_alone(folder):
    """Gate and up each read their half, and the whole is what the halves are; so with any tensor."""
    tensors = safetensors.Tensors(folder)
    fused = [n for n in sorted(tensors.names) if n.endswith("experts.gate_up_proj")]
    stored = tensors.get((fused or ["model.layers.0.mlp.gate.weight"])[0])
    whole, half = np.asarray(stored), MOE["moe_intermediate_size"]
    assert (stored.shape, stored.dtype) == (whole.shape, whole.dtype)
    for part in (slice(0, half), slice(half, 2 * half), slice(3, 3), slice(half, None), slice(5, 60, 2)):
        np.testing.assert_array_equal(stored[:, part], whole[:, part])
    with pytest.raises(IndexError, match=r"only \[:, start:stop\]"):
        stored[0, :3]


def test_a_file_that_shrinks_while_it_is_read(folder, tmp_path):
    """What was checked when the file was opened may have changed since."""
    file = next(iter(sorted(folder.glob("*.safetensors"))))
    copy = tmp_path / "part.safetensors"
    copy.write_bytes(file.read_bytes())
    last = max(safetensors.header(copy).values(), key=lambda stored: stored.start)
    with open(copy, "r+b") as opened:
        opened.truncate(last.start + 1)
    with pytest.raises(ValueError, match=r"part\.safetensors is damaged or truncated"):
        np.asarray(last)


def test_progress_on_a_terminal(folder, monkeypatch):
    """Every array is counted on a line of its own, which vanishes at the end."""
    reading, writing = pty.openpty()
    seen: list[bytes] = []

    def listen() -> None:
        try:
            while part := os.read(reading, 1 << 16):
                seen.append(part)
        except OSError:  # the other end is closed
            pass

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    monkeypatch.setenv("TERM", "xterm")
    with open(writing, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        params = specjax.load(folder, dtype="bfloat16")
    listener.join()  # it ends with the terminal
    os.close(reading)
    monkeypatch.undo()
    said, leaves = b"".join(seen).decode(), len(jax.tree.leaves(params.target))
    assert f"{leaves}/{leaves}" in said
    assert str(folder)[:20] in said
