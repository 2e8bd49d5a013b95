"""Drafters with Gemma 4 layers, loaded from DeepSpec's layout: the network, conventions, what is refused; and ordinary
drafters for Gemma targets."""

import dataclasses
import functools
from typing import Any

import eagle3_reference
import gemma_drafter_reference as ref
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_files
from gemma_drafter_reference import APART, DSPARK, EAGLE3, FAULTS, MERGED, TARGET, VOCAB, WIDTH, Slow

import specjax
from specjax import checkpoints, registry, testing
from specjax.checkpoints import formats, hub
from specjax.drafters import body, dflash
from specjax.drafters.body import Body
from specjax.layers.norm import rms_norm, rms_norm_wide
from specjax.layers.rope import RopeConfig
from specjax.types import AbsorbIn, ArraySpec, Ctx, TapSpec

DFLASH = DSPARK | {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}
CASES = {"eagle3": (EAGLE3, MERGED), "dspark": (DSPARK, MERGED), "dspark, apart": (DSPARK, APART)}
LAYERS = ref.LAYERS
LENGTHS = (9, 4)  # of two rows
ATOL = 1e-4


@functools.cache
def target():
    return testing.tiny_params(3, hf=TARGET)


def shared():
    p = target()
    return registry.target(p.meta.family).shared(p.target, p.meta.target_cfg)


def load(path, hf, arrays, **settings):
    folder = tiny_files.folder(path / "d", hf, arrays)
    lent, source = shared(), hub.resolve(folder)
    return checkpoints.load_drafter(source, target().meta.target_cfg, lent, jnp.float32, settings=settings)


def no_view(kind: str):
    raise ValueError(kind)


def inputs(cfg, seed: int = 1):
    """Texts of two rows and the target's features of all their positions but the last."""
    rng, longest = np.random.default_rng(seed), max(LENGTHS)
    tokens = rng.integers(0, VOCAB, (2, longest))
    taps = {j: rng.standard_normal((2, longest - 1, WIDTH)).astype(np.float32) for j in cfg.taps}
    return tokens, taps


def proposal(found):
    """The drafter's state and proposal, drawn at temperature 1, after absorbing :func:`inputs`."""
    module, cfg = registry.drafter(found.name), found.cfg
    tokens, taps = inputs(cfg)
    tokens, end = jnp.asarray(tokens, jnp.int32), jnp.array(LENGTHS, jnp.int32)
    pos = jnp.broadcast_to(jnp.arange(tokens.shape[1] - 1, dtype=jnp.int32), (2, tokens.shape[1] - 1))
    hidden = jnp.zeros((*pos.shape, WIDTH))
    block = AbsorbIn(tokens[:, :-1], tokens[:, 1:], pos, end - 1, hidden, taps, "extend")

    @jax.jit
    def run(weights, lent, block, keys):
        state = module.init_state(cfg, 2, tokens.shape[1] + 10, 8, jnp.float32)
        state = module.absorb(weights, lent, cfg, state, block)
        anchor = jnp.take_along_axis(tokens, end[:, None] - 1, 1)[:, 0]
        ctx = Ctx(tokens, end, anchor, jnp.ones(2, bool), jnp.ones(2), no_view)
        return state, module.draft(weights, lent, cfg, cfg.k, state, ctx, keys)[0]

    return run(found.weights, shared(), block, jax.random.split(jax.random.key(0), 2))


def expected(slow: Slow, cfg, row: int, drafts):
    """(logits of a row's drafts, state or chances) by the reference."""
    tokens, taps = inputs(cfg)
    n = LENGTHS[row]
    parts = [np.asarray(taps[j][row, : n - 1], np.float64) for j in cfg.taps]
    if "block_size" in slow.hf:
        return slow.block_drafts(parts, int(tokens[row, n - 1]), drafts)
    return slow.eagle_chain(parts, tokens[row, 1:n], drafts)


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.mark.parametrize("case", CASES)
def test_the_network_of_a_published_file(case, tmp_path):
    """TAP.6, TAP.8, CKP.6: the distributions that drafts are drawn from, recycled steps included, and the state or the
    chances, are those of the float64 network; and every misreading of the file is far beyond the tolerance."""
    hf = CASES[case][0] | CASES[case][1]
    arrays = ref.tensors(hf)
    found = load(tmp_path, hf, arrays)
    state, out = proposal(found)
    for row in range(2):
        drafts = out.tokens[row].tolist()
        logits, more = expected(Slow(arrays, hf), found.cfg, row, drafts)
        np.testing.assert_allclose(np.log(out.q[row]), log_softmax(logits), atol=ATOL)
        ours = state.feedback[row] if found.name == "eagle3" else out.confidence[row]
        np.testing.assert_allclose(ours, more, atol=ATOL)
        for fault in FAULTS:
            wrong = expected(Slow(arrays, hf, fault), found.cfg, row, drafts)[0]
            if case == "eagle3" and fault == "raw embedding":  # it is normed: only epsilon shows
                continue
            assert np.abs(log_softmax(wrong) - log_softmax(logits)).max() > 30 * ATOL, fault


def test_what_a_file_says(tmp_path):
    """TAP.1, TAP.3: ids are outputs of layers; heads are those of full attention, rope too."""
    eagle = load(tmp_path / "e", EAGLE3, ref.tensors(EAGLE3))
    assert (eagle.name, eagle.format, eagle.made_for) == ("eagle3", "DeepSpec", "google/target")
    assert (eagle.cfg.taps, eagle.cfg.k, eagle.cfg.softcap) == ((0, 2, 3), 7, 4.0)
    assert eagle.cfg.input_scale == pytest.approx(WIDTH**0.5)
    spark = load(tmp_path / "s", DSPARK, ref.tensors(DSPARK))
    assert (spark.name, spark.cfg.layout, spark.cfg.k, spark.cfg.taps) == ("dspark", "shift", 4, (1, 3))
    for cfg in (eagle.cfg, spark.cfg):
        assert (cfg.body.kv_heads, cfg.body.head_dim, cfg.body.scale) == (1, 16, 1.0)
        assert (cfg.body.flavour, cfg.body.values_from_keys) == ("gemma4", True)
        assert cfg.body.rope == RopeConfig(4, 100.0, "proportional", span=16)
    plain = load(tmp_path / "p", DFLASH | APART, ref.tensors(DFLASH | APART), k=2)
    assert (plain.name, plain.cfg.k, plain.cfg.body.kv_heads) == ("dflash", 2, 2)
    assert not plain.cfg.body.values_from_keys


def test_tables_are_lent(tmp_path):
    """CKP.6: copies of the target's tables are not stored again, and the scale applies to the lent rows."""
    lent, arrays = shared(), ref.tensors(DFLASH)
    arrays |= {"embed_tokens.weight": np.asarray(lent.embed), "lm_head.weight": np.asarray(lent.head)}
    found = load(tmp_path, DFLASH, arrays)
    assert (found.weights.embed, found.weights.head) == (None, None)
    x = dflash.block_inputs(found.weights, lent, found.cfg, jnp.array([7], jnp.int32))
    np.testing.assert_allclose(x[0, :2], WIDTH**0.5 * lent.embed[jnp.array([7, ref.MASK])], rtol=1e-6)


def test_rope_that_is_not_stated(tmp_path):
    """TAP.4: told, and Gemma 4's."""
    found = load(tmp_path, EAGLE3 | {"rope_parameters": None}, ref.tensors(EAGLE3))
    assert (found.cfg.body.rope.kind, found.cfg.body.rope.theta, found.cfg.body.rope.dims) == (
        "proportional",
        1e6,
        4,
    )
    assert any("rope" in note for note in found.notes)


def test_newer_configs(tmp_path):
    """CKP.2: heads of full attention per layer in place of the two global keys."""
    hf = {k: v for k, v in EAGLE3.items() if k not in ("global_head_dim", "num_global_key_value_heads")}
    hf["per_layer_config"] = {"2": {"head_dim": 16, "num_key_value_heads": 1}}
    found = load(tmp_path, hf, ref.tensors(EAGLE3))
    assert (found.cfg.body.kv_heads, found.cfg.body.head_dim) == (1, 16)


LARGE = TARGET | {
    "vocab_size": 262144, "hidden_size": 3840, "intermediate_size": 15360, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 256, "num_global_key_value_heads": 1, "global_head_dim": 512,
    "num_hidden_layers": 48, "sliding_window": 1024, "max_position_embeddings": 262144, "layer_types": None,
}  # fmt: skip


def test_the_published_size():
    """TAP.3, TAP.7: a DSpark drafter for the 12B target by its shapes: five layers of 16 heads of 512 channels on one
    key head, and a projection of five taps."""
    hf = LARGE | {
        "architectures": ["Gemma4DSparkModel"], "num_hidden_layers": 5, "layer_types": ["full_attention"] * 5,
        "block_size": 7, "mask_token_id": 4, "target_layer_ids": [5, 17, 29, 41, 46], "num_target_layers": 48,
        "markov_rank": 256, "markov_head_type": "vanilla",
    }  # fmt: skip
    d, f, v, c = 3840, 15360, 262144, 512
    shapes = {
        "embed_tokens.weight": (v, d),
        "lm_head.weight": (v, d),
        "fc.weight": (d, 5 * d),
        "norm.weight": (d,),
    }
    shapes |= {"hidden_norm.weight": (d,)} | {f"markov_head.markov_w{i}.weight": (v, 256) for i in (1, 2)}
    for p in (f"layers.{i}." for i in range(5)):
        norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        shapes |= {f"{p}{name}_layernorm.weight": (d,) for name in norms} | {p + "layer_scalar": (1,)}
        shapes |= {f"{p}self_attn.{part}_norm.weight": (c,) for part in "qk"}
        shapes |= {p + "self_attn.q_proj.weight": (16 * c, d), p + "self_attn.k_proj.weight": (c, d)}
        shapes |= {p + "self_attn.o_proj.weight": (d, 16 * c), p + "mlp.down_proj.weight": (d, f)}
        shapes |= {f"{p}mlp.{part}_proj.weight": (f, d) for part in ("gate", "up")}
    large = registry.target("gemma4_text").config({k: x for k, x in LARGE.items() if x is not None})
    found = formats.detect(formats.Files("here", hf, shapes, no_view, large))
    tables = {"own_embed": True, "own_head": True}
    module = registry.drafter(found.method)
    cfg = module.config(found.settings | tables, large)
    specs = jax.tree.leaves(module.abstract(cfg), is_leaf=lambda x: isinstance(x, ArraySpec))
    assert {s.names[0]: np.prod(s.shape) for s in specs} == {n: np.prod(x) for n, x in shapes.items()}
    assert (found.method, cfg.k, cfg.taps, cfg.body.rope.dims) == ("dspark", 7, (6, 18, 30, 42, 47), 128)


VECTOR = np.ones(WIDTH, np.float32)
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "two projections": ({"attention_k_eq_v": False}, {}, "attention_k_eq_v=False, the tensors say True"),
    "head size": ({"global_head_dim": 8}, {}, "global_head_dim=8, the tensors say 16"),
    "key heads": ({"num_global_key_value_heads": 2}, {}, "heads of full attention=2, the tensors say 1"),
    "query heads": ({"num_attention_heads": 8}, {}, "num_attention_heads=8, the tensors say 4"),
    "experts": ({}, {"layers.0.router.scale": VECTOR}, "experts and inputs per layer"),
    "inputs per layer": ({}, {"layers.0.per_layer_input_gate.weight": VECTOR}, "experts and inputs per layer"),
    "not Gemma's": ({}, {"layers.0.layer_scalar": None}, "Gemma 4 layers has.*layer_scalar"),
    "no last norm": ({}, {"layers.0.post_feedforward_layernorm.weight": None}, "layers.0.post_feedforward_layernorm"),
    "activation": ({"hidden_activation": "gelu"}, {}, "hidden_activation='gelu'"),
    "sliding": ({"layer_types": ["sliding_attention"]}, {}, "attend to all positions"),
    "another target": ({"num_target_layers": 48}, {}, "48 layers, this one has 3"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, tmp_path):
    """TAP.3, TAP.7, TAP.8: what contradicts the tensors or is not implemented."""
    more, change, message = REFUSED[case]
    arrays = {k: x for k, x in (ref.tensors(EAGLE3) | change).items() if x is not None}
    with pytest.raises(ValueError, match=message):
        load(tmp_path, EAGLE3 | more, arrays)


def test_flavours_exclude_each_other():
    """TAP.8: a body is one of the two."""
    shape = {
        "hidden_size": 8,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 4,
        "mlp_size": 8,
        "eps": 1e-6,
        "rope": RopeConfig(4),
    }
    for qk_norm, more, message in (
        (False, {"flavour": "gemma4"}, "norms queries and keys"),
        (True, {"flavour": "gemma4", "o_bias": True}, "has no bias"),
        (True, {"values_from_keys": True}, "only a gemma4 body"),
    ):
        with pytest.raises(ValueError, match=message):
            Body(**shape, qk_norm=qk_norm, **more)
    with pytest.raises(ValueError, match=r"hidden_act='silu'.*'gemma4': gelu_pytorch_tanh"):
        body.body({"hidden_act": "silu"}, True, "gemma4")


def test_rounding_of_norms():
    """TAP.8: a bfloat16 row is rounded once in a Gemma body, twice in a plain one."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 8)), jnp.bfloat16)
    weight = jnp.asarray(np.linspace(0.3, 1.7, 8), jnp.bfloat16)
    plain = Body(
        hidden_size=8, heads=2, kv_heads=1, head_dim=4, mlp_size=8, eps=1e-6, rope=RopeConfig(4), qk_norm=True
    )
    gemma = dataclasses.replace(plain, flavour="gemma4")
    np.testing.assert_array_equal(body.norm(x, weight, plain), rms_norm(x, weight, 1e-6))
    np.testing.assert_array_equal(body.norm(x, weight, gemma), rms_norm_wide(x, weight, 1e-6))
    assert (body.norm(x, weight, plain) != body.norm(x, weight, gemma)).any()


@pytest.mark.parametrize("merged", [True, False])
def test_a_body_is_a_gemma_4_target(merged):
    """A causal block without context is a text: with a target's layers it gives that target's states."""
    hf = TARGET | {"layer_types": ["full_attention"] * LAYERS, "attention_k_eq_v": merged}
    p = testing.tiny_params(5, hf=hf)
    cfg, weights, kind = p.meta.target_cfg, p.target, p.meta.target_cfg.full
    fields = {f.name for f in dataclasses.fields(body.Layer)}
    layers = []
    for i, layer in enumerate(weights.layers):
        own = {f.name: getattr(layer, f.name) for f in dataclasses.fields(layer) if f.name in fields}
        own |= {"scalar": jnp.array([0.5 + i]), "q_norm": own["q_norm"] * 1.5}
        layers.append(body.Layer(**dict.fromkeys(fields) | own))
    changed = [
        a.replace(scalar=b.scalar, q_norm=b.q_norm) for a, b in zip(weights.layers, layers, strict=True)
    ]
    weights = weights.replace(layers=tuple(changed))
    shape = Body(
        hidden_size=WIDTH, heads=cfg.heads, kv_heads=kind.kv_heads, head_dim=kind.head_dim, mlp_size=cfg.dense_size,
        eps=cfg.eps, rope=kind.rope, qk_norm=True, windows=(None,) * LAYERS, flavour="gemma4", values_from_keys=merged,
    )  # fmt: skip
    tiny = dflash.tiny(cfg)
    settings = {
        "layout": "shift",
        "rows": 4,
        "input_scale": WIDTH**0.5,
        "causal": (True,) * LAYERS,
        "mask_id": 9,
    }
    drafter = dataclasses.replace(tiny, body=shape, **settings)
    own = testing.tiny_drafter(p, "dflash", 1, drafter).drafter.replace(
        layers=tuple(layers), norm=weights.norm
    )
    module = registry.target(p.meta.family)

    @jax.jit
    def both(own, weights):
        ids, pos, end = (
            jnp.array([[5, 9, 9, 9]]),
            jnp.arange(4, dtype=jnp.int32)[None],
            jnp.array([4], jnp.int32),
        )
        cache = module.init_cache(cfg, 1, 8, 4, jnp.float32)
        whole = module.forward(weights, cfg, ids, pos, end, cache, TapSpec(), "extend").hidden
        one = jnp.ones(1, jnp.int32)
        ctx = Ctx(ids, one, 5 * one, jnp.ones(1, bool), None, no_view)
        state = dflash.init_state(drafter, 1, 8, 4, jnp.float32)
        return whole, dflash.drafting_rows(own, module.shared(weights, cfg), drafter, 4, state, ctx)

    whole, block = both(own, weights)
    np.testing.assert_allclose(block, whole, atol=ATOL)
    assert np.abs(whole[0, 1] - whole[0, 3]).max() > 0.1  # positions matter


LLAMA = {
    "model_type": "llama", "hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 40, "vocab_size": VOCAB, "rms_norm_eps": 1e-3,
    "rope_theta": 10000.0, "hidden_act": "silu",
}  # fmt: skip


def llama_head() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A speculators head for a Gemma target: Llama's layer, no embedding of its own."""
    rng = np.random.default_rng(4)
    matrix = lambda n, m: (rng.standard_normal((n, m)) / m**0.5).astype(np.float32)  # noqa: E731
    vector = lambda n: (1 + 0.3 * rng.standard_normal(n)).astype(np.float32)  # noqa: E731
    p, a = "layers.0.", "layers.0.self_attn."
    norms = ("norm", *(p + n for n in ("hidden_norm", "input_layernorm", "post_attention_layernorm")))
    arrays = {f"{name}.weight": vector(WIDTH) for name in norms} | {
        "fc.weight": matrix(WIDTH, 3 * WIDTH), "lm_head.weight": 9 * matrix(VOCAB, WIDTH),
        a + "q_proj.weight": matrix(32, 2 * WIDTH), a + "k_proj.weight": matrix(16, 2 * WIDTH),
        a + "v_proj.weight": matrix(16, 2 * WIDTH), a + "o_proj.weight": matrix(WIDTH, 32),
        p + "mlp.gate_proj.weight": matrix(40, WIDTH), p + "mlp.up_proj.weight": matrix(40, WIDTH),
        p + "mlp.down_proj.weight": matrix(WIDTH, 40),
    }  # fmt: skip
    config = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": VOCAB,
        "eagle_aux_hidden_state_layer_ids": [0, 2, 3], "norm_before_residual": True, "tie_word_embeddings": False,
        "transformer_layer_config": LLAMA,
        "speculators_config": {
            "proposal_methods": [{"speculative_tokens": 3}], "verifier": {"name_or_path": "google/gemma-4"},
        },
    }  # fmt: skip
    return config, arrays


def test_a_llama_head_for_a_gemma_target(tmp_path):
    """TAP.8: the embedding is the target's raw row, without its scale, and its soft cap is not the drafter's."""
    config, arrays = llama_head()
    found, lent = load(tmp_path, config, arrays), shared()
    assert (lent.embed_scale, lent.softcap) == (pytest.approx(WIDTH**0.5), 4.0)
    assert (found.weights.embed, found.cfg.input_scale, found.cfg.softcap) == (None, 1.0, None)
    state, out = proposal(found)
    tokens, taps = inputs(found.cfg)
    for row, n in enumerate(LENGTHS):
        slow = eagle3_reference.Slow(arrays, LLAMA, np.asarray(lent.embed), norm_before_residual=True)
        fused = slow.fuse([taps[j][row, : n - 1] for j in found.cfg.taps])
        seen, states = slow.absorb(fused, tokens[row])
        np.testing.assert_allclose(state.feedback[row], states[-1], atol=ATOL)
        logits, last = seen[-1], states[-1]
        for i, draft in enumerate(out.tokens[row].tolist()):
            np.testing.assert_allclose(np.log(out.q[row, i]), log_softmax(logits), atol=ATOL)
            logits, last = slow.row(last, draft, n - 1 + i)


def test_a_qwen_block_for_a_gemma_target():
    """TAP.8: block rows are the target's raw ones times the drafter's own scale, and logits have the drafter's cap."""
    p, lent = testing.tiny_drafter(target(), "dflash", 1, input_scale=3.0, mask_id=ref.MASK), shared()
    cfg = p.meta.drafter_cfg
    x = dflash.block_inputs(p.drafter, lent, cfg, jnp.array([7], jnp.int32))
    np.testing.assert_allclose(x[0, :2], 3 * lent.embed[jnp.array([7, ref.MASK])], rtol=1e-6)
    raw = np.asarray(x) @ np.asarray(lent.head).T
    np.testing.assert_allclose(dflash.unembed(p.drafter, lent, cfg, x), raw, rtol=1e-4, atol=ATOL)


@pytest.mark.long
@pytest.mark.parametrize("name", ["eagle3", "dflash", "dspark"])
def test_a_loaded_drafter_drafts(name, tmp_path):
    """GRD.1, GRD.3: from DeepSpec's folder to the target's own tokens."""
    hf = {"eagle3": EAGLE3, "dflash": DFLASH, "dspark": DSPARK}[name]
    found, base = load(tmp_path, hf, ref.tensors(hf), k=3), target()
    meta = dataclasses.replace(base.meta, drafter=found.name, drafter_cfg=found.cfg)
    prompts, options = [[1, 2, 3], [4]], {"max_new_tokens": 40, "ignore_eos": True}
    out = specjax.decode(base.replace(drafter=found.weights, meta=meta), prompts, **options)
    assert (found.name, out.tokens) == (name, specjax.decode(base, prompts, **options).tokens)
    assert out.total.proposed > 0
