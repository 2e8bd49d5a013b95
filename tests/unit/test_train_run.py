"""From prompts to a drafter that decodes: the whole way, and what stands in it."""

import dataclasses
import json

import pytest
from typer.testing import CliRunner

import specjax
from specjax import cli, testing
from specjax.checkpoints import tokenizer
from specjax.train import Watch, prepare, train
from specjax.types import Params

SMALL = {"steps": 4, "rows": 2, "length": 96, "dtype": "float32", "chunks": 1}
WATCH = Watch(log_every=2, evaluate_every=4)
EOS = 257


@pytest.fixture(scope="module")
def target():
    made = testing.tiny_params(2, vocab=260, max_positions=512)
    return Params(
        made.target, None, dataclasses.replace(made.meta, tokenizer_id=tokenizer.BYTES, eos_ids=(EOS,))
    )


def prompts(path, count=16):
    rows = [{"turns": [f"Count {i} and {i * 7} {'xyz'[i % 3]}"]} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def texts(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    source = prompts(folder / "p.jsonl")
    return prepare(
        target, str(source), folder / "texts", max_new_tokens=16, rows=8, chat_template=False, verbose=False
    )


def run(target, texts, folder, method="eagle3", **more):
    given = {"settings": {"k": 2, "draft_vocab": 40}, "unroll": 2, "validation": 0.2, "watch": WATCH}
    return train(target, texts, method, folder, verbose=False, **{**SMALL, **given, **more})


def test_prompts_to_drafter(target, texts, tmp_path):
    """TRN.3, TRN.4: the folder's drafter is the trained one; its vocabulary has the texts' tokens and the end."""
    fitted = run(target, texts, tmp_path / "run")
    assert fitted.finished
    loaded = dataclasses.replace(target, drafter=None)
    specjax.save(loaded, tmp_path / "target")
    again = specjax.load(tmp_path / "target", drafter=tmp_path / "run" / "drafter", verbose=False)
    both = [specjax.decode(p, [[65, 66, 67]], max_new_tokens=20) for p in (fitted.params, again)]
    assert (
        both[0].tokens == both[1].tokens == specjax.decode(target, [[65, 66, 67]], max_new_tokens=20).tokens
    )
    assert both[0].total == dataclasses.replace(
        both[1].total,
        **{n: getattr(both[0].total, n) for n in ("prefill_seconds", "decode_seconds", "compile_seconds")},
    )
    ids = {int(i + offset) for i, offset in enumerate(again.drafter.d2t)}
    assert len(ids) == 40
    assert EOS in ids
    note = json.loads((tmp_path / "run" / "training.json").read_text())
    assert (note["steps"], note["recipe"]["method"]) == (4, "eagle3")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"method": "medusa"}, "no training method for drafters of kind 'medusa'"),
        ({"lerning_rate": 1.0}, r"a recipe has no field\(s\) \['lerning_rate'\]"),
        ({"settings": {"depth": 3}}, "depth"),
        ({"source": "offline"}, "give their folder"),
        ({"source": "cloud"}, "'online', 'offline' or 'hybrid'"),
        ({"validation": 1.0}, "share of the prompts"),
        ({"layout": "onnx"}, "unknown layout 'onnx'"),
        ({"rows": 3, "accumulate": 2}, "do not divide"),
    ],
)
def test_bad_requests(target, texts, tmp_path, changes, error):
    """Named before anything is computed; no folder is left behind."""
    with pytest.raises(ValueError, match=error):
        run(target, texts, tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()


def test_texts_of_another_target(texts, tmp_path):
    """A drafter is trained on what its own target says."""
    other = testing.tiny_params(3, vocab=260, max_positions=512)
    meta = dataclasses.replace(other.meta, tokenizer_id=tokenizer.BYTES, eos_ids=(EOS,))
    with pytest.raises(ValueError, match=r"made by another target.*weights"):
        run(Params(other.target, None, meta), texts, tmp_path / "run")


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("mtp", {"settings": {"k": 2}}),
        ("mtp", {"settings": {"k": 2, "draft_vocab": 40}}),
        ("assistant", {"settings": {"k": 2}}),
        ("dflash", {"settings": {"layers": 1, "drafts": 2}, "anchors": 8}),
        ("dspark", {"settings": {"layers": 1, "drafts": 2, "draft_vocab": 40}, "anchors": 8}),
    ],
)
def test_every_method(target, texts, tmp_path, method, more):
    """TRN.3: each kind trains, is written, read again, and drafts for the same ids."""
    more = {"source": "online", **more}
    if method in ("dflash", "dspark"):
        more["settings"] = more["settings"] | {"mask_embedding": True}
    fitted = run(target, texts, tmp_path / "run", method, **more)
    specjax.save(target, tmp_path / "target")
    again = specjax.load(tmp_path / "target", drafter=tmp_path / "run" / "drafter", verbose=False)
    both = [specjax.decode(p, [[65, 66, 67]], max_new_tokens=20) for p in (fitted.params, again)]
    assert (
        both[0].tokens == both[1].tokens == specjax.decode(target, [[65, 66, 67]], max_new_tokens=20).tokens
    )
    assert both[0].total.accepted == both[1].total.accepted


def test_command_line_requests(tmp_path):
    """What is missing or contradicts is said before anything is loaded."""
    ask = lambda *args: CliRunner().invoke(cli.app, ["train", *args])  # noqa: E731
    some = ["--target", "tiny", "--method", "eagle3", "--out", str(tmp_path / "out")]
    assert "--out is needed" in ask(*some[:4]).output
    assert "either --prompts" in ask(*some).output
    assert "--samples goes with --prompts only" in ask(*some, "--texts", "x", "--samples", "2").output
    assert "--settings is no JSON" in ask(*some, "--texts", "x", "--settings", "{").output
    assert "no training method" in ask(*some[:2], "--method", "medusa", *some[4:], "--texts", "x").output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("option", "error"),
    [
        (("--settings", '{"depth": 3}'), "depth"),
        (("--recipe", '{"step": 3}'), "no field"),
        (("--layout", "onnx"), "unknown layout"),
    ],
)
def test_request_is_checked_before_answers(target, tmp_path, option, error):
    """Nobody waits for answers to be told of a misspelt setting."""
    specjax.save(target, tmp_path / "target")
    some = ["--target", str(tmp_path / "target"), "--method", "eagle3", "--out", str(tmp_path / "out")]
    asked = [*some, "--prompts", str(prompts(tmp_path / "p.jsonl")), *option]
    said = CliRunner().invoke(cli.app, ["train", *asked])
    assert said.exit_code == 2
    assert error in said.output
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_one_command(target, tmp_path):
    """`specjax train` with prompts: answers, drafter, and the same command again does nothing twice."""
    meta = dataclasses.replace(target.meta, chat_template=None)
    specjax.save(Params(target.target, None, meta), tmp_path / "target")
    source = prompts(tmp_path / "p.jsonl")
    command = [
        "train", "--target", str(tmp_path / "target"), "--method", "eagle3", "--out", str(tmp_path / "out"),
        "--prompts", str(source), "--max-new-tokens", "16", "--validation", "0.2", "--steps", "4", "--rows", "2",
        "--length", "96", "--settings", '{"k": 2}', "--recipe", '{"unroll": 2}',
    ]  # fmt: skip
    first = CliRunner().invoke(cli.app, command)
    assert first.exit_code == 0, first.output
    assert "tau" in first.stdout
    assert "drafter" in first.stdout
    assert "training: step 4/4, loss" in first.stderr
    again = CliRunner().invoke(cli.app, command)
    assert (again.exit_code, again.stdout) == (0, first.stdout)
