"""Prompts from files and from the Hub, duplicates, suffixes; prompts that are in an evaluation set."""

import json
import sys
import types

import pytest

from specjax.train import contamination, prompts
from specjax.train.prompts import Source


def write(path, rows) -> str:
    path.write_bytes("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows).encode())
    return str(path)


def asked(found) -> list[list[str]]:
    return [[m["content"] for m in p.messages if m["role"] == "user"] for p in found.items]


def test_rows_of_every_form(tmp_path):
    """Turns, messages, ShareGPT's conversations, a plain prompt, a named field; answers are dropped."""
    rows = [
        {"turns": ["one", "two"]},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "three"}]},
        {
            "messages": [
                {"role": "user", "content": "four"},
                {"role": "assistant", "content": "x", "tool_calls": None},
                {"role": "user", "content": "five"},
                {"role": "assistant", "content": "y"},
            ]
        },
        {"conversations": [{"from": "human", "value": "six"}, {"from": "gpt", "value": "z"}]},
        {"prompt": "seven", "other": 1},
    ]
    found = prompts.read(write(tmp_path / "a.jsonl", rows))
    assert asked(found) == [["one", "two"], ["three"], ["four", "five"], ["six"], ["seven"]]
    assert [m["role"] for m in found.items[1].messages] == ["system", "user"]
    assert [m["role"] for m in found.items[2].messages] == ["user", "user"]
    assert found.counts == {"a": {"rows": 5, "prompts": 5}}
    named = prompts.read(Source(path=write(tmp_path / "b.jsonl", [{"q": "hm"}]), field="q"))
    assert asked(named) == [["hm"]]


def test_lines_end_at_newlines_only(tmp_path):
    """Texts hold other line separators: U+2028, U+0085, form feeds."""
    text = "a\u2028b\u0085c\x0cd"
    path = write(tmp_path / "a.jsonl", [json.dumps({"turns": [text]}, ensure_ascii=False) + "\r", "", "  "])
    assert asked(prompts.read(path)) == [[text]]


def test_given_answers_are_kept(tmp_path):
    """PEER.22: conversations with answers and tools are whole; those without an answer are counted."""
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    talk = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "a"},
    ]
    rows = [{"messages": talk, "tools": [{"type": "function"}]}, {"turns": ["no answer"]}]
    path = write(tmp_path / "a.jsonl", rows)
    found = prompts.read(path, answers=True)
    assert [m["role"] for m in found.items[0].messages] == ["user", "assistant", "tool", "assistant"]
    assert found.items[0].tools == ({"type": "function"},)
    assert found.counts["a"] == {"rows": 2, "unanswered": 1, "prompts": 1}
    again = prompts.read(path)
    assert again.counts["a"] == {"rows": 2, "tools": 1, "prompts": 1}
    assert "1 tools" in str(again)


def test_duplicates_and_variants(tmp_path):
    """PEER.17: a text is there once; suffix variants and near copies of a prompt are of one group."""
    a = write(tmp_path / "a.jsonl", [{"turns": ["What is 2+2?"]}, {"turns": ["Hi"]}, {"turns": ["Hi"]}])
    b = write(tmp_path / "b.jsonl", [{"turns": ["what is 2 + 2"]}, {"turns": ["Hi"]}, {"turns": ["Other"]}])
    found = prompts.read([Source(path=a, suffixes=("", " Think.")), f"second={b}"])
    assert asked(found) == [
        ["What is 2+2?"],
        ["What is 2+2? Think."],
        ["Hi"],
        ["Hi Think."],
        ["what is 2 + 2"],
        ["Other"],
    ]
    assert found.counts["a"] == {"rows": 3, "duplicates": 2, "prompts": 4}
    assert found.counts["second"] == {"rows": 3, "duplicates": 1, "prompts": 2}
    group = [p.group for p in found.items]
    assert group[0] == group[1] != group[2] == group[3] != group[5]
    assert group[4] != group[0]  # "22" is one word, "2 2" are two
    assert len({p.id for p in found.items}) == 6


def test_groups_that_meet_are_one(tmp_path):
    """PEER.17: a source that has the suffix in its text brings the prompt and its variant to one side."""
    with_suffix = write(tmp_path / "a.jsonl", [{"turns": ["Q Think."]}])
    without = write(tmp_path / "b.jsonl", [{"turns": ["Q"]}])
    found = prompts.read([with_suffix, Source(path=without, suffixes=("", " Think."))])
    assert asked(found) == [["Q Think."], ["Q"]]
    assert len({p.group for p in found.items}) == 1


def test_ids_do_not_depend_on_the_company(tmp_path):
    a = prompts.read(write(tmp_path / "a.jsonl", [{"turns": ["x"]}, {"turns": ["y"]}]))
    b = prompts.read(write(tmp_path / "b.jsonl", [{"messages": [{"role": "user", "content": "y"}]}]))
    assert a.items[1].id == b.items[0].id


def test_limits_and_lists_of_sources(tmp_path):
    write(tmp_path / "a.jsonl", [{"turns": [str(i)]} for i in range(9)])
    listed = [
        {"path": str(tmp_path / "a.jsonl"), "limit": 4, "samples": 2, "suffixes": ["", "!"], "name": "n"}
    ]
    (tmp_path / "all.json").write_text(json.dumps(listed))
    found = prompts.read(str(tmp_path / "all.json"))
    assert found.counts == {"n": {"rows": 4, "prompts": 8}}
    assert {p.samples for p in found.items} == {2}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "a.jsonl:1 is not valid JSON"),
        ("[1]", r"a.jsonl:1: expected an object with turns or messages .*got list"),
        ({"text": "x"}, r"got keys \['text'\]"),
        ({"turns": []}, "turns must be a text, or a list"),
        ({"turns": [3]}, "a turn is a text or a message"),
        ({"turns": [" "]}, "an empty user turn"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "must be a text"),
        ({"messages": [{"role": "system", "content": "s"}]}, "no user turn"),
        ({"turns": ["x"], "tools": "["}, "a.jsonl:1: tools are not valid JSON"),
        ({"turns": ["x"], "tools": [1]}, "tools must be a list of JSON schemas"),
    ],
)
def test_bad_rows(tmp_path, row, message):
    """Errors name file and line."""
    with pytest.raises(ValueError, match=message):
        prompts.read(write(tmp_path / "a.jsonl", [row]))


def test_bad_sources(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere.jsonl does not exist"):
        prompts.read(str(tmp_path / "nowhere.jsonl"))
    path = write(tmp_path / "a.jsonl", [{"turns": ["x"]}])
    with pytest.raises(ValueError, match="limit of a must be at least 1"):
        prompts.read(Source(path=path, limit=0))
    with pytest.raises(ValueError, match="suffixes of a must be one or more different"):
        Source(path=path, suffixes=("", ""))
    with pytest.raises(ValueError, match="without a suffix"):
        prompts.read(Source(path=path, suffixes=("!",)), answers=True)
    with pytest.raises(ValueError, match="no prompts in empty"):
        prompts.read(write(tmp_path / "empty.jsonl", [""]))
    (tmp_path / "s.json").write_text('[{"file": "x"}]')
    with pytest.raises(ValueError, match="a source has a path and may have"):
        prompts.read(str(tmp_path / "s.json"))


class FakeHub(types.ModuleType):
    def load_dataset(self, *args, **keywords):
        self.asked = (args, keywords)
        if args[0] == "no/such":
            raise ConnectionError("offline")
        return [{"question": "q1"}, {"question": "q2"}]


def test_the_hub(monkeypatch, tmp_path):
    """Rows of a data set; a clear error when there is no network, and when the package is missing."""
    monkeypatch.chdir(tmp_path)
    hub = FakeHub("datasets")
    monkeypatch.setitem(sys.modules, "datasets", hub)
    found = prompts.read(Source(path="openai/gsm8k", subset="main", field="question", limit=2))
    assert asked(found) == [["q1"], ["q2"]]
    assert hub.asked == (("openai/gsm8k", "main"), {"split": "train[:2]"})
    with pytest.raises(ValueError, match=r"no/such is no file here.*offline.*ConnectionError: offline"):
        prompts.read("no/such")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="pip install datasets"):
        prompts.read("openai/gsm8k")


# --- contamination

WORDS = [f"w{i}" for i in range(40)]


def text(*parts) -> str:
    return " ".join(word for part in parts for word in (WORDS[part] if isinstance(part, slice) else [part]))


def test_contamination(tmp_path):
    """Equal but for case and punctuation, or more than 30 % of the ten-word shingles: left out and counted."""
    evaluation = write(
        tmp_path / "e.jsonl", [{"turns": [text(slice(0, 20))]}, {"turns": ["Is it SO, then?"]}]
    )
    inside = [
        {"turns": ["is it so then"]},
        {"turns": [text(slice(0, 20)).upper() + "!"]},
        {"turns": [text(slice(0, 14), *"abcdefg")]},  # 5 of 12 shingles
        {"turns": ["fresh", text(slice(2, 20))]},  # in the second turn
    ]
    outside = [
        {"turns": ["is it so then or not"]},
        {"turns": [text(slice(0, 12), *"abcdefg")]},  # 3 of 10: not more than 30 %
        {"turns": [text(slice(0, 9))]},  # too short for a shingle
        {"turns": [text(slice(20, 40))]},
    ]
    train = write(tmp_path / "t.jsonl", inside + outside)
    kept, dropped = contamination.check(prompts.read(train), evaluation)
    assert asked(kept) == [row["turns"] for row in outside]
    assert [list(p.asked) for p in dropped] == [row["turns"] for row in inside]
    assert kept.counts["t"] == {"rows": 8, "contaminated": 4, "prompts": 4}
    with pytest.raises(ValueError, match="all 4 prompts are in the evaluation files"):
        contamination.check(prompts.read(write(tmp_path / "i.jsonl", inside)), evaluation)


def test_suffixes_do_not_contaminate(tmp_path):
    """A suffix that evaluation prompts share is no overlap; the evaluation's prompt with its suffix is found."""
    suffix = " " + text(slice(20, 34))
    evaluation = write(tmp_path / "e.jsonl", [{"turns": [text(slice(0, 8)) + suffix]}])
    train = write(tmp_path / "t.jsonl", [{"turns": ["new one"]}, {"turns": [text(slice(0, 8))]}])
    kept, dropped = contamination.check(prompts.read(Source(path=train, suffixes=("", suffix))), evaluation)
    assert {p.asked[0] for p in kept.items} == {"new one"}
    assert len(kept) == 2
    assert len(dropped) == 2  # both variants go


def test_wording_does_not_contaminate():
    """What more than 20 evaluation turns have in common is how they ask, not what; what they ask is still found."""
    asks = text(slice(0, 12))
    known = contamination.Evaluation([f"{asks} {text(*(f'{i}x{j}' for j in range(12)))}" for i in range(21)])
    assert not known.near(f"{asks} something else")
    assert known.near(f"other {text(*(f'3x{j}' for j in range(12)))}")
    few = contamination.Evaluation([f"{asks} {i}" for i in range(20)])
    assert few.near(f"{asks} something else")
