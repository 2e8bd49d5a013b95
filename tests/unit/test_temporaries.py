"""Temporary memory of compiled programs: what must not grow, and what must not be needed twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import HYBRID, HYBRID_MOE
from gemma_tiny import CONFIGS

from specjax import calls, registry, testing
from specjax.core import loop, programs
from specjax.core.cache import RingKV
from specjax.drafters import draft_model
from specjax.layers.loop import scan_into
from specjax.types import TapSpec, tree_bytes

SLIDING = CONFIGS["gemma3"] | {"max_position_embeddings": 8192, "sliding_window": 4096, "head_dim": 64}
SLIDING |= {"layer_types": ["sliding_attention"] * 6, "num_hidden_layers": 6}


def prefill(params, width: int = 256) -> int:
    """Bytes that the prefill of so many positions of four rows needs beside weights and state."""
    call = calls.plan(params, [[1] * width] * 4, max_new_tokens=6)
    state = jax.eval_shape(
        lambda: programs.fill_caches(call.program, loop.host_state(call.program, call.jobs))
    )
    engine = programs.Engine(call.program, (params.target, params.drafter))
    return engine.compile_prefill(state, width).memory_analysis().temp_size_in_bytes


#: Heads so wide that what the layers collect is no trifle.
WIDE = {"hidden_size": 64, "linear_value_head_dim": 64, "linear_num_value_heads": 4}


@pytest.mark.parametrize("hf", [HYBRID, HYBRID_MOE | {"num_experts_per_tok": 4}], ids=["hybrid", "experts"])
def test_prefill_does_not_grow_with_layers(hf):
    """PRF.8: what loops in layers collect is not set aside for all layers at once."""

    def of(layers: int) -> int:
        kinds = ["linear_attention"] * (layers - 1) + ["full_attention"]
        changes = {"num_hidden_layers": layers, "layer_types": kinds, "vocab_size": 64}
        return prefill(testing.tiny_params(hf=hf | WIDE | changes))

    assert of(4) < 1.05 * of(2)


def test_a_draft_model_waits_for_the_target():
    """PRF.8: both read the prompt, and either could go first, but not both at once."""
    alone = testing.tiny_params(vocab=64, max_positions=1024)
    twin = draft_model.Config(family="llama", model=alone.meta.target_cfg, vocab_size=64)
    assert prefill(testing.tiny_drafter(alone, "draft_model", cfg=twin)) < 1.1 * prefill(alone)


def test_rings_are_written_in_place():
    """PRF.8, KVR.1: a round does not copy the windows it writes a few positions of."""
    params, rows = testing.tiny_params(hf=SLIDING), 2
    module, cfg = registry.target("gemma3_text"), params.meta.target_cfg
    cache = jax.eval_shape(lambda: module.init_cache(cfg, rows, 8192, 4, jnp.float32))
    rings = tree_bytes([kv for kv in cache if isinstance(kv, RingKV)])

    def rounds(p, cache):
        def one(i, cache):
            pos = jnp.broadcast_to(i + jnp.arange(4), (rows, 4))
            out = module.forward(p, cfg, pos % 7, pos, jnp.full(rows, 4), cache, TapSpec(), "verify")
            return module.commit(cfg, out.cache, jnp.ones(rows, jnp.int32))

        return jax.lax.fori_loop(0, 9, one, cache)

    used = jax.jit(rounds, donate_argnums=1).lower(params.target, cache).compile().memory_analysis()
    assert used.temp_size_in_bytes < rings / 4


def test_scan_over_data_is_a_scan():
    """Values and gradients, whatever the results were written over."""
    xs = {"a": jnp.arange(12.0).reshape(4, 3), "b": jnp.linspace(-1, 1, 4)}

    def step(carry, x):
        carry = jnp.tanh(carry + x["a"]) * x["b"]
        return carry, {"y": carry**2, "z": (x["a"][0] * x["b"],)}

    def ours(start, xs):
        into = {"y": jnp.full((4, 3), 7.0), "z": (xs["b"] * 5,)}
        return scan_into(step, start, xs, into)

    start = jnp.ones(3)
    a, b = ours(start, xs), jax.lax.scan(step, start, xs)
    jax.tree.map(np.testing.assert_array_equal, a, b)
    total = lambda run: lambda *args: sum(jnp.sum(x) for x in jax.tree.leaves(run(*args)))  # noqa: E731
    grads = [jax.grad(total(run), (0, 1))(start, xs) for run in (ours, lambda s, x: jax.lax.scan(step, s, x))]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), *grads)
