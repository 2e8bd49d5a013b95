"""Folders of our own layout: settings that replace what they say, targets they do not fit, files that were changed."""

import dataclasses
import json

import block_tiny
import pytest
from exported import HEADS, block, layer, read, same, target

import specjax
from specjax import testing


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
