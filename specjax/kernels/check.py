"""Kernels against their references on this device: ``python -m specjax.kernels.check``.

Every kernel is run on a small random case with not-a-number in what nobody may see, and compared with its reference in
float32. One that is wrong is switched off for this process, with a warning.
"""

import sys
import time
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax.kernels import dispatch
from specjax.kernels.block_attention_op import View, attend_block, reference as plain_attention
from specjax.kernels.building import told
from specjax.kernels.kv_injection_op import Heads, Projections, inject, reference as plain_injection
from specjax.layers.rope import RopeConfig

#: The largest relative error (Euclidean norm) that bfloat16 explains.
MOST = 1e-2


def block_attention() -> float:
    """Relative error of an empty, a short and a full context, in one batch."""
    batch, rows, heads, groups, size, slots, view = 3, 7, 8, 2, 128, 300, View(0.09, False)
    lengths = jnp.asarray([0, 37, slots], jnp.int32)
    q, k, v, a, b = (
        _random(i, batch, *shape)
        for i, shape in enumerate(
            [(rows, heads, size), *[(groups, slots, size)] * 2, *[(rows, groups, size)] * 2]
        )
    )
    hidden = (jnp.arange(slots) >= lengths[:, None])[:, None, :, None]
    run = jax.jit(lambda *arrays: attend_block(*arrays, view=view, implementation="pallas"))
    got = run(q, jnp.where(hidden, jnp.nan, k), jnp.where(hidden, jnp.nan, v), lengths, lengths, (a, b))
    q, k, v, a, b = (x.astype(jnp.float32) for x in (q, k, v, a, b))
    return _error([got], [plain_attention(q, k, v, lengths, lengths, (a, b), view=view)])


def kv_injection() -> float:
    """Relative error of two layers, with rows that keep none, some and all of their block."""
    batch, block, width, groups, size, slots = 3, 4, 256, 2, 128, 40
    heads = Heads(RopeConfig(size, 1e6), 1e-6)
    layers = tuple(
        Projections(
            _random(i, groups, size, width), _random(i + 9, groups, size, width), None, None, _random(i, size)
        )
        for i in range(2)
    )
    caches = tuple(
        (_random(i, batch, groups, slots, size), _random(i + 9, batch, groups, slots, size)) for i in range(2)
    )
    pos = jnp.asarray([0, 17, 36], jnp.int32)[:, None] + jnp.arange(block, dtype=jnp.int32)
    arrays = _random(5, batch, block, width) / 16, layers, caches, pos, jnp.asarray([0, 2, 4], jnp.int32)
    got = jax.jit(lambda *a: inject(*a, heads=heads, implementation="pallas"))(*arrays)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, arrays)
    return _error(got, plain_injection(*wide, heads=heads))


CHECKS: dict[str, Callable[[], float]] = {"block_attention": block_attention, "kv_injection": kv_injection}


def self_check() -> dict[str, float]:
    """Relative errors of the kernels that run on this device (none on a CPU); wrong ones are switched off."""
    errors = {}
    for op, check in CHECKS.items():
        if dispatch.explain(op).implementation != "kernel":
            continue
        try:
            errors[op] = check()
            wrong = (
                None if errors[op] < MOST else f"relative error {errors[op]:.1e} where {MOST:.0e} is allowed"
            )
        except Exception as error:  # a kernel that cannot even be run
            errors[op] = float("inf")
            wrong = told(error)
        if wrong:
            dispatch.disable(op, f"switched off by its self-check: {wrong}")
            warnings.warn(f"kernel {op} is switched off by its self-check: {wrong}", stacklevel=2)
    return errors


def _random(seed: int, *shape: int):
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def _error(got, want) -> float:
    flat = lambda tree: jnp.concatenate([x.astype(jnp.float32).ravel() for x in jax.tree.leaves(tree)])  # noqa: E731
    got, want = flat(got), flat(want)
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


def main() -> int:
    """Print what was found; the exit status is 1 if a kernel is wrong."""
    began, errors = time.monotonic(), self_check()
    for choice in dispatch.report():
        print(
            f"{choice.op}: {choice.implementation}, error {errors.get(choice.op, 'not checked')} ({choice.reason})"
        )
    print(f"{time.monotonic() - began:.1f} s")
    return int(any(not error < MOST for error in errors.values()))


if __name__ == "__main__":
    sys.exit(main())
