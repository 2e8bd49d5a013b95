"""Kernels that a draft step, a layer of a drafted block and a layer of a target start on a GPU: each costs a gap in
which no weights are read, so their number is part of what a round costs (PRF.2)."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

from specjax import registry
from specjax.core import platform
from specjax.kernels import dispatch, rocm_rounds as rounds
from specjax.train.methods import dflash, mtp
from specjax.types import Ctx, Shared, TapSpec

ROWS, SLOTS = 1, 1024
LAYER = {"skinny": 4, "block_attention": 1, "block_attention_join": 1}  # heads, output, gate and up, down
MORE = {
    # the projection of (embedding, state) pairs
    "mtp": {"skinny": 5},
    # four layers; what leads into the width of the assistant and out of it
    "assistant": {"skinny": 18, "block_attention": 4, "block_attention_join": 4},
}


@pytest.fixture
def pretend(monkeypatch):
    """The table believes in a GPU, on which everything can be built."""
    monkeypatch.setattr(platform, "backend", lambda: "cuda")
    monkeypatch.setattr(dispatch, "_failure", lambda *_: None)


def kernels(function, *shapes) -> dict[str, int]:
    """Kernels of ours that a function starts on a GPU, by name."""
    found: dict[str, int] = {}

    def visit(jaxpr, times):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "pallas_call":
                name = eqn.params.get("name") or eqn.params["name_and_src_info"].name  # of older jax
                found[name] = found.get(name, 0) + times
            elif "branches" in eqn.params:  # one per platform, CUDA's and ROCm's alike
                visit(eqn.params["branches"][0].jaxpr, times)
            else:
                for inner in jaxprs_in_params(eqn.params):
                    visit(inner, times * eqn.params.get("length", 1))

    visit(jax.make_jaxpr(function)(*shapes).jaxpr, 1)
    return found


def difference(more: dict[str, int], less: dict[str, int]) -> dict[str, int]:
    return {name: more[name] - less.get(name, 0) for name in more if more[name] > less.get(name, 0)}


def array(*shape: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def parts(case: rounds.Round):
    """Params of real shapes, the drafter's module and the family's, the drafter's state and the target's cache."""
    params = rounds.params(case)
    meta, family = params.meta, registry.target(params.meta.family)
    cache = functools.partial(family.init_cache, meta.target_cfg, ROWS, SLOTS, 16, jnp.bfloat16)
    if case.drafter is None:
        return params, None, family, None, jax.eval_shape(cache)
    module = registry.drafter(case.drafter)
    state = functools.partial(module.init_state, meta.drafter_cfg, ROWS, SLOTS, 16, jnp.bfloat16)
    return params, module, family, jax.eval_shape(state), jax.eval_shape(cache)


def drafting(case: rounds.Round, k: int) -> dict[str, int]:
    """Kernels of drafting k tokens."""
    params, module, family, state, cache = parts(case)
    meta = params.meta

    def run(weights, target, held, cache, tokens, length):
        view = functools.partial(family.kv_view, target, meta.target_cfg, cache)
        ctx = Ctx(tokens, length, length, length > 0, None, view)
        return module.draft(weights, Shared(target.embed, target.embed), meta.drafter_cfg, k, held, ctx, None)

    ints = functools.partial(array, ROWS, dtype=jnp.int32)
    return kernels(run, params.drafter, params.target, state, cache, ints(SLOTS), ints())


@pytest.mark.parametrize("method", ["eagle3", "mtp", pytest.param("assistant", marks=pytest.mark.long)])
def test_kernels_of_one_draft_step(pretend, method):
    """A step begins where the one before ended: drafts are not a loop of the device's either."""
    case = rounds.Round("Qwen3-8B", "mtp", mtp.config) if method == "mtp" else rounds.ROUNDS[method]
    assert difference(drafting(case, 2), drafting(case, 1)) == LAYER | {"head": 1} | MORE.get(method, {})


def test_kernels_of_one_layer(pretend, monkeypatch):
    """Of a drafted block, and of the target in a plain step."""

    def block(layers):
        settings = {"mask_id": 151669, "layout": "fill", "drafts": 7, "layers": layers}
        return drafting(rounds.Round("Qwen3-8B", "dflash", dflash.config, settings), 7)

    def plain(layers):
        monkeypatch.setattr(rounds, "LAYERS", layers)
        params, _, family, _, cache = parts(rounds.ROUNDS["plain"])
        cfg = params.meta.target_cfg

        def run(p, x, count, held):
            return family.forward(p, cfg, x, x, count, held, TapSpec(), "verify")

        return kernels(run, params.target, array(1, 1, dtype=jnp.int32), array(1, dtype=jnp.int32), cache)

    assert difference(block(2), block(1)) == difference(plain(2), plain(1)) == LAYER
