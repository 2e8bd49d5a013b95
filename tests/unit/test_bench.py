"""Measurements: figures against a trace worked by hand (MET.1-5, PRF.7), data sets, tables.

What decodes here is the toy model; speeds mean nothing on it and are not looked at.
"""

import dataclasses
import json
import re
import sys

import pytest
from benched import row
from told import told

from specjax.bench import data, measure as measuring, rows
from specjax.bench.ahead import compile_ahead
from specjax.bench.cli import _datasets
from specjax.bench.rows import Row, Spread, Timed
from specjax.bench.setting import Setting, batches
from specjax.bench.table import Table
from specjax.core import programs


def test_figures_of_a_trace_worked_by_hand():
    """MET.1 MET.2 MET.3 PRF.7: docs/benchmarks.md says how each of these comes about."""
    one = row()
    s = one.stats
    assert (s.rounds, s.proposed, s.accepted, s.emitted, s.new_tokens) == (5, 20, 10, 14, 16)
    assert one.tau == 14 / 5
    assert s.acceptance_rate == 0.5
    assert s.accepted_per_position == (4 / 5, 3 / 5, 2 / 5, 1 / 5)
    assert s.conditional_per_position == (4 / 5, 3 / 4, 2 / 3, 1 / 2)
    assert sum(s.accepted_at) == s.accepted
    assert (one.speed.median, one.plain_speed.median, one.ratio.median) == (16.0, 8.0, 2.0)
    assert one.decode_ratio.median == pytest.approx((14 / 0.75) / (14 / 1.75))  # 2.33
    assert one.call_ms == pytest.approx(250.0)
    assert one.plain_call_ms == pytest.approx(1750 / 9)
    assert one.busy == 5 / 6  # two rows, three rounds: 3 + 2 of 6
    assert one.plain_busy == 14 / 18
    costs = one.costs
    assert (costs.round, costs.verify, costs.draft) == (1.25, 1.05, 0.15)
    assert costs.other == pytest.approx(0.05)
    assert one.predicted == pytest.approx(14 / 5 / 1.25 * (5 / 6) / (14 / 18))  # 2.4
    assert one.gap == pytest.approx(2.4 / (7 / 3) - 1)
    assert Row.from_dict(json.loads(json.dumps(one.as_dict()))) == one


def test_a_slower_machine_is_told_from_a_slower_drafter():
    """Plain batches decoded again say what plain decoding of all of them would take now."""
    then = [Timed(10, 9, (9,), 0.1, 0.9), Timed(20, 19, (19,), 0.2, 1.8)]
    now = {1: Timed(20, 19, (19,), 0.2, 3.6)}
    assert rows.scaled(then, now) == [
        Timed(10, 9, (9,), 0.1, 1.8),
        Timed(20, 19, (19,), 0.2, 3.6),
    ]
    assert rows.scaled(then, dict(enumerate(then))) == then
    assert rows.busy([Timed(3, 0, (0, 0), 0.1, 0.0)]) == 1.0  # nobody had a round


# --- data sets


def test_builtin_prompts():
    whole = data.dataset("builtin")
    kinds = ["maths", "code", "chat", "edit"]
    parts = [data.dataset(f"builtin:{kind}").prompts for kind in kinds]
    assert len(whole.prompts) == len(set(whole.prompts)) == 40
    assert [len(p) for p in parts] == [10] * 4
    assert whole.prompts[:4] == tuple(p[0] for p in parts)  # the first few are of every kind
    assert data.dataset("builtin", 3).checksum != whole.checksum == data.dataset("builtin").checksum


@pytest.mark.parametrize(
    ("given", "text", "error", "match"),
    [
        ("gsm9k", None, ValueError, "unknown data set 'gsm9k'; did you mean 'gsm8k'.*NAME=FILE.jsonl"),
        ("builtin:poems", None, ValueError, "maths, code, chat, edit; got 'poems'"),
        ("mine=FILE", None, FileNotFoundError, "'mine'.*does not exist"),
        ("mine=FILE", "", ValueError, "holds no prompts"),
        ("mine=FILE", '{"turns": ["a"]}\n{"turns": ["b"\n', ValueError, "FILE:2 is not valid JSON"),
        (
            "mine=FILE",
            '{"question": "a"}\n',
            ValueError,
            r"FILE:1: expected an object.*got keys \['question'",
        ),
        (
            "mine=FILE",
            '{"messages": [{"role": "system", "content": "x"}]}\n',
            ValueError,
            "FILE:1: no user turn",
        ),
        ([], None, ValueError, "a name, a file or a list of prompts"),
        ("gsm8k", None, ValueError, "data set 'gsm8k'.*Without the Hub: gsm8k=FILE.jsonl"),
    ],
)
def test_data_set_errors(given, text, error, match, tmp_path, monkeypatch):
    def unreachable(*args, **kwargs):
        raise ConnectionError("no route")

    monkeypatch.setitem(
        sys.modules, "datasets", type("Fake", (), {"load_dataset": staticmethod(unreachable)})
    )
    path = tmp_path / "p.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(error, match=match.replace("FILE:", re.escape(str(path)) + ":")):
        data.dataset(given.replace("FILE", str(path)) if isinstance(given, str) else given)


def test_data_sets_of_the_hub_are_asked_as_known(monkeypatch, tmp_path):
    asked = []

    def load_dataset(name, subset, split):
        asked.append((name, subset, split))
        return [{"question": "2 + 2?", "answer": "4"}]

    monkeypatch.setitem(
        sys.modules, "datasets", type("Fake", (), {"load_dataset": staticmethod(load_dataset)})
    )
    assert data.dataset("gsm8k", 5).prompts[0].startswith("2 + 2?\nPlease reason")
    assert asked == [("openai/gsm8k", "main", "test[:5]")]
    with pytest.raises(ValueError, match="expected a text in 'problem'"):
        data.dataset("math500")
    path = tmp_path / "p.jsonl"
    path.write_text('{"turns": ["a\u2028b", "later"]}\n', "utf-8")
    assert data.dataset(f"gsm8k={path}").prompts == ("a\u2028b",)
    assert data.dataset(path).name == "p"


def test_data_sets_of_the_command_line():
    assert _datasets("a,gsm8k", ["gsm8k=x.jsonl"]) == ["a", "gsm8k=x.jsonl"]
    assert _datasets(None, ["a=x.jsonl"]) == ["a=x.jsonl"]
    assert _datasets(None, None) == ["builtin"]
    with pytest.raises(ValueError, match=r"\['b'\], which --datasets does not have"):
        _datasets("a", ["b=x.jsonl"])


# --- tables


def test_table_in_every_form(tmp_path):
    """MET.4 MET.5: what was asked, and identity, beside every figure."""
    mine = [row(k=k, ratio=Spread(k / 2, k / 3, k), batch=1) for k in (1, 3)]
    mine += [row(batch=4, temperature=0.7, checked="law", notes=("note",)), row(k=3, batch=1, repeats=3)]
    table = Table(tuple(mine), {"mine set k=9": "at most 7"})
    text = table.markdown()
    assert all(part in text for part in ("| 2/2 |", "| law |", "note", "at most 7"))
    assert "2 prompts of set (0), chat template model, at most 16 tokens" in text
    assert table.best("mine", "set").repeats == 3  # more repeats replace the row of few
    assert table.best("other", "set") is None
    assert "mine" in str(table)
    assert table.csv().count("\n") == 5
    pytest.importorskip("matplotlib")
    table.write(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "acceptance.png", "batch.png", "ratio.png", "rows.csv", "table.md", "time.png",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="kind must be one of"):
        table.plot("pie")
    with pytest.raises(ValueError, match="no row has"):
        Table(()).plot("ratio")


# --- for real, on the toy model


def test_a_row_for_real():
    """A drafter that is always right and one that never is, beside plain decoding. MET.5 MET.6 PRF.4 PRF.7."""
    asked = {"max_new_tokens": 12, "repeats": 2, "batch": 2, "verbose": False}
    params = told("ALWAYS_RIGHT")
    prompts = [[3], [9, 8, 7, 6, 5, 4, 3, 2, 1], [1, 2, 3]]
    shapes = {"max_len": 64, "prefill_chunk": 16}
    made = batches(params, prompts, Setting(batch=2, max_new_tokens=12, **shapes))
    seconds = compile_ahead(params, {"row": (made, 3)}, None, True, 2)
    before = programs.compile_count()
    assert seconds["row"] > 0
    right = measuring.measure(params, prompts, 3, **asked, **shapes)
    assert programs.compile_count() == before
    assert (right.prompts, right.identical, right.checked, right.rule) == (2, 2, "greedy", "match")
    assert right.tau == pytest.approx(11 / 3)  # 4 + 4 + 3 of each prompt's 11 tokens
    assert any("left out" in note for note in right.notes)
    assert right.costs.widths == ((3, 1.0),)
    assert min(right.costs.plain_ms, right.costs.round_ms) > 0
    assert min(right.costs.verify_ms, right.costs.draft_ms) >= 0  # beyond a call without a turn
    assert min(right.state_bytes, right.drafter_bytes) > 0
    assert right.facts["versions"]["specjax"]
    assert Row.from_dict(json.loads(json.dumps(right.as_dict()))) == right
    wrong = measuring.measure(told("ALWAYS_WRONG"), prompts, 3, **asked, **shapes)
    assert programs.compile_count() == before  # other weights, the same programs
    assert (wrong.tau, wrong.stats.accepted, wrong.identical) == (1.0, 0, 2)
    plain = measuring.plain_answers(params, prompts, made.setting)
    with pytest.raises(ValueError, match="other prompts or another setting"):
        measuring.measure(params, prompts, 3, batch=2, max_new_tokens=11, plain=plain)
    with pytest.raises(ValueError, match="params have no drafter"):
        measuring.measure(
            dataclasses.replace(params, meta=dataclasses.replace(params.meta, drafter=None)), prompts
        )
