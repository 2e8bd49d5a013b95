"""``specjax.load`` and its drafters: every way of naming one, what overrides what, what is refused and when."""

import dataclasses
import json

import numpy as np
import pytest
import tiny_files

import specjax
from specjax import checkpoints, registry
from specjax.checkpoints import formats, hub
from specjax.drafters import draft_model, ngram


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Folder of a Llama with the vocabulary of the toy target."""
    hf = tiny_files.config(num_hidden_layers=1)
    return tiny_files.folder(tmp_path_factory.mktemp("small"), hf, tiny_files.tensors(hf))


def load(*drafter, **options):
    return specjax.load("tiny", *drafter, **options)


def drafter_of(params):
    return params.meta.drafter, params.meta.drafter_cfg


def test_a_method_without_weights():
    """By name, as a module, by a dotted name: the same drafter, under the registry's name."""
    cfg = ngram.default("cpu")
    for name in ("ngram", ngram, "specjax.drafters.ngram", ("ngram",)):
        params = load(name)
        assert drafter_of(params) == ("ngram", cfg)
        assert params.drafter is None


def test_settings_replace_defaults():
    """PEER.12: drafter_config over the defaults or over the speculative config; k of a call over both."""
    assert load(
        "ngram", drafter_config={"k": 2, "costs": [[3, 1.5]]}
    ).meta.drafter_cfg == dataclasses.replace(ngram.default("cpu"), k=2, costs=((3, 1.5),))
    params = load(
        "ngram", speculative_config={"num_speculative_tokens": 5}, drafter_config={"match": "recent"}
    )
    assert params.meta.drafter_cfg == ngram.Config(5, 5, 5, "recent")
    assert specjax.explain(params, [1, 2]).program.k == 5
    assert specjax.explain(params, [1, 2], k=2).program.k == 2


def test_a_folder_says_what_it_is(small):
    """CKP.3: the kind is detected, with or without a method beside it."""
    for drafter, config in (
        (small, None),
        (str(small), None),
        (None, {"model": str(small)}),
        (None, {"method": "draft_model", "model": str(small)}),
        ("draft_model", {"model": str(small)}),
        (small, {"method": "draft_model"}),
    ):
        params = load(drafter, speculative_config=config)
        assert params.meta.drafter == "draft_model"
        assert params.meta.drafter_cfg.drafting == ("probabilistic" if config is None else "greedy")
        assert params.drafter.embed.dtype == params.target.embed.dtype
    chosen = {"model": str(small), "num_speculative_tokens": 2, "draft_sample_method": "probabilistic"}
    cfg = load(speculative_config=chosen).meta.drafter_cfg
    assert (cfg.k, cfg.drafting) == (2, "probabilistic")
    assert load(small, drafter_config={"k": 6, "drafting": "greedy"}).meta.drafter_cfg.k == 6
    assert load(small, dtype="bfloat16").drafter.embed.dtype == "bfloat16"


def test_a_chain(small):
    """In order, with settings one by one; a speculative config reaches those it concerns."""
    params = load(("ngram", small), drafter_config=[{"k": 2}, None])
    assert drafter_of(params)[0] == "chain"
    assert params.meta.drafter_cfg.drafters == ("ngram", "draft_model")
    assert [cfg.k for cfg in params.meta.drafter_cfg.configs] == [2, 4]
    assert params.drafter[0] is None
    config = {
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 2,
        "draft_sample_method": "probabilistic",
        "rejection_sample_method": "block",
    }
    params = load(("ngram", small), speculative_config=config)
    first, second = params.meta.drafter_cfg.configs
    assert (first, second.k, second.drafting) == (ngram.Config(3, 2, 2, "earliest"), 3, "probabilistic")
    assert params.meta.rule == "block"


def test_saved_with_its_target(small, tmp_path):
    """A chain and its nested configs come back; loading with another drafter replaces it."""
    params = load(("ngram", small), speculative_config={"num_speculative_tokens": 3})
    specjax.save(params, tmp_path / "saved")
    back = specjax.load(tmp_path / "saved")
    assert back.meta == params.meta
    np.testing.assert_array_equal(back.drafter[1].embed, params.drafter[1].embed)
    assert drafter_of(specjax.load(tmp_path / "saved", drafter="ngram"))[0] == "ngram"
    with pytest.raises(ValueError, match=r"written by specjax.save .* load it as the target"):
        load(tmp_path / "saved")
    data = json.loads(json.dumps(params.meta.drafter_cfg.configs[1].__dict__, default=dataclasses.asdict))
    with pytest.raises(ValueError, match=r"draft model of family .os\.path."):
        draft_model.from_json({**data, "family": "os.path"}, None)


def test_somebody_elses_drafter():
    """Settings of a drafter outside the registry are its own business."""
    known = [[[1, 2], [3, 4]]]
    config = {"known": known}
    params = load("specjax.testing:ALWAYS_RIGHT", drafter_config=config | {"k": 2})
    assert params.meta.drafter_cfg.k == 2
    options = {"speculative_config": {"num_speculative_tokens": 3}, "drafter_config": config}
    assert load("specjax.testing:ALWAYS_RIGHT", **options).meta.drafter_cfg.k == 3
    custom = {"method": "custom_class", "model": "specjax.testing:ALWAYS_RIGHT", "num_speculative_tokens": 3}
    assert load(speculative_config=custom, drafter_config=config).meta.drafter_cfg.k == 3
    sizes = {"k": 2, "texts": 1, "size": 8}
    with pytest.raises(ValueError, match="has weights, and load knows no file format for it"):
        load("specjax.testing:TOLD", drafter_config=sizes)


LEARNED = [n for n in registry.DRAFTERS if n != "chain" and not hasattr(registry.drafter(n), "default")]


@pytest.mark.parametrize("name", LEARNED)
def test_a_method_with_weights_needs_files(name):
    """MET.6."""
    with pytest.raises(ValueError, match=f"'{name}' is a method, not a drafter: give the folder or Hub id"):
        load(name)


@pytest.mark.parametrize("name", [n for n in LEARNED if n != "draft_model"])
def test_a_method_that_contradicts_the_files(name, small, monkeypatch):
    """CKP.3: an error that names what was found, before any weight is read."""
    monkeypatch.setattr(checkpoints.tree, "fill", lambda *a, **k: pytest.fail("weights were read"))
    with pytest.raises(ValueError, match=f"holds a drafter of kind draft_model .*, not {name}"):
        load(speculative_config={"method": name, "model": str(small)})


FOLDER = "/no/such/folder"
BAD = {
    "no drafter": (None, {"drafter_config": {"k": 3}}, "drafter_config was given, but no drafter"),
    "empty": ((), {}, "a chain needs at least one drafter"),
    "chain by name": ("chain", {}, "a chain is asked for by its parts"),
    "no files": (FOLDER, {}, "unknown model '/no/such/folder'"),
    "method and method": ("ngram", {"speculative_config": {"method": "eagle3"}}, "'ngram' and .*'eagle3' disagree"),
    "files of none": (
        "ngram", {"speculative_config": {"model": FOLDER}}, "'ngram' has no files, but '/no/such/folder' was given",
    ),
    "two folders": (FOLDER, {"speculative_config": {"model": "/other"}}, "disagree"),
    "k and k": (
        "ngram",
        {"speculative_config": {"num_speculative_tokens": 3}, "drafter_config": {"k": 4}},
        "drafter_config's k=4 and speculative_config's 3 disagree",
    ),
    "setting": ("ngram", {"drafter_config": {"depth": 3}}, r"no setting\(s\) \['depth'\]; known: costs, k"),
    "no mapping": ("ngram", {"drafter_config": 3}, "must map setting names to values, got int"),
    "one for two": (("ngram", "ngram"), {"drafter_config": {"k": 3}}, "a list with one entry"),
    "method and chain": (
        ("ngram", "ngram"), {"speculative_config": {"method": "ngram"}}, "leave method and model out",
    ),
    "lookup and no n-gram": (
        (FOLDER, FOLDER), {"speculative_config": {"prompt_lookup_max": 3}}, "belong to the n-gram drafter",
    ),
    "drawn n-grams": (
        "ngram",
        {"speculative_config": {"num_speculative_tokens": 3, "draft_sample_method": "probabilistic"}},
        "'probabilistic' makes no sense for 'ngram'",
    ),
    "revision": (
        "ngram", {"speculative_config": {"num_speculative_tokens": 3, "revision": "main"}}, "of no use without a model",
    ),
    "suffix": ("suffix", {}, "'suffix' is not supported: suffix decoding is not implemented"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_requests_that_make_no_sense(case, monkeypatch):
    """OPT.3: refused before the target is looked at (all but settings, which need its config)."""
    drafter, options, message = BAD[case]
    if case not in ("setting", "drawn n-grams"):
        monkeypatch.setattr(specjax.api, "_target", lambda *a: pytest.fail("the target was loaded"))
    with pytest.raises(ValueError, match=message):
        load(drafter, **options)


def test_settings_of_files(small):
    with pytest.raises(ValueError, match=r"prompt_lookup_max'\] belong to the n-gram drafter"):
        load(small, speculative_config={"prompt_lookup_max": 3})
    with pytest.raises(
        ValueError, match=r"a draft model has no setting\(s\) \['depth'\]; known: drafting, k"
    ):
        load(small, drafter_config={"depth": 1})
    with pytest.raises(ValueError, match=r"revision=.main. was given, but .* is not downloaded"):
        load(small, speculative_config={"revision": "main"})


def test_a_revision_reaches_the_hub(monkeypatch, small):
    import huggingface_hub

    asked = {}

    def download(repo, **options):
        asked.update(options, repo=repo)
        return str(small)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    load(speculative_config={"model": "owner/small", "revision": "v2"})
    assert (asked["repo"], asked["revision"]) == ("owner/small", "v2")


def test_assumptions_are_told_and_kept(small, monkeypatch):
    """CKP.1: what the loader had to assume is a warning, and part of the params."""
    real = formats.detect
    told = {"notes": ("the file does not say X: assumed Y",), "made_for": "owner/model"}
    monkeypatch.setattr(formats, "detect", lambda *asked: dataclasses.replace(real(*asked), **told))
    with pytest.warns(UserWarning, match=r"drafter draft_model: the file does not say X: .* drafter_config="):
        params = load(small)
    assert params.meta.drafter_notes == (
        "draft_model: the file does not say X: assumed Y",
        "draft_model: made for owner/model",
    )
    assert load("ngram").meta.drafter_notes == ()


def test_short_names_are_drafters_too(monkeypatch, small, tmp_path):
    """A GGUF draft model, by the short name of a packaged file."""
    hf = tiny_files.config(num_hidden_layers=1)
    gguf = tiny_files.gguf_file(tmp_path / "model.gguf", hf, tiny_files.tensors(hf))
    monkeypatch.setitem(hub.SHORT_NAMES, "smol", hub.Packaged("x", "y", "z"))
    monkeypatch.setattr(hub, "_packaged", lambda name, model: gguf)
    folder, file = load(small), load("smol")
    assert (file.meta.drafter, file.meta.drafter_cfg.family) == ("draft_model", "llama")
    np.testing.assert_array_equal(file.drafter.layers[0].q, folder.drafter.layers[0].q)
