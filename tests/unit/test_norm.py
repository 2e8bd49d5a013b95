"""Norms and activations round as the models they were written for do, bit by bit in bfloat16."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from specjax.layers import mlp, norm

THEIRS = {
    "rms_norm": LlamaRMSNorm,
    "rms_norm_offset": Gemma3RMSNorm,
    "rms_norm_wide": Gemma4RMSNorm,
    "no weight": lambda dim, eps: Gemma4RMSNorm(dim, eps, with_scale=False),
}


def ours(name, x, weight):
    if name == "no weight":
        return norm.rms_norm_wide(x, None, 1e-6)
    return getattr(norm, name)(x, weight, 1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", THEIRS)
def test_norms(name, dtype):
    """NUM.2"""
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((50, 64), np.float32) * 3, rng.standard_normal(64, np.float32)
    theirs = THEIRS[name](64, eps=1e-6).to(getattr(torch, dtype))
    with torch.no_grad():
        if name != "no weight":
            theirs.weight.copy_(torch.tensor(weight))
        want = theirs(torch.tensor(x).to(getattr(torch, dtype))).float().numpy()
    got = ours(name, jnp.asarray(x, dtype), jnp.asarray(weight, dtype))
    assert got.dtype == dtype
    got = np.asarray(got, np.float32)
    if dtype == "float32":
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-6)
    else:  # the last bit of a reciprocal square root may tip a rounding now and then
        np.testing.assert_allclose(got, want, rtol=2**-7, atol=1e-6)
        assert (got != want).mean() < 0.01


def test_the_roundings_differ_in_bfloat16():
    """Using one for another would go unnoticed in float32."""
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((50, 64)), jnp.bfloat16)
    weight = jnp.asarray(1 + rng.standard_normal(64) / 4, jnp.bfloat16)
    narrow, wide = norm.rms_norm(x, weight, 1e-6), norm.rms_norm_wide(x, weight, 1e-6)
    assert (np.asarray(narrow) != np.asarray(wide)).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gelu(dtype):
    x = np.linspace(-6, 6, 1001, dtype=np.float32)
    want = ACT2FN["gelu_pytorch_tanh"](torch.tensor(x).to(getattr(torch, dtype))).float().numpy()
    got = np.asarray(mlp.gelu_tanh(jnp.asarray(x, dtype)), np.float32)
    np.testing.assert_allclose(got, want, atol=2e-6, rtol=2**-7 if dtype == "bfloat16" else 1e-5)


def test_geglu_is_what_it_says():
    rng = np.random.default_rng(2)
    x, gate, up, down = (
        jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((1, 3, 8), (16, 8), (16, 8), (8, 16))
    )
    act = ACT2FN["gelu_pytorch_tanh"](torch.tensor(np.asarray(x @ gate.T))).numpy()
    np.testing.assert_allclose(mlp.geglu(x, gate, up, down), (act * (x @ up.T)) @ down.T, atol=1e-4)
