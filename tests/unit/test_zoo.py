"""Drafters that come with the package: how names find them, what is said where there is none, cards, the wheel."""

import dataclasses
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_files
from typer.testing import CliRunner

import specjax
from specjax import checkpoints, cli, demo, testing, zoo
from specjax.checkpoints import hub, known
from specjax.drafters import ngram
from specjax.train import methods

ROOT = Path(__file__).parents[2]
HF = tiny_files.config(num_hidden_layers=2)
LIMIT = 30 << 20
BLOCK = {"taps": (0, 2), "layers": 1, "mask_id": 1}
#: Small drafters of every kind.
SETTINGS = {
    "assistant": {}, "dflash": BLOCK, "dspark": BLOCK, "eagle3": {"taps": (0, 1, 2), "k": 3}, "mtp": {"k": 2},
}  # fmt: skip


def benchmark(name):
    """A module of benchmarks/, which is no package."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A target as a folder and as GGUF, others of the same size and of another, and a zoo with drafters for it."""
    root = tmp_path_factory.mktemp("zoo")
    arrays = {
        name: x if x.ndim > 1 else x.astype(jnp.bfloat16).astype(np.float32)
        for name, x in tiny_files.tensors(HF).items()
    }
    tiny_files.folder(root / "model", HF, arrays)
    tiny_files.gguf_file(root / "model.gguf", HF, arrays)
    tiny_files.folder(root / "other", HF, tiny_files.tensors(HF, seed=5))
    shallow = HF | {"num_hidden_layers": 1}
    tiny_files.folder(root / "shallow", shallow, tiny_files.tensors(shallow))
    plain = specjax.load(root / "model")
    for method, settings in SETTINGS.items():
        cfg = methods.method(method).config(settings, plain.meta.target_cfg)
        drafted = testing.tiny_drafter(plain, method, 1, cfg)
        specjax.export(drafted, root / "zoo" / "small" / method, compact=True, target="small")
    return root, known.digest(jax.tree.leaves(plain.target))


@pytest.fixture
def small(files, monkeypatch):
    """The package as if it knew the target as "small" and had drafters for it."""
    root, vectors = files
    model = hub.Packaged("x", "y", "z", "owner/Small", "llama", (64, 32, 2), vectors)
    monkeypatch.setitem(hub.SHORT_NAMES, "small", model)
    monkeypatch.setattr(hub, "_packaged", lambda name, model: root / "model.gguf")
    monkeypatch.setattr(zoo, "FOLDER", root / "zoo")
    return root


@pytest.mark.parametrize("target", ["small", "model", "model.gguf"])
@pytest.mark.parametrize("shapes_only", [False, True])
def test_methods_find_them(small, target, shapes_only):
    """By the short name and, where the target is that model, by any other: alone, in a chain, in vLLM's JSON. Nothing
    is assumed, so nothing is told."""
    where = target if target == "small" else small / target
    load = lambda *drafter, **more: specjax.load(where, *drafter, shapes_only=shapes_only, **more)  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for method in SETTINGS:
            meta = load(method).meta
            assert (meta.drafter, meta.drafter_notes) == (method, (f"{method}: made for small",))
        assert load(("ngram", "eagle3")).meta.drafter_cfg.drafters == ("ngram", "eagle3")
        config = {"method": "eagle3", "num_speculative_tokens": 2}
        assert load(speculative_config=config).meta.drafter_cfg.k == 2
        assert load("mtp", drafter_config={"k": 4}).meta.drafter_cfg.k == 4
    assert shapes_only or load().meta.name == "small"


def test_a_model_is_known_in_any_type(small):
    for dtype in ("float32", "bfloat16", "float16"):
        assert specjax.load(small / "model", dtype=dtype).meta.name == "small"
    assert specjax.load(small / "other").meta.name == str(small / "other")
    assert hub.short("OWNER/small") == "small"
    assert hub.short("") is hub.short(None) is hub.short("owner/other") is None


def test_what_was_loaded_by_a_path_is_exported_by_its_name(small, tmp_path):
    specjax.export(specjax.load(small / "model", "eagle3"), tmp_path / "made")
    checkpoints.convert(tmp_path / "made", tmp_path / "converted", small / "model.gguf")
    for name in ("made", "converted"):
        assert json.loads((tmp_path / name / "config.json").read_text())["target"]["name"] == "small"
    specjax.save(specjax.load(small / "model"), tmp_path / "saved")
    assert specjax.load(tmp_path / "saved", ("ngram", "mtp")).meta.drafter_notes == ("mtp: made for small",)


def test_where_there_is_none(small, monkeypatch):
    """The error names what there is, for which targets, and how to get one; a target is not loaded for nothing."""
    said = "it has: assistant, dflash, dspark, eagle3, mtp for small"
    here = rf"no eagle3 drafter for '{{}}' \({said}\)\. To train one: specjax train --target"
    with pytest.raises(ValueError, match=here.format(small / "other")):
        specjax.load(small / "other", "eagle3")
    monkeypatch.setattr(checkpoints.tree._Reader, "read", lambda *a: pytest.fail("weights were read"))
    for target in ("tiny", str(small / "shallow")):
        with pytest.raises(ValueError, match=here.format(target)):
            specjax.load(target, "eagle3")
    with pytest.raises(
        ValueError,
        match=r"no draft_model drafter for 'small' .it has: assistant, dflash, dspark, eagle3, mtp for small.$",
    ):
        specjax.load("small", "draft_model")
    monkeypatch.setattr(zoo, "FOLDER", small / "nothing")
    assert zoo.available() == ()
    with pytest.raises(ValueError, match=r"no eagle3 drafter for 'small' .it has: none"):
        specjax.load("small", "eagle3")


def test_a_layer_of_the_targets_own_goes_first(small, monkeypatch):
    """MTP is the target's own where it has one; where nobody has, the error is that of its files."""
    with pytest.raises(ValueError, match=r"has no layer for multi-token prediction: .*specjax zoo"):
        specjax.load(small / "other", "mtp")
    monkeypatch.setattr(checkpoints, "has_layer", lambda source, cfg: True)
    with pytest.raises(ValueError, match="has no layer for multi-token prediction"):
        specjax.load(small / "model", "mtp")


def test_they_are_listed(small, monkeypatch):
    assert [(one.target, one.method) for one in zoo.available()] == [
        ("small", method) for method in zoo.METHODS
    ]
    assert zoo.available("other") == ()
    told = CliRunner().invoke(cli.app, ["zoo"]).stdout.splitlines()
    assert [line.split()[:2] for line in told] == [["small", method] for method in zoo.METHODS]
    listed = json.loads(CliRunner().invoke(cli.app, ["zoo", "--json"]).stdout)
    assert [one["method"] for one in listed] == list(zoo.METHODS) == sorted(SETTINGS)
    assert set(zoo.METHODS) <= set(methods.METHODS)
    assert "small: assistant, dflash, dspark, eagle3, mtp" in str(specjax.doctor())
    monkeypatch.setattr(zoo, "FOLDER", small / "nothing")
    assert CliRunner().invoke(cli.app, ["zoo"]).stdout == ""


def test_they_are_small():
    assert sum(one.size for one in zoo.available()) <= LIMIT
    assert all(json.loads((one.folder / zoo.CONFIG).read_text())["compact"] for one in zoo.available())
    assert all(zoo.find("smollm2-135m", one.method) == one.folder for one in zoo.available())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel of the sources, with one folder more in the zoo."""
    root = tmp_path_factory.mktemp("wheel")
    skipped = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "specjax", root / "specjax", ignore=skipped)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, root)
    more = root / "specjax" / "zoo" / "imaginary" / "eagle3"
    more.mkdir(parents=True)
    for name in (zoo.CONFIG, zoo.WEIGHTS, zoo.CARD, "notes.txt"):
        (more / name).write_text("")
    code = "from setuptools import build_meta; print(build_meta.build_wheel('made'))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return root / "made" / done.stdout.split()[-1]


def test_the_wheel_has_them(wheel):
    """Config, weights and card of every drafter, and nothing else that lies beside them."""
    names = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("specjax/zoo/")}
    wanted = {"specjax/zoo/__init__.py"} | {
        f"specjax/zoo/imaginary/eagle3/{n}" for n in (zoo.CONFIG, zoo.WEIGHTS, zoo.CARD)
    }
    for one in zoo.available():
        wanted |= {f"specjax/zoo/{one.target}/{one.method}/{file.name}" for file in one.folder.iterdir()}
    assert names == wanted


INSTALLED = """
import specjax
assert specjax.__file__.startswith({site!r}), specjax.__file__
for one in specjax.zoo.available("smollm2-135m"):
    assert str(one.folder).startswith({site!r})
    params = specjax.load(one.target, drafter=one.method)
    print(one.method, specjax.decode(params, "Name three colours.", max_new_tokens=4).stats.new_tokens)
"""


@pytest.mark.long
@pytest.mark.real
def test_they_work_from_an_installed_wheel(wheel, tmp_path):
    """Away from the sources, without network."""
    site = str(tmp_path / "site")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--target",
        site,
        str(wheel),
    ]
    subprocess.run(pip, check=True)
    env = os.environ | {"PYTHONPATH": site, "HF_HUB_OFFLINE": "1"}
    code = INSTALLED.format(site=site)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line.split() for line in done.stdout.splitlines()] == [
        [one.method, "4"] for one in zoo.available("smollm2-135m")
    ]


# --- cards


ROW = {
    "prompts": 3, "identical": 3, "tau": 3.456, "tau_finished": 3.1, "share_cut": 0.25,
    "accepted_per_position": [0.8, 0.5, 0.3],
}  # fmt: skip


def facts(tmp_path, **texts):
    """Files that training and measuring leave."""
    counts = {"documents": 5, "answers": 9, "tokens": 900, "trained": 700, "ended": 0.5}
    tau = {"drafters": {"eagle3": {"maths": ROW}, "full": {"maths": ROW | {"tau": 3.5}}}, "ngram": {}}
    tau["ngram"] = {
        "3..1 recent": {"maths": ROW | {"tau": 1.9}},
        "5..5 earliest": {"maths": ROW | {"tau": 1.2}},
    }
    options = {"k": "3", "dtype": "float32", "limit": "3", "tokens": "64"}
    made = {
        "training": {
            "recipe": {"method": "eagle3", "rows": 4, "length": 64, "terms": [["ce", 1.0]], "seed": 0},
            "texts": dict.fromkeys(texts or ("gsm8k", "mbpp", "code"), counts),
            "step": 300, "batches_per_epoch": 100, "validation_tau": 3.2, "device": "H200", "jax": "0.11.2",
        },
        "tau": {"options": options, "device": "H200", "versions": {}, "results": tau},
        "packages": {"packages": {"networkx": {"version": "3.4", "licence": "BSD-3-Clause", "prompts": 2}}},
    }  # fmt: skip
    for name, data in made.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    return [f"--{name}={tmp_path / name}.json" for name in made]


def test_a_card_says_it_all(small, tmp_path, monkeypatch):
    """Data with its licences, training, tau beside n-gram's and that of unquantised weights."""
    module, folder = benchmark("zoo_card"), tmp_path / "small" / "eagle3"
    shutil.copytree(small / "zoo" / "small" / "eagle3", folder)
    monkeypatch.setattr(
        sys, "argv", ["zoo_card.py", str(folder), *facts(tmp_path), "--full=full", "--seconds=71"]
    )
    module.main()
    text = (folder / zoo.CARD).read_text()
    for said in (
        "| maths | 3.46 | 3.10 | 3.50 | 1.90 | 3.10 | 25% | 3 of 3 |",
        "| maths | 0.800 | 0.500 | 0.300 |", "| steps | 300 |",
        "| epochs | 3.0 |", "| seconds | 71 |", "| device | H200 |", "CC-BY-4.0", "license: apache-2.0", "owner/Small",
        "| networkx | 3.4 | BSD-3-Clause | 2 |", 'specjax.load("small", drafter="eagle3")', '| terms | [["ce", 1.0]] |',
    ):  # fmt: skip
        assert said in text, said
    check_card(text)


def test_a_card_is_not_written_without_licences_or_with_prompts(small, tmp_path, monkeypatch):
    module = benchmark("zoo_card")
    folder = small / "zoo" / "small" / "eagle3"
    arguments = ["zoo_card.py", str(folder), *facts(tmp_path, strange=1), "--seconds=71"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(ValueError, match=r"nothing is known of the source.s. \['strange'\]"):
        module.main()
    for text in ("two\nlines", "x" * 200, "a | b"):
        with pytest.raises(ValueError, match="this is no name or figure"):
            module.word(text)
    assert not (folder / zoo.CARD).exists()


def check_card(text):
    """Licences are named, and nothing in it reads like a prompt."""
    for heading in ("## Acceptance", "## Data", "## Training", "## Licence"):
        assert heading in text
    assert "license: apache-2.0" in text
    assert "Apache-2.0" in text.partition("## Licence")[2]
    for sign in ("?", "How many", "Write a ", "\\boxed", "def ", ">>>", "turns", "<|im_"):
        assert sign not in text, sign


def test_shipped_cards():
    """Every drafter has one."""
    for one in zoo.available():
        check_card(one.card.read_text("utf-8"))


def test_the_readme_says_what_is_shipped():
    """No more, and no less."""
    rows = re.findall(
        r"^\| \[.*\]\(docs/([a-z0-9-]+)\.md\).*\| yes \|$", (ROOT / "README.md").read_text("utf-8"), re.M
    )
    here = {one.method for one in zoo.available("smollm2-135m")}
    assert set(rows) == here


# --- what is measured


def test_methods_compared_and_n_grams_walked():
    """The demo's answers; and an n-gram drafter's counters are those of walking the plain text."""
    plain = specjax.load("tiny")
    found = demo.compared(plain, {"ids": [3, 4, 5, 6, 3, 4, 5, 6, 3]}, ["ngram"], 40, print)["ids"]
    assert [one.method for one in found] == ["plain", "ngram"]
    assert all(one.row.identical and one.same == "yes" for one in found)
    near = dataclasses.replace(found[1], row=specjax.identity.Row(0, False, 3, 1, 2, 1e-5))
    assert near.same == "up to token 3, logit gap 1.0e-05"
    assert demo.methods("nothing") == ("ngram",)

    module, answer = benchmark("zoo_tau"), found[0].answer
    ended, stats = answer.finish_reason == "stop", found[1].answer.stats
    walked = module.looked_up(ngram.default("cpu"), answer.prompt_tokens, answer.tokens, ended, 64)
    for name in ("rounds", "proposed_at", "accepted_at", "reached_at", "emitted", "tau"):
        assert getattr(walked, name) == getattr(stats, name), name
    assert stats.accepted > 0
    row = module.figures([(walked, ended)])
    assert row["tau"] == (len(answer.tokens) - 1) / walked.rounds  # the prefill's token is not counted
    assert row["share_cut"] == (not ended)
