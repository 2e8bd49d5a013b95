"""Experts for the tests of their kernels, and what it takes to lower for a GPU that is not there."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np


def inputs(n, experts, d, f, k=1, dtype=jnp.float32):
    """Rows [n d], choices [n k], each of different experts, and weights of gate, up and down."""
    rng = np.random.default_rng(n)
    make = lambda *s: jnp.asarray(rng.standard_normal(s) / s[-1] ** 0.5, dtype)  # noqa: E731
    weights = make(experts, f, d), make(experts, f, d), make(experts, d, f)
    ids = jnp.asarray(np.stack([rng.permutation(experts)[:k] for _ in range(n)]), jnp.int32)
    return jnp.asarray(rng.standard_normal((n, d)), dtype), ids, weights


def interpreted(kernel, tiles, x, ids, weights, activation=jax.nn.silu):
    """What a kernel's module gives with these tiles, in Pallas' interpreter."""
    case = kernel.case(x, ids, weights[0], activation)
    run = lambda *arrays: kernel.launch(*arrays, case=case, tiles=tiles, interpret=True)  # noqa: E731
    return np.asarray(jax.jit(run)(x, ids, *weights))


@contextlib.contextmanager
def in_mind(platform):
    """jax 0.11 and newer want to be told which GPU they lower for."""
    if platform == "cpu" or not hasattr(jax.sharding, "AbstractDevice"):
        yield
        return
    kind = {"cuda": "NVIDIA H200", "rocm": "gfx942"}[platform]
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((1,), ("x",), axis_types=auto, abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        yield


def calls(run, platform, *shapes):
    """Kernels that the program of a jitted function calls when it is lowered for a platform."""
    with in_mind(platform):
        text = run.trace(*shapes).lower(lowering_platforms=(platform,)).as_text()
    return text.count("custom_call @__gpu$xla.gpu.triton")
