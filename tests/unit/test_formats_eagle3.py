"""Folders of EAGLE-3 drafters in every layout: one network behind them, their conventions, and what is refused."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import eagle3_tiny as tiny
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import specjax
from specjax import checkpoints, testing
from specjax.types import Shared

LAYERS = 12  # of the target: deep enough for the default taps


def target():
    return testing.tiny_params(5, vocab=tiny.VOCAB, width=tiny.WIDTH, layers=LAYERS)


@pytest.fixture(scope="module")
def params():
    return target()


def tensors(kind: str = "llama", prefix: str = "midlayer.") -> dict[str, np.ndarray]:
    """What a file of the drafter holds."""
    return {name.replace("layers.0.", prefix): x for name, x in tiny.published(tiny.drafted(kind)).items()}


def marks(ids=tiny.IDS) -> np.ndarray:
    return np.isin(np.arange(tiny.VOCAB), ids)


def flat(kind: str = "llama", **more: Any) -> dict[str, Any]:
    """config.json in the authors' layout."""
    given = {k: v for k, v in tiny.KINDS[kind][1].items() if k in FLAGS}
    return {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **tiny.LAYER, **tiny.KINDS[kind][0]} | {
        "draft_vocab_size": tiny.VOCAB, **given, **more,
    }  # fmt: skip


FLAGS = (
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "logit_scale",
    "draft_vocab_size",
)


def nested(kind: str = "llama", **more: Any) -> dict[str, Any]:
    """config.json of the speculators library."""
    flags = dict.fromkeys(FLAGS[:4], False) | {k: v for k, v in tiny.KINDS[kind][1].items() if k in FLAGS}
    model_type = "qwen3" if tiny.KINDS[kind][1].get("qk_norm") else "llama"
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": tiny.VOCAB,
        "eagle_aux_hidden_state_layer_ids": [0, 2, 3],
        "embed_requires_grad": False,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": {"model_type": model_type, **tiny.LAYER, **tiny.KINDS[kind][0]},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
            "verifier": {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]},
        },
        **flags,
        **more,
    }


def copied(**more: Any) -> dict[str, Any]:
    """config.json of DeepSpec."""
    return {
        "architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3", **tiny.LAYER, "layer_types": ["full_attention"],
        "target_layer_ids": [-1, 1, 2], "num_target_layers": LAYERS, "ttt_length": 7, "step_loss_decay": 0.8,
        "draft_num_hidden_layers": 1, "target_model_name_or_path": "Qwen/target", "tie_word_embeddings": False, **more,
    }  # fmt: skip


def write(folder: Path, hf: dict[str, Any], arrays: dict[str, np.ndarray]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf))
    save_file({k: np.ascontiguousarray(x) for k, x in arrays.items()}, folder / "model.safetensors")
    return folder


def load(params, folder: Path, **settings: Any):
    lent = Shared(params.target.embed, params.target.head)
    source = checkpoints.hub.resolve(folder)
    return checkpoints.load_drafter(source, params.meta.target_cfg, lent, jnp.float32, settings=settings)


def found(params, tmp_path, hf, arrays, **settings):
    return load(params, write(tmp_path / "drafter", hf, arrays), **settings)


def same(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


# ---------------------------------------------------------------- one network, every layout

LAYOUTS = {
    "EAGLE": ("llama", flat(eagle_aux_hidden_state_layer_ids=[0, 2, 3]), "midlayer."),
    "EAGLE, model. in front": ("llama", flat(eagle_aux_hidden_state_layer_ids=[0, 2, 3]), "model.layers.0."),
    "SpecForge 3.1": (
        "qwen3, 3.1",
        flat("qwen3, 3.1", eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}),
        "midlayer.",
    ),
    "speculators": ("llama", nested(), "layers.0."),
    "speculators, qwen3": ("qwen3, 3.1", nested("qwen3, 3.1"), "layers.0."),
    "speculators, reduced": ("reduced", nested("reduced", norm_before_fc=True, draft_vocab_size=4), "layers.0."),
    "latent": (
        "latent",
        flat("latent", architectures=["Eagle3DeepseekV2ForCausalLM"], model_type="kimi_k2")
        | {"eagle_aux_hidden_state_layer_ids": [0, 2, 3], "first_k_dense_replace": 1, "n_routed_experts": None},
        "midlayer.",
    ),
    "ModelOpt": (
        "no taps",
        flat(
            eagle_config={
                "use_aux_hidden_state": False, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
                "use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1,
                "parallel_draft_heads_num_layers": None, "eagle_aux_hidden_state_layer_ids": [],
            }
        ),
        "midlayer.",
    ),
    "DeepSpec": ("llama", copied(), "layers.0."),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_network_in_every_layout(layout, params, tmp_path):
    """TAP.8, CKP.2, CKP.6: weights and flags arrive, whatever the names and places."""
    kind, hf, prefix = LAYOUTS[layout]
    arrays = tensors(kind, prefix)
    if kind == "reduced":
        arrays["t2d"] = marks()
    if layout == "EAGLE, model. in front":
        arrays = {
            name if name.startswith("model.") or name == "lm_head.weight" else f"model.{name}": x
            for name, x in arrays.items()
        }
    got, wanted = found(params, tmp_path, hf, arrays), tiny.drafted(kind)
    same(got.weights, wanted.drafter)
    k = {"speculators": 4, "DeepSpec": 7}.get(layout.split(",")[0], 3)
    taps = (2, 3, 5) if layout == "SpecForge 3.1" else wanted.meta.drafter_cfg.taps
    rebuilt = dataclasses.replace(wanted.meta.drafter_cfg, k=k, taps=taps)
    assert got.cfg == rebuilt
    assert got.name == "eagle3"


TAPS = {
    "speculators": (nested(), (0, 2, 3), False),
    "speculators, nothing said": (nested(eagle_aux_hidden_state_layer_ids=None), (2, 6, 9), True),
    "DeepSpec": (copied(), (0, 2, 3), False),
    "DeepSpec, embedding": (copied(target_layer_ids=[-1, 1, 11]), (0, 2, 12), False),
    "top level": (flat(eagle_aux_hidden_state_layer_ids=[1, 5, 11]), (1, 5, 11), False),
    "nested outputs": (flat(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 5, 8]}), (2, 6, 9), True),
    "nested inputs": (flat(eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 6, 9]}), (2, 6, 9), True),
    "nested wins": (
        flat(
            eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 6, 9]},
            eagle_aux_hidden_state_layer_ids=[3, 7, 8],
        ),
        (2, 6, 9),
        True,
    ),
    "nothing said": (flat(), (2, 6, 9), True),
    "order does not matter": (flat(eagle_aux_hidden_state_layer_ids=[9, 2, 6]), (2, 6, 9), False),
}


@pytest.mark.parametrize("case", TAPS)
def test_tap_conventions(case, params, tmp_path):
    """TAP.1: which residual stream an id means in each format; a guess is told, and ``taps`` overrides it."""
    hf, taps, told = TAPS[case]
    arrays = tensors(prefix="layers.0." if "eagle_config" not in hf else "midlayer.")
    got = found(params, tmp_path, hf, arrays)
    assert got.cfg.taps == taps
    assert told == any("layers" in note for note in got.notes)
    assert load(params, tmp_path / "drafter", taps=[0, 6, 12]).cfg.taps == (0, 6, 12)


def test_what_files_do_not_say_is_told(params, tmp_path):
    """CKP.1's rule for this method: assumptions are notes; settings override what a file says."""
    hf = nested()
    del hf["norm_before_residual"]
    got = found(params, tmp_path, hf, tensors(prefix="layers.0."))
    assert got.cfg.norm_before_residual
    assert "norm_before_residual; true is assumed" in "".join(got.notes)
    assert got.made_for == "some/target"
    changed = load(
        params, tmp_path / "drafter", norm_before_residual=False, k=2, drafting="greedy", norm_output=True
    )
    assert (changed.cfg.k, changed.cfg.drafting, changed.cfg.norm_output) == (2, "greedy", True)
    assert not changed.cfg.norm_before_residual
    old = found(params, tmp_path, flat(norm_output=True), tensors())
    assert "SpecForge" in "".join(old.notes)
    assert load(params, tmp_path / "drafter", taps=[2, 6, 9], k=2, norm_output=False).notes == ()
    assert "3 is assumed" in "".join(old.notes)
    with pytest.raises(ValueError, match=r"drafter.*setting\(s\) \['layout'\]"):
        load(params, tmp_path / "drafter", layout="fill")


def test_embedding_and_head(params, tmp_path):
    """CKP.6: own tables are used, copies of the target's and absent ones are borrowed, tied ones shared."""
    arrays, embed = tensors(), np.asarray(params.target.embed)
    own = found(params, tmp_path, flat(), arrays | {"embed_tokens.weight": embed + 1}).weights
    np.testing.assert_array_equal(own.embed, embed + 1)
    assert found(params, tmp_path, flat(), arrays | {"embed_tokens.weight": embed}).weights.embed is None
    assert found(params, tmp_path, flat(), arrays).weights.embed is None
    lent = found(params, tmp_path, flat(), arrays | {"lm_head.weight": np.asarray(params.target.head)})
    assert lent.weights.head is None
    assert not lent.cfg.own_head
    headless = {k: v for k, v in arrays.items() if k != "lm_head.weight"}
    assert found(params, tmp_path, flat(), headless).weights.head is None
    tied = found(
        params, tmp_path, flat(tie_word_embeddings=True), headless | {"embed_tokens.weight": embed + 1}
    )
    np.testing.assert_array_equal(tied.weights.head, embed + 1)


def test_a_reduced_vocabulary_on_the_targets_head(params, tmp_path):
    """VOC.1, CKP.6: without a head of its own the drafter reads the target's rows that d2t names."""
    arrays = {k: v for k, v in tensors("reduced").items() if k != "lm_head.weight"}
    got = found(params, tmp_path, flat("reduced"), arrays)
    from specjax.drafters import eagle3_model

    lent, state = Shared(params.target.embed, params.target.head), jnp.ones((1, tiny.WIDTH))
    some = eagle3_model.logits(got.weights, lent, got.cfg, state)
    whole = found(
        params,
        tmp_path,
        flat(logit_scale=0.5),
        {k: v for k, v in arrays.items() if k not in ("d2t", "input_norm.weight")},
    )
    every = eagle3_model.logits(whole.weights, lent, whole.cfg, state)
    np.testing.assert_allclose(some, every[:, tiny.IDS], atol=1e-5)


def test_a_loaded_drafter_drafts(tmp_path):
    """GRD.1, GRD.3: from the folder to the target's own tokens."""
    params = tiny.target()
    folder = write(
        tmp_path / "drafter", nested("reduced", draft_vocab_size=4), tensors("reduced", "layers.0.")
    )
    loaded = load(params, folder)
    meta = dataclasses.replace(params.meta, drafter=loaded.name, drafter_cfg=loaded.cfg)
    drafted = params.replace(drafter=loaded.weights, meta=meta)
    options = {"max_new_tokens": 24, "max_len": 64}
    out, plain = (specjax.decode(p, [[1, 2, 3], [4]], **options) for p in (drafted, params))
    assert out.tokens == plain.tokens
    assert out.total.proposed > 0


# ---------------------------------------------------------------- what is refused


def without(*names: str, kind: str = "llama") -> dict[str, np.ndarray]:
    return {k: v for k, v in tensors(kind).items() if k not in names}


def broken_map(**arrays: np.ndarray) -> dict[str, np.ndarray]:
    return tensors("reduced") | {"t2d": marks()} | arrays


LAYERS_0 = functools.partial(tensors, prefix="layers.0.")
VECTOR, FC = np.ones(tiny.WIDTH, np.float32), np.ones((tiny.WIDTH, 2 * tiny.WIDTH), np.float32)
REFUSED = {
    "fc and taps": (
        flat(), lambda: tensors() | {"fc.weight": FC}, r"reads 32 features, but 3 taps \[2, 6, 9\] .* give 48",
    ),
    "tap of another target": (
        flat(eagle_aux_hidden_state_layer_ids=[2, 18, 33]), tensors, r"after \[18, 33\] layers",
    ),
    "counted taps": (flat(num_aux_hidden_states=2), tensors, "num_aux_hidden_states is 2, but 3 taps"),
    "other target width": (flat(target_hidden_size=20), tensors, "width 20, this one is 16"),
    "no map": (flat("reduced"), lambda: without("d2t", kind="reduced"), "target's 7, but there is no map"),
    "map too long": (flat("reduced", draft_vocab_size=3), lambda: broken_map(), "d2t maps 4 ids, the config says 3"),
    "map outside": (flat("reduced"), lambda: broken_map(d2t=np.array([0, 0, 0, 9])), r"vocabulary \[0, 7\)"),
    "map repeats": (flat("reduced"), lambda: broken_map(d2t=np.array([0, -1, 0, 0])), "another id"),
    "absolute ids": (flat("reduced"), lambda: broken_map(d2t=tiny.IDS), "t2d marks|another id|vocabulary"),
    "marks disagree": (flat("reduced"), lambda: broken_map(t2d=marks([0, 1, 2, 3])), "t2d marks 4 target ids"),
    "marks too few": (flat("reduced"), lambda: broken_map(t2d=marks([1, 2])), "t2d marks 2 target ids"),
    "head of another size": (
        flat("reduced"),
        lambda: broken_map() | {"lm_head.weight": np.ones((5, tiny.WIDTH), np.float32)},
        "stated differently",
    ),
    "other vocabulary": (
        flat(vocab_size=20, draft_vocab_size=20), lambda: without("lm_head.weight"), "20 tokens, the target's has 7",
    ),
    "no fc": (flat(), lambda: without("fc.weight"), r"lacks 1 tensor\(s\).*fc.weight"),
    "no layer": (flat(), lambda: without("midlayer.self_attn.o_proj.weight"), "layers.0.self_attn.o_proj.weight"),
    "fc_norm said": (flat(fc_norm=True), tensors, "fc_norm=True, but fc_norm.0.weight is missing"),
    "fc_norm denied": (flat(fc_norm=False), lambda: tensors() | {"fc_norm.0.weight": VECTOR}, "is there"),
    "input_norm said": (flat(norm_before_fc=True), tensors, "norm_before_fc=True, but input_norm.weight is missing"),
    "bias said": (flat(attention_bias=True), tensors, "attention_bias=True, but layers.0.self_attn.q_proj.bias"),
    "two places": (flat(norm_output=True, eagle_config={"norm_output": False}), tensors, "norm_output is True at"),
    "unfused with fc": (flat(eagle_config={"use_aux_hidden_state": False}), tensors, "use_aux_hidden_state is false"),
    "another first layer": (
        flat(eagle_config={"use_input_layernorm_in_first_layer": False}),
        tensors,
        "use_input_layernorm_in_first_layer",
    ),
    "parallel": (flat(), lambda: tensors() | {"mask_hidden": VECTOR}, "parallel EAGLE"),
    "EAGLE 2": (flat(), lambda: without("midlayer.hidden_norm.weight"), "EAGLE 1 and 2 are not supported"),
    "quantised": (flat(quantization_config={"quant_method": "fp8"}), tensors, "quantised with 'fp8'"),
    "activation": (flat(hidden_act="gelu"), tensors, "hidden_act='gelu'"),
    "rope": (flat(rope_scaling={"rope_type": "longrope", "factor": 2.0}), tensors, "unknown rope type 'longrope'"),
    "no positions": (flat("latent", mla_use_nope=True), lambda: tensors("latent"), "mla_use_nope=True"),
    "P-EAGLE": (nested(speculators_model_type="peagle"), LAYERS_0, "'peagle' are not supported"),
    "layers of the target": (copied(num_target_layers=36), LAYERS_0, "36 layers, this one has 12"),
    "Gemma by name": (
        copied(architectures=["Gemma4Eagle3Model"]), LAYERS_0, "lacks.*Gemma 4 layers.*layers.0.layer_scalar",
    ),
    "missing size": (flat(num_attention_heads=None), tensors, "lacks 'num_attention_heads'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, params, tmp_path):
    """TAP.2, TAP.3, TAP.7, TAP.8, VOC.1, VOC.2, VOC.4, CKP.3, CKP.4: with the setting, tensor or number at fault."""
    hf, arrays, message = REFUSED[case]
    hf = {k: v for k, v in hf.items() if v is not None}
    with pytest.raises(ValueError, match=message):
        found(params, tmp_path, hf, arrays())


def test_unknown_settings_are_loud(params, tmp_path):
    """TAP.8: a flag nobody knows, at any level, is a warning that names it; so is a tensor nobody reads."""
    for hf in (flat(gated_fusion=True), flat(eagle_config={"gated_fusion": True})):
        with pytest.warns(UserWarning, match="gated_fusion"):
            found(params, tmp_path, hf, tensors())
    inner = nested()
    inner["transformer_layer_config"]["gated_attention"] = True
    with pytest.warns(UserWarning, match="gated_attention"):
        found(params, tmp_path, inner, tensors(prefix="layers.0."))
    with pytest.warns(UserWarning, match=r"gate\.weight"):
        found(params, tmp_path, flat(), tensors() | {"gate.weight": VECTOR})
    quiet = {"t2d": marks(range(7)), "verifier_norm.weight": VECTOR, "d2t": np.zeros(7, np.int64)}
    assert not found(params, tmp_path, flat(), tensors() | quiet).cfg.reduced


def test_another_kind_than_expected(params, tmp_path):
    """CKP.3."""
    folder = write(tmp_path / "drafter", flat(), tensors())
    lent = Shared(params.target.embed, params.target.head)
    with pytest.raises(ValueError, match=r"holds a drafter of kind eagle3 .*, not dflash"):
        checkpoints.load_drafter(
            checkpoints.hub.resolve(folder), params.meta.target_cfg, lent, jnp.float32, method="dflash"
        )
