"""Drafters written to folders: every kind in every layout, what is refused, what is never overwritten."""

import dataclasses
import functools
import json
import warnings

import assistant_tiny
import block_tiny
import eagle3_tiny
import families
import gemma_drafter_reference as gemma
import jax
import jax.numpy as jnp
import mtp_files
import numpy as np
import pytest
import tiny_files
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

import specjax
from specjax import checkpoints, cli, registry, testing
from specjax.checkpoints import exporter, hub, writers
from specjax.drafters import dflash
from specjax.types import ArraySpec, Params


@functools.cache
def target() -> Params:
    """Four layers, so that taps need not be the last."""
    return testing.tiny_params(layers=4, vocab=block_tiny.VOCAB)


LAYER = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 24,
}  # fmt: skip
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}


def made(base: Params, method: str, settings) -> Params:
    """A random drafter for a target, bfloat16 numbers throughout."""
    module = registry.drafter(method)
    params = testing.tiny_drafter(base, method, 1, module.config(settings, base.meta.target_cfg))
    return dataclasses.replace(params, drafter=jax.tree.map(rounded, params.drafter))


def rounded(x):
    x = np.asarray(x)  # on the host: nothing is compiled
    return jnp.asarray(x.astype(jnp.bfloat16).astype(x.dtype)) if jnp.issubdtype(x.dtype, jnp.floating) else x


def eagle(layers=(), **more):
    one = LAYER | {"num_hidden_layers": 1} | dict(layers)
    return made(target(), "eagle3", {"transformer": one, "taps": (0, 1, 3), "k": 4} | more)


def block(method="dflash", layers=(), causal=(False, False), **more):
    shape = {
        "transformer": LAYER | dict(layers), "layout": "fill", "block_size": 5, "mask_id": 23, "taps": (1, 2),
        "fc_width": 64, "causal": causal, "vocab_size": 24,
    }  # fmt: skip
    return made(target(), method, shape | more)


def layer(kind: str, **more):
    base = families.target(kind)
    model, family = base.meta.target_cfg, base.meta.family
    return made(base, "mtp", {"family": family, "model": model} | more)


def gemma_layers(method: str):
    """Gemma's layers for a Gemma target: a block, or EAGLE-3."""
    base = testing.tiny_params(3, hf=gemma.TARGET)
    width = int(base.meta.target_cfg.hidden_size)
    layers = {
        "hidden_size": width, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 16, "vocab_size": gemma.VOCAB, "hidden_act": "gelu_pytorch_tanh",
        "rope_parameters": {"rope_type": "proportional", "rope_theta": 100.0, "partial_rotary_factor": 0.25},
    }  # fmt: skip
    own = {"flavour": "gemma4", "values_from_keys": True, "input_scale": width**0.5, "softcap": 30.0}
    if method == "eagle3":
        return made(base, method, {"transformer": layers, "taps": (0, 1), "qk_norm": True, **own})
    shape = {
        "layout": "shift",
        "block_size": 3,
        "mask_id": 1,
        "taps": (0, 1),
        "fc_width": 2 * width,
        "causal": (False,),
    }
    return made(base, method, {"transformer": layers, **shape, **own, "confidence": True})


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
TABLES = {"own_embed": True, "own_head": True, "embed_rows": 24, "head_rows": 24}
REDUCED = {"draft_vocab": 9, "own_head": True, "head_rows": 9}
HEADS = {"markov_rank": 6, "markov_rows": 24, "confidence": True, "confidence_markov": True}
ANCHOR = {"layers": SLIDING, "window_from": "anchor"}
PARTS = {"conv": (2, 8), "selector": (6, 4)}
#: name -> (what makes it, layouts beside our own that hold it)
CASES = {
    "eagle3, llama": (eagle, "speculators eagle"),
    "eagle3, qwen3": (lambda: eagle(qk_norm=True), "speculators deepspec"),
    "eagle3, 3.1, yarn": (
        lambda: eagle(
            {"rope_scaling": YARN}, qk_norm=True, fc_norm=True, norm_output=True, norm_before_residual=True
        ),
        "speculators",
    ),
    "eagle3, own embedding, windows": (
        lambda: eagle(SLIDING | {"num_hidden_layers": 2}, qk_norm=True, own_embed=True, own_head=True),
        "speculators",
    ),
    "eagle3, reduced": (
        lambda: eagle(draft_vocab_size=9, reduced=True, norm_before_fc=True, own_head=True),
        "speculators eagle",
    ),
    "eagle3, logit scale": (lambda: eagle(logit_scale=0.5), "eagle"),
    "eagle3, no taps": (lambda: eagle(use_aux_hidden_state=False, taps=()), "eagle"),
    "eagle3, q, k, v biased": (lambda: eagle({"attention_bias": True}, o_bias=False), ""),
    "eagle3, latent": (
        lambda: eagle(eagle3_tiny.LATENT | {"num_hidden_layers": 2}, latent=True, norm_before_residual=True),
        "eagle",
    ),
    "eagle3, gemma4": (lambda: gemma_layers("eagle3"), "deepspec"),
    "dflash": (block, "speculators zlab"),
    "dflash, shift": (lambda: block(layout="shift"), "speculators deepspec"),
    "dflash, reduced": (lambda: block(**REDUCED, taps=(4, 1)), "speculators"),
    "dflash, own tables": (lambda: block(layout="shift", **TABLES), "deepspec"),
    "dflash, row window": (lambda: block(layers=SLIDING, causal=(True, False)), "zlab"),
    "dflash, anchor window": (lambda: block(**ANCHOR), "speculators"),
    "dflash, all causal": (lambda: block(causal=(True, True)), "zlab"),
    "dflash, mask vector": (lambda: block(mask_embedding=True), ""),
    "dflash, last tap": (lambda: block(taps=(2, 4)), "speculators"),
    "dflash2": (lambda: block(**ANCHOR, **PARTS), "speculators"),
    "dflash2, scaled": (lambda: block(**PARTS, input_scale=2.0, softcap=5.0, output_multiplier=0.5), "zlab"),
    "dspark": (lambda: block("dspark", layout="shift", **HEADS), "speculators deepspec"),
    "dspark, fill, reduced": (
        lambda: block("dspark", **HEADS, **REDUCED, markov_kind="rnn"),
        "speculators",
    ),
    "dspark, gated, windows": (
        lambda: block("dspark", **HEADS, **ANCHOR, causal=(True, False), markov_kind="gated"),
        "speculators",
    ),
    "dspark, gemma4": (lambda: gemma_layers("dspark"), "deepspec"),
    "mtp, hybrid": (lambda: layer("hybrid"), "speculators native"),
    "mtp, experts": (lambda: layer("hybrid_moe"), "speculators native"),
    "mtp, latent": (lambda: layer("latent"), "native"),
    "mtp, latent, own tables": (lambda: layer("latent", own_embed=True, own_head=True), "native"),
    "mtp, own embedding": (lambda: layer("hybrid", own_embed=True), "native"),
    "assistant": (lambda: testing.tiny_drafter(target(), "assistant"), "transformers"),
    "assistant, clusters": (lambda: assistant_tiny.drafted(**assistant_tiny.CLUSTERS), "transformers"),
    "assistant, before the anchor": (lambda: assistant_tiny.drafted(position_offset=0), ""),
    "draft model": (lambda: testing.tiny_drafter(target(), "draft_model"), ""),
}  # fmt: skip


def read(params: Params, folder, **settings) -> checkpoints.LoadedDrafter:
    """What is loaded from a folder for the target of ``params``; a warning is an error."""
    meta = params.meta
    lent = registry.target(meta.family).shared(params.target, meta.target_cfg)
    return checkpoints.load_drafter(
        hub.resolve(folder),
        meta.target_cfg,
        lent,
        lent.embed.dtype,
        settings=settings,
        eos_ids=meta.eos_ids,
        target_name=meta.name,
    )


def same(a, b) -> bool:
    """Structs of equal arrays."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    pairs = zip(*(map(np.asarray, jax.tree.leaves(tree)) for tree in (a, b)), strict=True)
    return all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in pairs)


def export(params, folder, layout="own", dtype="float32", **more):
    """``specjax.export``; that ``k`` has no place in a layout is not told."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"the \w+ layout has no place for k=\d: give it when loading")
        specjax.export(params, folder, layout, dtype, **more)


@pytest.mark.parametrize("case", CASES)
def test_every_layout(case, tmp_path):
    """TRN.3, PEER.21: the same weights, bit for bit, and the same config; or a refusal that says which layouts do."""
    make, layouts = CASES[case]
    params, able = make(), ("own", *layouts.split())
    for layout in writers.LAYOUTS:
        if layout not in able:
            others = [name for name in writers.LAYOUTS if name in able]
            said = f"Layouts that can: {', '.join(others)}$" if others else "No other layout can"
            with pytest.raises(ValueError, match=rf"the {layout} layout cannot hold this .*\. {said}"):
                export(params, tmp_path / layout, layout)
            assert not (tmp_path / layout).exists()
            continue
        export(params, tmp_path / layout, layout)
        found = read(params, tmp_path / layout)
        assert found.name == params.meta.drafter
        assert same(found.weights, params.drafter)
        k = {} if layout == "own" else {"k": found.cfg.k}
        family = {"family": found.cfg.family} if params.meta.drafter == "mtp" else {}
        assert found.cfg == dataclasses.replace(params.meta.drafter_cfg, **k, **family)
        assert found.made_for == ("tiny" if layout in ("own", "speculators") else found.made_for)
        assert not [note for note in found.notes if "assumed" in note and "layout" not in note]


@pytest.mark.parametrize("case", ["eagle3, reduced", "dspark", "mtp, experts", "assistant, clusters"])
def test_bfloat16_unless_told_otherwise(case, tmp_path):
    """NUM.2: weights that are bfloat16 numbers come back as they were; integers keep their type."""
    params = CASES[case][0]()
    params = dataclasses.replace(params, drafter=jax.tree.map(rounded, params.drafter))
    specjax.export(params, tmp_path / "a")
    kinds = {x.dtype.name for x in load_file(tmp_path / "a" / "model.safetensors").values()}
    assert kinds <= {"bfloat16", "int32"}
    assert same(read(params, tmp_path / "a").weights, params.drafter)
    specjax.export(params, tmp_path / "b", dtype="same")
    assert {x.dtype.name for x in load_file(tmp_path / "b" / "model.safetensors").values()} <= {
        "float32",
        "int32",
    }


def test_cut_copies_of_the_target(tmp_path):
    """TRN.3, VOC.1: where a borrowed head is cut, its rows are written; they come back as the drafter's own head. d2t
    are offsets, t2d marks."""
    params = eagle(draft_vocab_size=9, reduced=True, own_head=False)
    ids = np.array([0, 2, 3, 5, 8, 13, 14, 20, 23])
    d2t = jnp.asarray(ids - np.arange(9), jnp.int32)
    params = dataclasses.replace(params, drafter=params.drafter.replace(d2t=d2t))
    for layout in ("speculators", "eagle"):
        export(params, tmp_path / layout, layout)
        held = load_file(tmp_path / layout / "model.safetensors")
        np.testing.assert_array_equal(held["lm_head.weight"], params.target.head[ids])
        np.testing.assert_array_equal(held["d2t"], ids - np.arange(9))
        assert (held["d2t"].dtype, held["t2d"].dtype) == (np.int64, np.bool_)
        np.testing.assert_array_equal(np.flatnonzero(held["t2d"]), ids)
        found = read(params, tmp_path / layout)
        assert found.cfg == dataclasses.replace(params.meta.drafter_cfg, own_head=True)
        assert same(found.weights.replace(head=None), params.drafter)
    export(params, tmp_path / "own")
    assert "lm_head.weight" not in load_file(tmp_path / "own" / "model.safetensors")
    assert "embed_tokens.weight" not in load_file(tmp_path / "own" / "model.safetensors")


def test_rounded_copies_are_borrowed(tmp_path):
    """CKP.6: tables written in bfloat16 are known as the target's, whose own are finer."""
    params = eagle(qk_norm=True)
    params = dataclasses.replace(params, drafter=params.drafter.replace(head=None))
    cfg = dataclasses.replace(params.meta.drafter_cfg, own_head=False)
    params = dataclasses.replace(params, meta=dataclasses.replace(params.meta, drafter_cfg=cfg))
    specjax.export(params, tmp_path / "a", "speculators")
    assert "embed_tokens.weight" in load_file(tmp_path / "a" / "model.safetensors")
    found = read(params, tmp_path / "a")
    assert (found.weights.embed, found.weights.head, found.cfg.own_head) == (None, None, False)


@pytest.mark.parametrize("form", ["rope_parameters", "rope_theta rope_scaling"])
@pytest.mark.parametrize("case", ["eagle3, 3.1, yarn", "dflash"])
def test_old_and_new_readers_of_rope_agree(case, form, tmp_path):
    """PEER.21: either spelling alone says the same."""
    params = CASES[case][0]()
    export(params, tmp_path / "a", "speculators")
    path = tmp_path / "a" / "config.json"
    hf = json.loads(path.read_text())
    inner, kept = hf["transformer_layer_config"], form.split()
    for key in {"rope_parameters", "rope_theta", "rope_scaling"} - set(kept):
        inner.pop(key)
    path.write_text(json.dumps(hf))
    assert read(params, tmp_path / "a").cfg == params.meta.drafter_cfg


@pytest.mark.parametrize(
    ("case", "both_ways"),
    [("dflash", True), ("dflash, anchor window", True), ("dspark, gated, windows", False)],
)
def test_directions_of_blocks(case, both_ways, tmp_path):
    """TAP.6: blocks of full layers are not taken for causal ones by readers that give the flag to every layer."""
    export(CASES[case][0](), tmp_path / "a", "speculators")
    assert json.loads((tmp_path / "a" / "config.json").read_text())["sliding_window_non_causal"] == both_ways


def test_what_a_layout_has_no_place_for_is_told(tmp_path):
    """Settings of use are not refused, and not lost in silence."""
    params = block("dspark", layout="shift", **HEADS, confidence_threshold=0.5, drafting="greedy", k=2)
    with pytest.warns(
        UserWarning, match=r"deepspec layout has no place for k=2, drafting='greedy', confidence_thr"
    ):
        specjax.export(params, tmp_path / "a", "deepspec")
    specjax.export(params, tmp_path / "b")
    assert read(params, tmp_path / "b").cfg == params.meta.drafter_cfg
    params = layer("hybrid", k=1, draft_vocab=[1, 2, 5], state="raw")
    with pytest.warns(
        UserWarning, match=r"speculators layout has no place for .*draft_vocab=\(3 ids\)"
    ) as told:
        specjax.export(params, tmp_path / "c", "speculators")
    assert "state='raw'" in str(told[0].message)


BAD = {
    "no drafter": (target, "these params have no drafter to write"),
    "ngram": (lambda: testing.tiny_params(drafter="ngram"), "the ngram drafter has no weights"),
    "not finite": (
        lambda: (p := block()).replace(drafter=p.drafter.replace(norm=p.drafter.norm * jnp.nan)),
        "norm.weight holds numbers that are not finite",
    ),
    "wrong size": (
        lambda: (p := block()).replace(drafter=p.drafter.replace(norm=jnp.ones(31))),
        r"dflash.norm has shape \(31,\), the config asks for \(32,\)",
    ),
    "missing weight": (
        lambda: (p := block()).replace(drafter=p.drafter.replace(norm=None)),
        "dflash: the weights do not fit the config",
    ),
    "shapes": (
        lambda: (p := block()).replace(drafter=jax.eval_shape(lambda: p.drafter)),
        "a shape without weights: load without shapes_only",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_not_written(case, tmp_path):
    """PEER.16, PEER.21, TRN.1: nothing is left behind."""
    make, said = BAD[case]
    params = make()
    if case == "ngram":
        meta = dataclasses.replace(params.meta, drafter_cfg=registry.drafter("ngram").default("cpu"))
        params = dataclasses.replace(params, meta=meta)
    with pytest.raises(ValueError, match=said):
        specjax.export(params, tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_names_that_do_not_exist(tmp_path):
    params = block()
    with pytest.raises(ValueError, match="unknown layout 'gguf'; known: own, speculators"):
        specjax.export(params, tmp_path / "a", "gguf")
    with pytest.raises(ValueError, match="dtype must be one of bfloat16, float32, float16, same, got 'int4'"):
        specjax.export(params, tmp_path / "a", dtype="int4")
    with pytest.raises(ValueError, match="compact storage is specjax's own"):
        specjax.export(params, tmp_path / "a", "speculators", compact=True)


def test_a_weight_without_a_name(tmp_path, monkeypatch):
    """PEER.21."""
    nameless = dataclasses.replace(dflash.abstract(block().meta.drafter_cfg), norm=ArraySpec((32,), (None,)))
    monkeypatch.setattr(dflash, "abstract", lambda cfg: nameless)
    with pytest.raises(ValueError, match=r"dflash.norm has no name in a file"):
        specjax.export(block(), tmp_path / "a")


def test_float16_that_cannot_hold_a_weight(tmp_path):
    """NUM.1."""
    params = block()
    params = params.replace(drafter=params.drafter.replace(fc=params.drafter.fc * 1e6))
    with pytest.raises(ValueError, match=r"fc.weight holds values beyond the range of float16"):
        specjax.export(params, tmp_path / "a", dtype="float16")


def test_folders_of_others_are_left_alone(tmp_path, monkeypatch):
    """PEER.20: an earlier export is replaced, whole or not at all; anything else is not touched."""
    params = block()
    specjax.export(params, tmp_path / "a", "zlab")
    specjax.export(params, tmp_path / "a")
    assert read(params, tmp_path / "a").format == "specjax"
    before = {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()}
    monkeypatch.setattr(exporter, "load_drafter", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        specjax.export(params, tmp_path / "a", "zlab")
    assert {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    monkeypatch.undo()
    (tmp_path / "a" / "README.md").write_text("mine")
    with pytest.raises(FileExistsError, match=r"holds \['README.md'\], which an export did not write"):
        specjax.export(params, tmp_path / "a")
    (tmp_path / "b").mkdir()
    save_file({"x": np.ones(3)}, tmp_path / "b" / "model.safetensors")
    with pytest.raises(FileExistsError, match="holds weights that specjax did not write"):
        specjax.export(params, tmp_path / "b")
    with pytest.raises(FileExistsError, match="is a file; choose another folder"):
        specjax.export(params, tmp_path / "b" / "model.safetensors")
    (tmp_path / "empty").mkdir()
    specjax.export(params, tmp_path / "empty")


def test_settings_replace_what_our_folder_says(tmp_path):
    """CKP.7: those of use, and those that need no other weights; what is no setting is refused."""
    params = block("dspark", layout="shift", **HEADS)
    specjax.export(params, tmp_path / "a")
    given = {"k": 3, "drafting": "greedy", "confidence_threshold": 0.25, "mask_id": 2, "taps": [0, 3]}
    cfg = read(params, tmp_path / "a", **given).cfg
    assert (cfg.k, cfg.drafting, cfg.confidence_threshold, cfg.mask_id, cfg.taps) == (
        3,
        "greedy",
        0.25,
        2,
        (0, 3),
    )
    for settings, said in (
        ({"colour": 1}, r"dspark drafter has no setting\(s\) \['colour'\]; known: .*confidence_threshold"),
        ({"vocab": 7}, r"has no setting\(s\) \['vocab'\]"),
        ({"k": 9}, "k must be from 1 to 5"),
        ({"taps": (1, 2, 3)}, r"\['taps'\] of this dspark drafter cannot be changed"),
        ({"taps": (1, 9)}, r"taps the residual stream after \[1, 9\] layers, the target has 4"),
        ({"mask_id": 24}, "mask token id 24 is outside the embedding"),
    ):
        with pytest.raises(ValueError, match=said):
            read(params, tmp_path / "a", **settings)


def test_a_draft_vocabulary_for_a_layer_of_ours(tmp_path):
    """``draft_vocab`` is a setting whose field is called otherwise; ends of text are in it."""
    params = layer("hybrid")
    params = dataclasses.replace(params, meta=dataclasses.replace(params.meta, eos_ids=(20,)))
    specjax.export(params, tmp_path / "a")
    assert read(params, tmp_path / "a", draft_vocab=[3, 5]).cfg.draft_ids == (3, 5, 20)


def test_another_target(tmp_path):
    """TAP.4, VOC.2: sizes that differ are an error, a name that differs is told."""
    params = block()
    specjax.export(params, tmp_path / "a")
    other = testing.tiny_params(layers=3, vocab=24, width=16)
    with pytest.raises(
        ValueError, match=r"made for a target \(tiny\) of 32 channels, this one has 16; of 4 layers"
    ):
        read(other, tmp_path / "a")
    for name, told in (("org/Tiny", False), ("models/tiny/", False), ("org/another", True), ("", False)):
        renamed = dataclasses.replace(params, meta=dataclasses.replace(params.meta, name=name))
        notes = read(renamed, tmp_path / "a").notes
        assert bool(notes) == told
        assert all("made for 'tiny', the target is called 'org/another'" in note for note in notes)


def test_a_draft_model_needs_the_vocabulary_alone(tmp_path):
    params = testing.tiny_drafter(target(), "draft_model")
    specjax.export(params, tmp_path / "a", dtype="float32")
    assert same(read(testing.tiny_params(width=16, vocab=24), tmp_path / "a").weights, params.drafter)
    with pytest.raises(ValueError, match="24 tokens in the vocabulary, this one has 25"):
        read(testing.tiny_params(vocab=25), tmp_path / "a")


def test_an_assistant_of_another_kind_of_attention(tmp_path):
    params = testing.tiny_drafter(target(), "assistant")
    specjax.export(params, tmp_path / "a")
    other = testing.tiny_params(layers=4, vocab=24, head_dim=16)
    with pytest.raises(ValueError, match="reads keys with head_dim=8, the target's have 16"):
        read(other, tmp_path / "a")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"specjax_format": 9}, "version 9 of specjax's layout; this specjax reads version 1"),
        ({"specjax_drafter": "os.path"}, "holds a drafter of kind 'os.path'; known: ngram, eagle3"),
        ({"target": None}, r"the config lacks \['target'\]"),
        ({"config": {"k": 1}}, "missing .* required .*argument"),
        ({"config": {"colour": 1}}, r"has no field\(s\) \['colour'\]"),
    ],
)
def test_configs_that_are_not_ours(change, said, tmp_path):
    """A file does not choose what is imported."""
    params = block()
    specjax.export(params, tmp_path / "a")
    path = tmp_path / "a" / "config.json"
    hf = json.loads(path.read_text()) | change
    path.write_text(json.dumps({key: value for key, value in hf.items() if value is not None}))
    with pytest.raises(ValueError, match=said):
        read(params, tmp_path / "a")


def test_a_drafter_is_no_target(tmp_path):
    specjax.export(block(), tmp_path / "a")
    with pytest.raises(ValueError, match="a holds a drafter, not a model: load its target, with drafter="):
        specjax.load(tmp_path / "a")


def test_a_tensor_that_is_missing(tmp_path):
    """PEER.16."""
    params = block()
    specjax.export(params, tmp_path / "a")
    block_tiny.change(tmp_path / "a", norm__weight=None)
    with pytest.raises(ValueError, match="lacks 1 tensor"):
        read(params, tmp_path / "a")


@pytest.mark.parametrize("case", ["eagle3, reduced", "dspark", "mtp, experts", "assistant", "draft model"])
def test_compact_folders(case, tmp_path):
    """TRN.3: config and tables of integers as they were, weights near; memory is told from the config alone."""
    params = CASES[case][0]()
    specjax.export(params, tmp_path / "a", compact=True)
    found = read(params, tmp_path / "a")
    assert found.cfg == params.meta.drafter_cfg
    for a, b in zip(jax.tree.leaves(params.drafter), jax.tree.leaves(found.weights), strict=True):
        if jnp.issubdtype(a.dtype, jnp.integer):
            np.testing.assert_array_equal(a, b)
        else:
            assert np.abs(a - b).max() <= np.abs(a).max() / 250
    shapes = checkpoints.load_drafter(
        hub.resolve(tmp_path / "a"),
        params.meta.target_cfg,
        jax.eval_shape(
            lambda: registry.target(params.meta.family).shared(params.target, params.meta.target_cfg)
        ),
        jnp.float32,
        shapes_only=True,
    )
    (tmp_path / "a" / "model.safetensors").unlink()
    told = checkpoints.load_drafter(
        hub.resolve(tmp_path / "a"), params.meta.target_cfg, _lent(params), jnp.float32, shapes_only=True
    )
    assert shapes.weights == told.weights


def _lent(params):
    return jax.eval_shape(
        lambda: registry.target(params.meta.family).shared(params.target, params.meta.target_cfg)
    )


def test_loaded_drafters_draft_the_same(tmp_path):
    """TRN.3: the same drafts as the params that were written, bit for bit in their distributions."""
    base = specjax.load("tiny", dtype="float32")
    params = testing.tiny_drafter(base, "dspark", 3)
    specjax.export(params, tmp_path / "a", dtype="float32")
    loaded = specjax.load("tiny", drafter=tmp_path / "a", dtype="float32")
    assert loaded.meta == dataclasses.replace(params.meta, drafter_notes=("dspark: made for tiny",))
    step = jax.jit(lambda params, state: specjax.draft_step(params, state)[0])
    proposals = []
    for one in (params, loaded):
        state = specjax.start(one, [[3, 1, 4, 1, 5]], temperature=1.0, seed=2, max_new_tokens=8)
        proposals.append(step(one, state))
    assert same(*proposals)


@pytest.mark.parametrize("kind", ["qwen, experts", "deepseek, short"])
def test_fused_experts_come_apart(kind, tmp_path):
    """PEER.16: a layer out of its target's folder, whose experts are two tensors, in its family's names and back."""
    folder = mtp_files.folder(tmp_path / "t", kind)
    found = checkpoints.convert(folder, tmp_path / "own", folder, method="mtp", dtype="same")
    assert found.format == "native"
    held = load_file(tmp_path / "own" / "model.safetensors")
    assert sum(".experts." in name for name in held) == 12
    again = checkpoints.convert(tmp_path / "own", tmp_path / "native", folder, "native", "same")
    third = checkpoints.convert(tmp_path / "native", tmp_path / "third", folder, dtype="same")
    for other in (again, third):
        assert (other.name, other.cfg) == ("mtp", found.cfg)
        assert same(other.weights, found.weights)


def test_convert_on_the_command_line(tmp_path):
    params = testing.tiny_drafter(testing.tiny_params(), "eagle3")
    specjax.export(params, tmp_path / "a", dtype="float32")
    words = [
        "convert",
        str(tmp_path / "a"),
        str(tmp_path / "b"),
        "--target",
        "tiny",
        "--layout",
        "speculators",
    ]
    done = CliRunner().invoke(cli.app, [*words, "--dtype", "float32"])
    assert done.exit_code == 0, done.output
    assert "eagle3 drafter (specjax format) written to" in done.output
    assert same(read(params, tmp_path / "b").weights, params.drafter)
    failed = CliRunner().invoke(cli.app, [*words[:-1], "zlab"])
    assert failed.exit_code == 2
    assert (
        "the zlab layout cannot hold this eagle3 drafter: it is for dflash. Layouts that can: own"
        in failed.output
    )
    small = CliRunner().invoke(cli.app, [*words[:2], str(tmp_path / "c"), *words[3:5], "--compact"])
    assert small.exit_code == 0, small.output


@pytest.mark.parametrize("kind", ["folder", "gguf", "orbax", "tied"])
def test_targets_lend_their_tables_alone(kind, tmp_path):
    """PEER.16: whatever files the target has, the copies are its own tables, bit for bit."""
    hf = tiny_files.config(num_hidden_layers=3, tie_word_embeddings=kind == "tied")
    arrays = tiny_files.tensors(hf)
    place = tiny_files.folder(tmp_path / "t", hf, arrays)
    base = specjax.load(place, dtype="float32")
    if kind == "gguf":
        place = tiny_files.gguf_file(tmp_path / "t.gguf", hf, arrays)
    if kind == "orbax":
        place = tmp_path / "o"
        specjax.save(base, place)
    layers = LAYER | {"vocab_size": 64, "num_hidden_layers": 1}
    settings = {"transformer": layers, "taps": (0, 1, 2), "qk_norm": True, "own_head": False}
    specjax.export(made(base, "eagle3", settings), tmp_path / "d")
    checkpoints.convert(tmp_path / "d", tmp_path / "s", place, "speculators", "same")
    held = load_file(tmp_path / "s" / "model.safetensors")
    np.testing.assert_array_equal(held["embed_tokens.weight"], arrays["model.embed_tokens.weight"])
    head = "model.embed_tokens.weight" if kind == "tied" else "lm_head.weight"
    np.testing.assert_array_equal(held["lm_head.weight"], arrays[head])


def test_names_of_targets(tmp_path):
    """Short names are ours alone: others are told the name on the Hub, or the one that is given."""
    params = block()
    named = dataclasses.replace(params, meta=dataclasses.replace(params.meta, name="smollm2-135m"))
    for layout, given, said in (
        ("own", None, "smollm2-135m"),
        ("speculators", None, "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("speculators", "a/b", "a/b"),
    ):
        specjax.export(named, tmp_path / "a", layout, target=given)
        assert read(named, tmp_path / "a").made_for == said
