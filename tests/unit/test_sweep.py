"""Sweeps: rows on disk survive a kill at any point, and only what is missing is measured."""

import json
import signal
import subprocess
import sys

import pytest
from benched import row
from tiny_models import target
from told import model
from typer.testing import CliRunner

import specjax
from specjax.bench import data, measure as measuring, sweep as sweeping
from specjax.bench.answers import answer
from specjax.bench.rows import Row, Spread, Timed
from specjax.bench.setting import batches
from specjax.bench.store import Lines, Store
from specjax.bench.table import Table
from specjax.cli import app


def test_lines_survive_a_kill_at_any_byte(tmp_path):
    """A torn last line is cut off and measured again; whole ones are kept, none twice."""
    path = tmp_path / "rows.jsonl"
    lines = Lines(path)
    lines.add("a", {"x": 1})
    lines.add("b", {"x": 2})
    lines.close()
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for size in range(first, len(whole) + 1):
        path.write_bytes(whole[:size])
        again = Lines(path)
        kept = ["a"] if size < len(whole) else ["a", "b"]
        assert list(again.found) == kept
        if kept == ["a"]:
            again.add("b", {"x": 2})
        with pytest.raises(ValueError, match="already"):
            again.add("b", {"x": 3})
        again.close()
        assert path.read_bytes() == whole
    path.write_bytes(b"{damaged\n" + whole)
    with pytest.raises(ValueError, match=r"rows\.jsonl:1 is damaged"):
        Lines(path)


KILLED = """
import os, signal, sys
from specjax.bench import store
path, how = sys.argv[1:]
write, sync = os.write, os.fsync
def half(fd, data):
    write(fd, bytes(data)[: len(data) // 2])
    os.kill(os.getpid(), signal.SIGKILL)
def gone(fd):
    os.kill(os.getpid(), signal.SIGKILL)
lines = store.Lines(__import__("pathlib").Path(path))
for key in "abc":
    if key in lines.found:
        continue
    if key == "b" and how == "before": os.kill(os.getpid(), signal.SIGKILL)
    if key == "b" and how == "inside": os.write = half
    if key == "b" and how == "behind": os.fsync = gone
    lines.add(key, {"x": key * 50})
"""


@pytest.mark.parametrize(("how", "kept"), [("before", "a"), ("inside", "a"), ("behind", "ab")])
def test_killed_for_real(tmp_path, how, kept):
    """SIGKILL before, inside and right behind the write of a row: the next run neither loses nor repeats one."""
    path = tmp_path / "rows.jsonl"
    run = lambda how: subprocess.run([sys.executable, "-c", KILLED, str(path), how], check=False).returncode  # noqa: E731
    assert run(how) == -signal.SIGKILL
    lines = Lines(path)
    assert list(lines.found) == list(kept)
    lines.close()
    assert run("not") == 0
    assert [json.loads(line)["key"] for line in path.read_text().splitlines()] == ["a", "b", "c"]


def test_other_settings_and_other_processes_are_refused(tmp_path):
    common = {"target": "toy", "device": "cpu"}
    with Store(tmp_path, common) as store:
        store.same("data set", "x", "3 prompts")
        with pytest.raises(ValueError, match="in use by another process"):
            Store(tmp_path, common)
    with pytest.raises(
        ValueError, match=r"other settings.*device was 'cpu' and is 'gpu'.*choose another folder"
    ):
        Store(tmp_path, common | {"device": "gpu"})
    with (
        Store(tmp_path, common) as store,
        pytest.raises(ValueError, match="data set x was 3 prompts and is 4"),
    ):
        store.same("data set", "x", "4 prompts")


@pytest.fixture
def told():
    """Of every row: prompts and notes."""
    return []


@pytest.fixture
def faked(monkeypatch, told):
    """Sweeps whose rows are made up: the ratio is best at k = 3. Returns what was measured, in order."""
    order = []

    def measure(params, prompts, k, **given):
        order.append((given["method"], given["dataset"], k, given["batch"], given["repeats"]))
        told.append((len(prompts), given["notes"]))
        ratio = {1: 1.5, 3: 2.0}.get(k, 1.0)
        return row(
            method=given["method"], dataset=given["dataset"], k=k, batch=given["batch"], repeats=given["repeats"],
            ratio=Spread.of([ratio]), prompts=len(prompts),
        )  # fmt: skip

    def plain_answers(params, prompts, setting):
        order.append(("plain", setting.batch))
        made = batches(params, prompts, setting)
        answers = [[answer(ids, [1, 2], "length") for ids in batch] for batch in made.ids]
        timed = [Timed(2, 1, (1,) * len(batch), 0.1, 0.1) for batch in made.ids]
        return measuring.Plain(made.checksum, setting, answers, timed)

    class Faked(sweeping.Sweep):
        def __init__(self, *args):
            super().__init__(*args, measure=measure, plain_answers=plain_answers)

    def compile_ahead(params, asked, rule, parts, at_once):
        order.append(("compile", *[key[0] for key in asked][:1], [k for _, k in asked.values()]))
        return dict.fromkeys(asked, 1.0)

    monkeypatch.setattr(sweeping, "compile_ahead", compile_ahead)
    monkeypatch.setattr(sweeping, "Sweep", Faked)
    monkeypatch.setattr(sweeping, "enable_compilation_cache", lambda: None)
    return order


SETS = [data.Dataset("x", ((1, 2), (3, 4)), ""), data.Dataset("y", ((5, 6), (7,)), "")]
ASKED = {
    "methods": {"a": "ngram", "b": "ngram"},
    "datasets": SETS,
    "k": (1, 3),
    "max_new_tokens": 8,
    "plots": False,
    "compile_threads": 2,
}


def test_sweep_goes_on_where_it_was(faked, tmp_path):
    """Stopped before every row in turn: the rows are those of one run, in its order, each measured once."""
    whole = specjax.sweep(model(), out=tmp_path / "whole", **ASKED)
    expected = [item for item in faked if item[0] in ("a", "b")]
    assert [(r.method, r.dataset, r.k) for r in whole.rows] == [
        (m, d, k) for m in "ab" for k in (1, 3) for d in "xy"
    ]
    assert [item for item in faked if item[0] == "compile"] == [
        ("compile", "a", [1, 3]),
        ("compile", "b", [1, 3]),
    ]
    faked.clear()

    class Stopped(Exception):
        pass

    def stop(table, row):
        raise Stopped

    for _ in expected:
        with pytest.raises(Stopped):
            specjax.sweep(model(), out=tmp_path / "parts", done=stop, **ASKED)
    again = specjax.sweep(model(), out=tmp_path / "parts", **ASKED)
    assert [item for item in faked if item[0] in ("a", "b")] == expected
    assert faked.count(("plain", 1)) == 2  # answers of a data set are made once
    assert again.rows == whole.rows == Table.read(tmp_path / "parts").rows
    assert again.finished


def test_sweep_of_the_best_and_of_limits(faked, told, tmp_path):
    asked = ASKED | {"out": tmp_path, "datasets": SETS[:1], "methods": {"a": "ngram"}}
    with pytest.raises(ValueError, match=r"k='best'.*no row of a on x"):
        specjax.sweep(model(), **asked | {"k": "best", "batch": 2})
    specjax.sweep(model(), **asked, best_repeats=3)
    assert faked[-1] == ("a", "x", 3, 1, 3)
    specjax.sweep(model(), **asked | {"k": "best", "batch": (1, 2)})
    assert faked[-1] == ("a", "x", 3, 2, 1)
    assert ("compile", "a", [3, 3]) in faked  # the best is known before
    few = data.Dataset("few", ((1, 2), (3, 4, 5), (6,)), "")
    specjax.sweep(model(), **asked | {"datasets": few, "k": 1}, max_prompt_tokens=2)
    assert told[-1] == (2, ("1 prompt(s) of more than 2 tokens were left out",))
    table = specjax.sweep(model(), **asked | {"k": 2000}, seconds=0.0)
    assert not table.finished  # no time for any row
    table = specjax.sweep(model(), **asked | {"k": 2000})
    assert "2000" in table.skipped["a x k=2000 batch=1 t=0"]
    for wrong, match in (
        ({"max_prompt_tokens": 1}, "every prompt of data set 'x' is longer than 1 tokens: from 2 on"),
        ({"max_new_tokens": 9}, "max_new_tokens was 8 and is 9"),
        ({"datasets": [data.Dataset("x", ((1, 2),), "")]}, "data set x was 2 prompts"),
        ({"platform": "cuda"}, "cuda was asked for, but jax runs on cpu"),
        ({"datasets": [SETS[0], SETS[0]]}, "different names"),
        ({"methods": ["ngram", "ngram"]}, "method names must differ"),
        ({"methods": ["dspark"]}, "dspark"),
        ({"k": "many"}, "'auto' and 'best'"),
        ({"batch": 3, "k": 1}, "a batch of 3 needs at least 3 prompts, got 2"),
    ):
        with pytest.raises(ValueError, match=match):
            specjax.sweep(model(), **asked | wrong)


KILLED_SWEEP = """
import os, signal, sys
from specjax.bench import store
from specjax.cli import app
add = store.Lines.add
def killing(self, key, row):
    add(self, key, row)
    if self.path.name == store.ROWS and len(self.found) == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
store.Lines.add = killing
app(sys.argv[2:])
"""


@pytest.mark.long
def test_commands_from_end_to_end(tmp_path):
    """``specjax sweep``, killed after its first row and run again; ``specjax bench``, sampled and in batches."""
    specjax.save(target(), tmp_path / "model")
    file = tmp_path / "p.jsonl"
    file.write_text(
        "".join(json.dumps({"turns": [text]}) + "\n" for text in ("a b a b a b", "c d", "e", "f g f"))
    )
    words = [str(tmp_path / "model"), "--methods", "ngram", "--max-new-tokens", "12", "--limit", "4"]
    asked = ["sweep", *words, "--data", f"x={file}", "--k", "1,3", "--out", str(tmp_path / "out"), "--json"]
    run = [sys.executable, "-c", KILLED_SWEEP, "1", *asked]
    assert subprocess.run(run, check=False, capture_output=True).returncode == -signal.SIGKILL
    (first,) = Table.read(tmp_path / "out").rows
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    found = [Row.from_dict(row) for row in json.loads(done.stdout)]
    assert found[0] == first
    assert [(row.k, row.identical, row.prompts, row.checked) for row in found] == [
        (k, 4, 4, "greedy") for k in (1, 3)
    ]
    assert all(row.stats.rounds and row.costs.verify_ms is not None and row.drift.low > 0 for row in found)
    assert CliRunner().invoke(app, [*asked, "--seconds", "0"]).exit_code == 0  # nothing is left to do
    late = CliRunner().invoke(app, [*asked, "--batch", "2", "--seconds", "0"])
    assert late.exit_code == 75
    assert "run the same command again" in late.stderr
    options = [
        "--k",
        "3",
        "--batch",
        "1,2",
        "--temperature",
        "0,0.7",
        "--repeats",
        "1",
        "--no-parts",
        "--json",
    ]
    asked = ["bench", *words, "--data", str(file), *options, "--out", str(tmp_path / "bench")]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    rows = [Row.from_dict(row) for row in json.loads(done.stdout)]
    assert [(row.batch, row.temperature) for row in rows] == [(1, 0.0), (1, 0.7), (2, 0.0), (2, 0.7)]
    assert [(row.identical, row.checked) for row in rows] == [(4, "greedy"), (4, "match")] * 2
    assert (tmp_path / "bench" / "batch.png").is_file()
    for wrong, match in (
        (["--data", "gsm"], "unknown data set"),
        (["--platform", "rocm"], "jax runs on cpu"),
    ):
        done = CliRunner().invoke(app, ["bench", *words, *wrong])
        assert done.exit_code == 2
        assert match in done.stderr
