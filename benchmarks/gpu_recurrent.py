"""The gated delta rule on an accelerator: bits of the replay tape, rounding of chunks, times of one layer.

    python benchmarks/gpu_recurrent.py [--rows 1,8] [--dtype bfloat16]

One layer has the sizes of Qwen3.6-35B-A3B (32 value heads, 16 key heads, 128 x 128 states). Prints one JSON line
per figure. Times are medians over runs of a compiled loop, per step of it.
"""

import argparse
import functools
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from specjax.layers import delta
from specjax.targets import qwen3_5
from specjax.targets.qwen3_5_config import config
from specjax.types import ArraySpec

CFG = config(
    {
        "model_type": "qwen3_5_text",
        "vocab_size": 64,
        "hidden_size": 2048,
        "num_hidden_layers": 1,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 4096,
        "layer_types": ["linear_attention"],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    }
)


def weights(dtype) -> qwen3_5.Delta:
    """Random weights of one layer."""
    rng = np.random.default_rng(0)

    def make(spec: ArraySpec):
        scale = 0.0 if spec.init == "zeros" else spec.shape[-1] ** -0.5
        return jnp.asarray(rng.standard_normal(spec.shape) * scale, spec.dtype or dtype)

    specs = qwen3_5.abstract(CFG).layers[0].mixer
    return jax.tree.map(make, specs, is_leaf=lambda x: isinstance(x, ArraySpec))


def layer(w, mode: str):
    """One layer as it is called: ``(x, valid, cache) -> (out, cache)``."""
    return jax.jit(lambda x, valid, cache: qwen3_5._delta(w, CFG, x, valid, cache, mode))


def bits(w, rows: int, width: int, dtype) -> dict:
    """Whether the state after replays equals, to the bit, that of one position at a time."""
    rng = np.random.default_rng(1)
    verify, extend = layer(w, "verify"), layer(w, "extend")
    cache = qwen3_5._empty(CFG, rows, width, dtype)
    single = qwen3_5._empty(CFG, rows, 1, dtype)
    feed = _feeder(w)
    for _ in range(4):
        x = jnp.asarray(rng.standard_normal((rows, width, CFG.hidden_size)), dtype)
        kept = int(rng.integers(0, width + 1))  # the same in all rows: the other cache goes one by one
        _, cache = verify(x, jnp.full((rows,), width), cache)
        inputs, cache = cache.tape, cache.commit(jnp.full((rows,), kept))
        for i in range(kept):
            _, single = feed(single, jax.tree.map(lambda a, i=i: a[:, i : i + 1], inputs))
            single = single.commit(jnp.ones((rows,), jnp.int32))
    nothing = jnp.zeros((rows,), jnp.int32)
    a = extend(x, nothing, cache)[1].state
    b = extend(x, nothing, single)[1].state
    return {
        "equal": bool((a.matrix == b.matrix).all() and (a.columns == b.columns).all()),
        "max_difference": float(jnp.abs(a.matrix - b.matrix).max()),
        "state_max": float(jnp.abs(a.matrix).max()),
    }


def _feeder(w):
    """The recurrence of a layer alone, fed the inputs that a tape holds."""
    run = functools.partial(qwen3_5._recur, w, CFG)
    full = lambda x: jnp.full(x.beta.shape[:1], x.beta.shape[1])  # noqa: E731
    return jax.jit(lambda cache, x: cache.extend(x, full(x), "verify", run))


def chunk_rounding(rows: int, width: int) -> dict:
    """Largest difference of chunks from one position at a time, relative to the largest output."""
    rng = np.random.default_rng(2)
    draw = lambda *s: jnp.asarray(rng.standard_normal(s), jnp.float32)  # noqa: E731
    valid = jnp.full((rows,), width)
    decay, beta = -jnp.abs(draw(rows, width, 32)), jax.nn.sigmoid(draw(rows, width, 32))
    x = delta.block(draw(rows, width, CFG.channels), decay, beta, valid, 16, 128)
    start = draw(rows, 32, 128, 128)
    want, _ = jax.jit(delta.scan_delta)(start, x)
    got, _ = jax.jit(delta.chunk_delta)(start, x)
    return {"relative": float(jnp.abs(got - want).max() / jnp.abs(want).max())}


def per_step(fn, *args, steps: int = 50) -> float:
    """Microseconds of ``fn(*args) -> args``, repeated on the device."""
    loop = jax.jit(lambda args: jax.lax.fori_loop(0, steps, lambda _, a: fn(*a), args))
    jax.block_until_ready(loop(args))
    times = []
    for _ in range(7):
        began = time.perf_counter()
        jax.block_until_ready(loop(args))
        times.append(time.perf_counter() - began)
    return statistics.median(times) / steps * 1e6


def verify_time(w, rows: int, width: int, dtype) -> float:
    """A verified block with the replay of the one before it."""

    def step(x, cache):
        out, cache = qwen3_5._delta(w, CFG, x, jnp.full((rows,), width), cache, "verify")
        return out, cache.commit(jnp.full((rows,), (width + 1) // 2))

    x = jnp.ones((rows, width, CFG.hidden_size), dtype)
    return per_step(step, x, qwen3_5._empty(CFG, rows, width, dtype))


def prefill_time(w, rows: int, width: int, dtype, mode) -> float:
    """A prefill chunk, by chunks or (``verify``) one position at a time."""

    def step(x, cache):
        out, cache = qwen3_5._delta(w, CFG, x, jnp.full((rows,), width), cache, mode)
        return out, cache

    q_max = width if mode == "verify" else 1
    x = jnp.ones((rows, width, CFG.hidden_size), dtype)
    return per_step(step, x, qwen3_5._empty(CFG, rows, q_max, dtype), steps=5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="1,8")
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    dtype, device = jnp.dtype(args.dtype), jax.devices()[0].device_kind
    say = lambda **figures: print(json.dumps({"device": device, "dtype": args.dtype} | figures), flush=True)  # noqa: E731
    w = weights(dtype)
    for rows in map(int, args.rows.split(",")):
        say(what="replay against one position at a time", rows=rows, **bits(w, rows, 8, dtype))
        say(what="chunks against positions", rows=rows, width=512, **chunk_rounding(rows, 512))
        for width in (1, 4, 8, 16):
            say(what="verify, us", rows=rows, width=width, us=round(verify_time(w, rows, width, dtype), 1))
        for mode in ("extend", "verify"):
            us = prefill_time(w, rows, 512, dtype, mode)
            say(what=f"512 positions, {mode}, us", rows=rows, us=round(us, 1))


if __name__ == "__main__":
    main()
