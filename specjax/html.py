"""HTML for notebooks: tables, bars and tinted text that need no stylesheet and no script.

Every text that is passed in is escaped here and nowhere else; what these functions return is HTML and is only ever put
together by them. Colours are translucent, so that they show on light and on dark pages.
"""

import html
from collections.abc import Iterable, Sequence
from typing import Any

#: Background of drafted text, of bars, and the colours of several bars side by side (in this order).
TINT = "rgba(46, 160, 67, 0.28)"
BAR = "rgba(9, 105, 218, 0.55)"
COLOURS = (
    "rgba(46, 160, 67, 0.65)", "rgba(9, 105, 218, 0.65)", "rgba(191, 135, 0, 0.65)", "rgba(130, 80, 223, 0.65)",
    "rgba(207, 34, 46, 0.6)", "rgba(27, 124, 131, 0.65)", "rgba(140, 149, 159, 0.65)",
)  # fmt: skip
_NUMBERS = "text-align: right; padding: 2px 10px; font-variant-numeric: tabular-nums"
_WORDS = "text-align: left; padding: 2px 10px"


class Html(str):
    """Text that is HTML already. A notebook shows it as such."""

    def _repr_html_(self) -> str:
        return str(self)


def escape(value: Any) -> Html:
    """Any value as text; what is :class:`Html` already stays as it is."""
    return value if isinstance(value, Html) else Html(html.escape(str(value)))


def joined(*parts: Any) -> Html:
    """Parts one after the other, in one block."""
    return Html("<div>" + "".join(map(escape, parts)) + "</div>")


def caption(text: Any) -> Html:
    """A line of small print."""
    return Html(f'<div style="opacity: 0.8; font-size: 90%; margin: 2px 0">{escape(text)}</div>')


def table(header: Sequence[Any], rows: Iterable[Sequence[Any]], title: Any = "") -> Html:
    """A table; the first column is words, the others are numbers and aligned to the right."""
    style = lambda i: _WORDS if i == 0 else _NUMBERS  # noqa: E731
    cells = lambda tag, row: "".join(  # noqa: E731
        f'<{tag} style="{style(i)}">{escape(value)}</{tag}>' for i, value in enumerate(row)
    )
    head = f"<caption style='text-align: left'>{escape(title)}</caption>" if title else ""
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return Html(
        f'<table style="border-collapse: collapse; margin: 4px 0">{head}'
        f"<thead><tr>{cells('th', header)}</tr></thead><tbody>{body}</tbody></table>"
    )


def bars(values: Sequence[float], labels: Sequence[Any], texts: Sequence[Any], title: Any = "") -> Html:
    """A histogram of horizontal bars: ``values`` between 0 and 1, with a label before and a text behind each."""
    rows = []
    for value, label, text in zip(values, labels, texts, strict=True):
        width = 100 * min(max(float(value), 0.0), 1.0)
        bar = f'<div style="background: {BAR}; width: {width:.1f}%; height: 0.8em"></div>'
        rows.append(
            f'<tr><td style="{_NUMBERS}">{escape(label)}</td><td style="width: 12em">{bar}</td>'
            f'<td style="{_NUMBERS}">{escape(text)}</td></tr>'
        )
    head = f"<caption style='text-align: left'>{escape(title)}</caption>" if title else ""
    return Html(f'<table style="border-collapse: collapse; margin: 4px 0">{head}{"".join(rows)}</table>')


def stacked(parts: Sequence[tuple[str, float]], total: float, height: str = "1.4em") -> Html:
    """One bar of named parts, as long as ``total`` allows (the full width is ``total``); names appear on hovering."""
    pieces = []
    for i, (name, value) in enumerate(parts):
        width = 100 * max(value, 0.0) / total if total > 0 else 0.0
        pieces.append(
            f'<div title="{escape(name)}" style="background: {COLOURS[i % len(COLOURS)]}; width: {width:.2f}%"></div>'
        )
    return Html(f'<div style="display: flex; height: {height}; max-width: 40em">{"".join(pieces)}</div>')


def swatch(i: int) -> Html:
    """A square in the colour of the i-th part of :func:`stacked`."""
    colour = COLOURS[i % len(COLOURS)]
    return Html(
        f'<span style="display: inline-block; width: 0.8em; height: 0.8em; background: {colour}"></span>'
    )


def tinted(pieces: Iterable[tuple[str, bool]]) -> Html:
    """Text in pieces; those that are marked get a background. Line breaks and blanks are kept."""
    spans = [
        f'<span style="background: {TINT}">{html.escape(text)}</span>' if marked else html.escape(text)
        for text, marked in _merged(pieces)
    ]
    style = "white-space: pre-wrap; overflow-wrap: anywhere; font-family: monospace; margin: 4px 0"
    return Html(f'<div style="{style}">{"".join(spans)}</div>')


def _merged(pieces: Iterable[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Neighbours with the same mark as one piece: a long text has few of them."""
    merged: list[tuple[str, bool]] = []
    for text, marked in pieces:
        if merged and merged[-1][1] == marked:
            merged[-1] = (merged[-1][0] + text, marked)
        elif text:
            merged.append((text, marked))
    return merged
