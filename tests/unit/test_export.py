"""Drafters written to folders: every kind in every layout, what is refused, what is never overwritten."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exported import CASES, HEADS, block, eagle, export, layer, read, rounded, same, target
from safetensors.numpy import load_file, save_file

import specjax
from specjax import checkpoints, registry, testing
from specjax.checkpoints import exporter, hub, writers
from specjax.drafters import dflash
from specjax.types import ArraySpec


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
        _lent(params),
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
