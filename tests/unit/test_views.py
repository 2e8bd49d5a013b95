"""How results look in notebooks and terminals: escaped, tinted, with the figures of the metrics."""

import io
import re
import xml.etree.ElementTree as ElementTree

import pytest
from rich.console import Console

from specjax import html, views
from specjax.checkpoints.tokenizer import BYTES, get
from specjax.identity import Report, Row
from specjax.metrics import Stats
from specjax.results import Completion, Piece, Result

TEXT = "<b>a & b</b> é\nx"  # markup, an entity, a character of two tokens, a line break
STATS = Stats.from_rounds([(4, 4, 5), (4, 1, 2), (0, 0, 1), (2, 0, 1)], new_tokens=10, decode_seconds=2.0)


def completion(text=TEXT, **changes):
    ids = get(BYTES).encode(text, False)
    fields = {
        "drafted": [i % 3 != 2 for i in range(len(ids))],
        "tokenizer_id": BYTES,
        "stats": STATS,
    } | changes
    return Completion(text, ids, "stop", fields.pop("stats"), [1], **fields)


def words(page: str) -> str:
    """What a browser would show; fails unless every tag is closed and every text escaped."""
    return "".join(ElementTree.fromstring(f"<body>{page}</body>").itertext())


def rendered(thing) -> str:
    console = Console(file=io.StringIO(), width=100, color_system=None)
    console.print(thing)
    return console.file.getvalue()


def test_text_is_shown_as_it_is():
    """Markup in a text is text; drafted tokens are tinted, the others not, and together they are the text."""
    page = completion()._repr_html_()
    assert words(page) == TEXT
    tinted = re.findall(rf'<span style="background: {re.escape(html.TINT)}">(.*?)</span>', page, re.S)
    assert tinted[0] == "&lt;b"
    pieces = views.spans(completion())
    assert "".join(text for text, _ in pieces) == TEXT
    assert [flag for text, flag in pieces if text][:4] == [True, True, False, True]


@pytest.mark.parametrize(
    "changes",
    [{"tokenizer_id": ""}, {"tokenizer_id": "/no/such/folder"}, {"text": "not what the ids say"}],
    ids=str,
)
def test_text_that_cannot_be_split_is_not_tinted(changes):
    text = changes.pop("text", TEXT)
    one = completion(**changes)
    one = Completion(text, one.tokens, "stop", STATS, [1], one.drafted, tokenizer_id=one.tokenizer_id)
    assert views.spans(one) == [(text, False)]


def test_without_a_tokenizer_ids_are_shown():
    one = Completion(None, [5, 6], "length", STATS, [1], [True, False])
    assert words(one._repr_html_()).split() == ["5", "6"]


def test_text_cut_at_a_stop_ends_there():
    """Ids go on to the end of the stop string; the text does not."""
    one = completion()
    cut = Completion(TEXT[:5], one.tokens, "stop", STATS, [1], one.drafted, tokenizer_id=BYTES)
    assert "".join(text for text, _ in views.spans(cut)) == TEXT[:5]


def test_result():
    """Every answer, acceptance by position, tau; many answers are cut short and it is said how many."""
    one = Result([[completion()]], single=True)
    shown = words(one._repr_html_())
    for told in ("tau 2.25", "5 of 10 (50%)", "tokens/s 5.0", "67% (2 of 3)", "33% (1 of 3)", "tinted"):
        assert told in shown.replace("\n", " "), told
    assert "<b>a & b</b>" in rendered(one)
    assert "kept by position" in rendered(one)
    many = Result([[completion()]] * (views.SHOWN + 3), single=False)
    for page in (words(many._repr_html_()), rendered(many)):
        assert page.count("a & b") == views.SHOWN
        assert "and 3 more" in page
    plain = Result([[completion(drafted=[False] * 99, stats=Stats(rounds=3, emitted=3))]], single=True)
    assert "tau" not in words(plain._repr_html_())


def test_audit():
    rows = [Row(0, True), Row(1, False, 7, 3, 4, 1.5e-5), Row(2, False, 9)]
    report = Report(rows, "float32", STATS, STATS)
    for page in (words(report._repr_html_()), rendered(report)):
        for told in ("1 identical, 2 changed (1 near-ties", "token 7", "1.5e-05", "one ends here"):
            assert told in page, told


def test_streams_are_passed_on(monkeypatch):
    """Outside of notebooks nothing happens; inside, what is shown grows with the pieces."""
    whole = completion()
    halves = [slice(0, 8), slice(8, None)]
    pieces = [
        Piece(0, text, whole.tokens[part], whole.drafted[part], STATS, None, None, BYTES)
        for text, part in zip((TEXT[:8], TEXT[8:]), halves, strict=True)
    ]
    assert list(views.live(pieces)) == pieces
    shown = []
    monkeypatch.setattr(views, "_display", lambda: shown.append)
    assert list(views.live(pieces)) == pieces
    assert words(shown[0]).startswith(TEXT[:8] + "tokens")
    assert words(shown[1]).startswith(TEXT)


def test_tables_and_bars_escape():
    page = html.joined(
        html.table(("<a>", "b"), [("<i>", 1), (html.swatch(0), "&")], "<t>"),
        html.bars([2.0, -1.0], ["<x>", 2], ["y", "<z>"], "<t>"),
        html.stacked([('"><', 1.0)], 2.0),
        html.stacked([("none", 0.0)], 0.0),
    )
    assert words(page) == "<t><a>b<i>1&<t><x>y2<z>"
    assert words(html.Html("<b>kept</b>")._repr_html_()) == "kept"
