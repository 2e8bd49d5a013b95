"""nnx modules in tunix's layout: same logits as the module's own forward pass, written here by einsum."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from specjax import checkpoints, registry
from specjax.types import TapSpec


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    num_layers: int = 2
    vocab_size: int = 48
    embed_dim: int = 24
    hidden_dim: int = 40
    num_heads: int = 4
    head_dim: int = 8
    num_kv_heads: int = 2
    rope_theta: int = 1_000_000
    norm_eps: float = 1e-6
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    tied: bool = False
    head_norms: bool = False


class Weight(nnx.Module):
    """Holds one array under ``w``: tunix's Einsum and RMSNorm."""

    def __init__(self, rng, *shape, norm=False):
        self.w = nnx.Param(draw(rng, *shape) + 0.8 if norm else draw(rng, *shape))


class Linear(nnx.Module):
    """nnx.Linear without bias."""

    def __init__(self, rng, *shape):
        self.kernel = nnx.Param(draw(rng, *shape))


def draw(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape) * 0.3, jnp.float32)


class Attention(nnx.Module):
    def __init__(self, c, rng):
        self.q_proj = Weight(rng, c.embed_dim, c.num_heads, c.head_dim)
        self.k_proj = Weight(rng, c.embed_dim, c.num_kv_heads, c.head_dim)
        self.v_proj = Weight(rng, c.embed_dim, c.num_kv_heads, c.head_dim)
        self.o_proj = Weight(rng, c.num_heads, c.head_dim, c.embed_dim)
        if c.head_norms:
            self.q_norm, self.k_norm = (Weight(rng, c.head_dim, norm=True) for _ in "qk")


class Mlp(nnx.Module):
    def __init__(self, c, rng):
        if c.num_experts is None:
            self.gate_proj, self.up_proj = (Linear(rng, c.embed_dim, c.hidden_dim) for _ in "gu")
            self.down_proj = Linear(rng, c.hidden_dim, c.embed_dim)
            return
        self.router = Linear(rng, c.embed_dim, c.num_experts)
        stack = lambda *s: nnx.Param(draw(rng, c.num_experts, *s))  # noqa: E731
        self.gate_proj, self.up_proj = (stack(c.embed_dim, c.hidden_dim) for _ in "gu")
        self.down_proj = stack(c.hidden_dim, c.embed_dim)


class Block(nnx.Module):
    def __init__(self, c, rng):
        self.input_layernorm = Weight(rng, c.embed_dim, norm=True)
        self.attn = Attention(c, rng)
        self.post_attention_layernorm = Weight(rng, c.embed_dim, norm=True)
        self.mlp = Mlp(c, rng)


class Embedder(nnx.Module):
    def __init__(self, c, rng):
        self.input_embedding = nnx.Param(draw(rng, c.vocab_size, c.embed_dim) * 3)


class Model(nnx.Module):
    def __init__(self, config, seed=0):
        rng = np.random.default_rng(seed)
        self.config = config
        self.embedder = Embedder(config, rng)
        self.layers = nnx.List([Block(config, rng) for _ in range(config.num_layers)])
        self.final_norm = Weight(rng, config.embed_dim, norm=True)
        if not config.tied:
            self.lm_head = Weight(rng, config.embed_dim, config.vocab_size)


CONFIGS = {
    "llama": ModelConfig(),
    "qwen3": ModelConfig(head_norms=True, tied=True),
    "qwen3_moe": ModelConfig(head_norms=True, num_experts=4, num_experts_per_tok=2),
}


def norm(x, w, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w


def rope(x, theta):
    t, half = x.shape[0], x.shape[-1] // 2
    angle = np.arange(t)[:, None] * theta ** (-np.arange(half) / half)
    c, s = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * c - b * s, b * c + a * s], -1)


def silu(x):
    return x / (1 + np.exp(-x))


def reference(model, tokens):
    """Float64 logits [T V] of one sequence."""
    c = model.config
    get = lambda p: np.asarray(p.get_value(), np.float64)  # noqa: E731
    x = get(model.embedder.input_embedding)[tokens]
    for layer in model.layers:
        h = norm(x, get(layer.input_layernorm.w), c.norm_eps)
        x = x + attention(layer.attn, c, h, get)
        h = norm(x, get(layer.post_attention_layernorm.w), c.norm_eps)
        x = x + feed_forward(layer.mlp, c, h, get)
    x = norm(x, get(model.final_norm.w), c.norm_eps)
    return x @ (get(model.embedder.input_embedding).T if c.tied else get(model.lm_head.w))


def attention(attn, c, h, get):
    q, k, v = (np.einsum("td,dnh->tnh", h, get(getattr(attn, f"{n}_proj").w)) for n in "qkv")
    if c.head_norms:
        q, k = norm(q, get(attn.q_norm.w), c.norm_eps), norm(k, get(attn.k_norm.w), c.norm_eps)
    q, k = rope(q, c.rope_theta), rope(k, c.rope_theta)
    k, v = (np.repeat(y, c.num_heads // c.num_kv_heads, 1) for y in (k, v))
    scores = np.einsum("tnh,snh->nts", q, k) * c.head_dim**-0.5
    scores = np.where(np.tri(len(h), dtype=bool), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("nts,snh,nhd->td", p / p.sum(-1, keepdims=True), v, get(attn.o_proj.w))


def feed_forward(mlp, c, h, get):
    if c.num_experts is None:
        g, u, d = (get(getattr(mlp, f"{n}_proj").kernel) for n in ("gate", "up", "down"))
        return (silu(h @ g) * (h @ u)) @ d
    p = np.exp(h @ get(mlp.router.kernel))
    p /= p.sum(-1, keepdims=True)
    out = np.zeros_like(h)
    for t in range(len(h)):
        chosen = np.argsort(-p[t])[: c.num_experts_per_tok]
        for e in chosen:
            g, u, d = (get(getattr(mlp, f"{n}_proj"))[e] for n in ("gate", "up", "down"))
            out[t] += p[t, e] / p[t, chosen].sum() * ((silu(h[t] @ g) * (h[t] @ u)) @ d)
    return out


@pytest.mark.parametrize("family", CONFIGS)
def test_same_logits(family):
    model = Model(CONFIGS[family])
    params = checkpoints.from_nnx(model)
    assert params.meta.family == family
    assert params.meta.name == "Model"
    module, cfg = registry.target(family), params.meta.target_cfg
    tokens = np.random.default_rng(0).integers(0, 48, 11)

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiles faster
    def logits(weights, tokens):
        cache = module.init_cache(cfg, 1, 16, 1, jnp.float32)
        pos, valid = jnp.arange(11)[None], jnp.array([11])
        out = module.forward(weights, cfg, tokens[None], pos, valid, cache, TapSpec(), "extend")
        return module.unembed(weights, cfg, out.hidden)[0]

    got = logits(params.target, jnp.asarray(tokens))
    np.testing.assert_allclose(got, reference(model, tokens), atol=1e-4)


def test_type_and_extra_settings():
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    hf = {"rope_scaling": scaling, "max_position_embeddings": 131072, "eos_token_id": [3, 1]}
    params = checkpoints.from_nnx(Model(CONFIGS["llama"]), jnp.bfloat16, hf_config=hf, tokenizer_id="bytes")
    assert {x.dtype.name for x in jax.tree.leaves(params.target)} == {"bfloat16"}
    assert (params.meta.target_cfg.rope.kind, params.meta.target_cfg.max_positions) == ("llama3", 131072)
    assert (params.meta.eos_ids, params.meta.tokenizer_id) == ((1, 3), "bytes")


def test_missing_and_unexpected_weights():
    """CKP.4"""
    model = Model(CONFIGS["qwen3"])
    del model.layers[1].mlp.up_proj
    with pytest.raises(ValueError, match=r"the nnx module lacks 1 tensor.*layers\.1\.mlp\.up_proj"):
        checkpoints.from_nnx(model)
    model = Model(CONFIGS["llama"])
    model.adapter = nnx.Param(jnp.ones(3))
    with pytest.warns(UserWarning, match="adapter"):
        checkpoints.from_nnx(model)


def test_refused_modules():
    model = Model(CONFIGS["llama"])
    model.layers[0].attn.q_proj.w_lora_a = nnx.Param(jnp.ones(3))
    with pytest.raises(ValueError, match=r"LoRA weights \(layers\.0\.attn\.q_proj\.w_lora_a"):
        checkpoints.from_nnx(model)
    model = Model(CONFIGS["llama"])
    model.config = None
    with pytest.raises(ValueError, match=r"no \.config"):
        checkpoints.from_nnx(model)
    model = Model(dataclasses.replace(CONFIGS["llama"]))
    model.config = dataclasses.replace(model.config, num_heads=8)
    with pytest.raises(
        ValueError, match=r"q_proj\.weight has shape \(4, 8, 24\), this model needs \(8, 8, 24\)"
    ):
        checkpoints.from_nnx(model)
