"""Layers for multi-token prediction in the target's own files: every layout, every way to ask, what is refused."""

import functools
import json

import jax
import mtp_files
import numpy as np
import pytest
import tiny_files

import specjax
from specjax.checkpoints.formats import mtp as layout

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder of a kind, made once; ``extra`` and ``changes`` make another."""

    @functools.cache
    def once(kind):
        return mtp_files.folder(tmp_path_factory.mktemp("mtp") / "m", kind)

    def make(kind="qwen", extra=None, **changes):
        if extra is None and not changes:
            return once(kind)
        return mtp_files.folder(tmp_path_factory.mktemp("mtp") / "m", kind, extra, **changes)

    return make


def load(path, drafter="mtp", **options):
    return specjax.load(path, drafter, dtype="float32", **options)


def same(a, b) -> bool:
    return jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), a, b))


@pytest.mark.parametrize("kind", mtp_files.LAYOUTS)
def test_every_layout(kind, folder):
    """CKP.2, CKP.4, CKP.6: experts one by one or fused, beside the model or behind its layers: the same weights,
    nothing left over, tables of the target's."""
    params = load(folder(kind))
    stored = mtp_files.layer(kind)
    np.testing.assert_array_equal(params.drafter.fc, stored["fc.weight"])
    np.testing.assert_array_equal(params.drafter.norm, stored["norm.weight"])
    assert (params.drafter.embed, params.drafter.head) == (None, None)
    assert params.meta.drafter_notes == ()
    if kind.startswith("deepseek"):
        assert same(params.drafter, load(folder("deepseek")).drafter)


def test_multimodal_and_sharded_files(folder, tmp_path):
    """CKP.8: the config is nested, the text model has a prefix, the layer has none."""
    from safetensors.numpy import load_file

    plain = folder("qwen")
    arrays = {
        name if name.startswith(("mtp.", HEAD)) else name.replace("model.", "model.language_model.", 1): x
        for name, x in load_file(plain / "model.safetensors").items()
    }
    text = json.loads((plain / "config.json").read_text())
    hf = {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": False}
    whole = load(tiny_files.folder(tmp_path / "whole", hf, arrays, shards=3))
    assert same(whole.drafter, load(plain).drafter)
    assert same(whole.target, load(plain).target)


def test_how_it_is_asked_for(folder):
    """OPT.3, PEER.12: by name, by vLLM's keys and names, in a chain, from another folder; k of the file, then of the
    request."""
    path = folder("deepseek", num_nextn_predict_layers=1)
    first = load(path)
    cfg = first.meta.drafter_cfg
    assert (first.meta.drafter, cfg.k, cfg.drafting) == ("mtp", 1, "probabilistic")
    for method in ("mtp", "deepseek_mtp"):
        config = {"method": method, "num_speculative_tokens": 2}
        asked = load(path, None, speculative_config=config)
        assert (asked.meta.drafter_cfg.k, asked.meta.drafter_cfg.drafting) == (2, "greedy")
        assert same(asked.drafter, first.drafter)
    assert load(path, drafter_config={"k": 4}).meta.drafter_cfg.k == 4
    chain = load(path, ("ngram", "mtp"))
    assert chain.meta.drafter_cfg.drafters == ("ngram", "mtp")
    assert same(chain.drafter[1], first.drafter)
    bare = mtp_files.folder(path.parent / "other", "deepseek", seed=2)
    from_other = load(path, None, speculative_config={"method": "mtp", "model": str(bare)})
    np.testing.assert_array_equal(from_other.drafter.fc, mtp_files.layer("deepseek", 2)["fc.weight"])
    assert load(folder("qwen", mtp_num_hidden_layers=2)).meta.drafter_cfg.k == 2


def test_shapes_only(folder):
    """Nothing is read; ``explain`` counts the layer."""
    params = load(folder("qwen"), shapes_only=True)
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(params))
    assert params.drafter.fc.shape == (32, 64)


def test_saved_with_its_target(folder, tmp_path):
    """CKP.7."""
    params = load(folder("deepseek"), drafter_config={"draft_vocab": [1, 2, 5]})
    specjax.save(params, tmp_path / "saved")
    back = specjax.load(tmp_path / "saved")
    assert back.meta == params.meta
    assert same(back.drafter, params.drafter)
    with pytest.raises(ValueError, match=r"written by specjax\.save"):
        load(tmp_path / "saved")


def test_draft_vocabulary_of_a_request(folder):
    """VOC.1: ids that end a turn are drafted in any case."""
    path = folder("qwen", eos_token_id=6)
    assert load(path, drafter_config={"draft_vocab": 2}).meta.drafter_cfg.draft_ids == (0, 1, 6)
    assert load(path).meta.drafter_cfg.draft_ids is None


def test_copies_of_tables(folder):
    """CKP.6: a copy of the target's embedding or head is not stored again; another table is the layer's own."""
    from safetensors.numpy import load_file

    tables = load_file(folder("deepseek") / "model.safetensors")
    for change, own in ((0, False), (1, True)):
        extra = {
            "model.layers.2.embed_tokens.weight": tables[EMBED] + change,
            "model.layers.2.shared_head.head.weight": tables[HEAD] + change,
        }
        params = load(folder("deepseek", extra))
        cfg = params.meta.drafter_cfg
        assert (cfg.own_embed, cfg.own_head) == (own, own)
        if own:
            np.testing.assert_array_equal(params.drafter.head, tables[HEAD] + 1)


def test_several_layers(folder):
    """The first drafts every token; that is told."""
    extra = {
        name.replace("layers.0.", "layers.1."): x for name, x in published("qwen").items() if "layers" in name
    }
    with pytest.warns(UserWarning, match="2 layers for multi-token prediction; the first drafts every token"):
        params = load(folder("qwen", extra))
    assert params.meta.drafter_cfg.k == 2
    assert params.meta.drafter_notes == (
        "mtp: the file has 2 layers for multi-token prediction; the first drafts every token",
    )


def published(kind):
    return mtp_files.published(kind, mtp_files.layer(kind))


def test_speculators_files(folder, tmp_path):
    """A fine-tuned layer in a folder of its own says what it is."""
    names = {
        "fc": "input_proj", "norm": "final_layernorm", "pre_fc_norm_hidden": "hidden_layernorm",
        "pre_fc_norm_embedding": "token_layernorm",
    }  # fmt: skip
    arrays = {
        f"mtp_layers.0.{names.get(stem, stem)}.weight".replace("0.layers.0.", "0."): x
        for stem, x in ((name.removesuffix(".weight"), x) for name, x in mtp_files.layer("qwen").items())
    }
    hf = {
        "speculators_model_type": "mtp",
        "transformer_layer_config": mtp_files.config("qwen"),
        "num_nextn_predict_layers": 1,
        "speculators_config": {"proposal_methods": [{"speculative_tokens": 3}]},
    }
    params = load(folder("qwen"), tiny_files.folder(tmp_path / "tuned", hf, arrays))
    assert (params.meta.drafter, params.meta.drafter_cfg.k) == ("mtp", 3)
    assert same(params.drafter, load(folder("qwen")).drafter)


def test_a_target_without_such_a_layer(folder, tmp_path):
    """CKP.3, MET.6: before anything is read, saying what was looked for."""
    hf = tiny_files.config(num_hidden_layers=1)
    plain = tiny_files.folder(tmp_path / "plain", hf, tiny_files.tensors(hf))
    with pytest.raises(
        ValueError, match=r"no layer for multi-token prediction: no tensor is called mtp\.\* or model"
    ):
        load(plain)
    with pytest.raises(ValueError, match=r"layers\.1\.\*"):
        load(plain, None, speculative_config={"method": "mtp", "num_speculative_tokens": 2})
    with pytest.raises(ValueError, match=r"holds a drafter of kind draft_model .*, not mtp"):
        load(folder("qwen"), None, speculative_config={"method": "mtp", "model": str(plain)})
    with pytest.raises(ValueError, match="'mtp' is a method, not a drafter: give the folder or Hub id"):
        specjax.load("tiny", "mtp")


def test_another_models_layer(folder, tmp_path):
    """VOC.4, TAP.7: refused naming both sides."""
    config = {"method": "mtp", "model": str(folder("qwen"))}
    hf = tiny_files.config(num_hidden_layers=1, hidden_size=64, vocab_size=7)
    wide = tiny_files.folder(tmp_path / "wide", hf, tiny_files.tensors(hf))
    with pytest.raises(ValueError, match="32 wide, this target 64"):
        load(wide, None, speculative_config=config)
    hf = tiny_files.config(num_hidden_layers=1)
    other = tiny_files.folder(tmp_path / "other", hf, tiny_files.tensors(hf))
    with pytest.raises(ValueError, match="vocabulary of 7 tokens, the target's has 64"):
        load(other, None, speculative_config=config)


REFUSED = {
    "order": ({"mtp_hidden_states_first": True}, "mtp_hidden_states_first is not supported"),
    "tables": (
        {"mtp_use_dedicated_embeddings": True},
        "dedicated_embeddings is true, but .* no embed_tokens.weight",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_are_not_implemented(case, folder):
    """TAP.8."""
    changes, message = REFUSED[case]
    path = folder("qwen", mtp_num_hidden_layers=1)
    hf = json.loads((path / "config.json").read_text()) | changes
    files = layout.Files(
        str(path), hf, {f"mtp.{n}": x.shape for n, x in mtp_files.layer("qwen").items()}, None, None
    )
    with pytest.raises(ValueError, match=message):
        layout.read(files)


def test_tensors_missing_or_unknown(folder):
    """CKP.4: named, before anything is allocated; one that nobody knows is told."""
    lacking = mtp_files.change(
        folder("qwen", mtp_num_hidden_layers=1),
        lambda t: {n: x for n, x in t.items() if n != "mtp.norm.weight"},
    )
    with pytest.raises(ValueError, match=r"lacks 1 tensor\(s\) this model needs: norm\.weight"):
        load(lacking)
    with pytest.warns(UserWarning, match=r"layers\.0\.self_attn\.sinks"):
        load(folder("qwen", {"mtp.layers.0.self_attn.sinks": np.ones(2, np.float32)}))
    with pytest.raises(ValueError, match="would be the same weight"):
        load(folder("qwen", {"mtp.layers.0.enorm.weight": np.ones(32, np.float32)}))
    late = lambda t: {n.replace("mtp.", "mtp.3."): x for n, x in t.items()}  # noqa: E731
    with pytest.raises(ValueError, match=r"are numbered \[3\]"):
        load(mtp_files.change(folder("qwen", mtp_num_hidden_layers=1), late))
