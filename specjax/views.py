"""How results look: HTML in notebooks (``_repr_html_``), compact tables in terminals (``__rich__``).

Drafted tokens are tinted. Both show the same figures, those of :mod:`specjax.metrics`.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from specjax import html
from specjax.metrics import Stats

if TYPE_CHECKING:
    from specjax.identity import Report
    from specjax.results import Completion, Piece, Result

#: Answers of a result, and prompts of an audit, that are shown in full.
SHOWN = 20


def figures(stats: Stats) -> dict[str, str]:
    """Name and text of what is told of a decode, whatever the medium."""
    told = {"tokens": f"{stats.new_tokens}", "tokens/s": f"{stats.tokens_per_second:.1f}"}
    if stats.proposed:
        told |= {
            "rounds": f"{stats.rounds}",
            "tau": f"{stats.tau:.2f}",
            "drafts kept": f"{stats.accepted} of {stats.proposed} ({stats.acceptance_rate:.0%})",
        }
    return told | ({"compiling": f"{stats.compile_seconds:.1f} s"} if stats.compile_seconds else {})


def spans(completion: "Completion | Spoken") -> list[tuple[str, bool]]:
    """The text in pieces, each with whether it was drafted; without a tokenizer the ids.

    A character of several tokens counts as what the last of them was.
    """
    text, flags = completion.text, completion.drafted
    if text is None:
        return [(f"{token} ", flag) for token, flag in zip(completion.tokens, flags, strict=False)]
    ends = _ends(completion, text)
    if ends is None:
        return [(text, False)]
    pieces, at = [], 0
    for end, flag in zip(ends, flags, strict=False):
        end = min(end, len(text))
        pieces.append((text[at:end], flag))
        at = max(at, end)
    return [*pieces, (text[at:], False)]


def _ends(completion: "Completion | Spoken", text: str) -> list[int] | None:
    """Characters of the text that are there after each token; None where that cannot be told."""
    from specjax import checkpoints
    from specjax.text import StreamDecoder

    if not completion.tokenizer_id:
        return None
    try:
        stream = StreamDecoder(checkpoints.tokenizer.get(completion.tokenizer_id))
    except OSError:  # its files are gone; a result is shown all the same
        return None
    stream.push(completion.tokens)
    stream.flush()
    return stream.ends if stream.text.startswith(text) else None  # else: a decoder that rewrites what it said


# -- notebooks


def stats_html(stats: Stats) -> html.Html:
    """Figures in one line, and how often a draft at each place was kept."""
    told = figures(stats)
    line = html.caption(" · ".join(f"{name} {text}" for name, text in told.items()))
    if not stats.proposed_at:
        return html.joined(line)
    rates = stats.accepted_per_position
    texts = [
        f"{rate:.0%} ({kept} of {all_})"
        for rate, kept, all_ in zip(rates, stats.accepted_at, stats.proposed_at, strict=True)
    ]
    return html.joined(line, html.bars(rates, range(1, len(rates) + 1), texts, "drafts kept, by position"))


def completion_html(completion: "Completion | Spoken", title: str = "") -> html.Html:
    """An answer with drafted text tinted."""
    return html.joined(html.caption(title) if title else "", html.tinted(spans(completion)))


def result_html(result: "Result") -> html.Html:
    """Every answer (the first :data:`SHOWN`), then the figures of the call."""
    flat = [(i, j, c) for i, group in enumerate(result.completions) for j, c in enumerate(group)]
    parts = []
    for i, j, one in flat[:SHOWN]:
        sample = f", sample {j}" if len(result.completions[i]) > 1 else ""
        title = f"prompt {i}{sample}: {one.finish_reason}" if len(flat) > 1 else ""
        parts.append(completion_html(one, title))
    if len(flat) > SHOWN:
        parts.append(html.caption(f"and {len(flat) - SHOWN} more"))
    return html.joined(*parts, html.joined(stats_html(result.total)), _legend(result.total))


def _legend(stats: Stats) -> html.Html:
    return html.caption("tinted: drafted, and kept by the target") if stats.proposed else html.Html("")


def report_html(report: "Report") -> html.Html:
    """Outcome of an audit: one line, and the prompts whose ids changed."""
    head, *_ = str(report).splitlines()
    changed = [row for row in report.rows if not row.identical]
    rows = [(row.prompt, *_row(row)) for row in changed[:SHOWN]]
    found = (
        html.table(("prompt", "first difference", "plain", "speculative", "logit gap"), rows) if rows else ""
    )
    more = html.caption(f"and {len(changed) - SHOWN} more") if len(changed) > SHOWN else ""
    return html.joined(html.caption(head), found, more, stats_html(report.speculative))


def _row(row: Any) -> tuple[str, str, str, str]:
    plain, spec = ("" if x is None else str(x) for x in (row.plain_token, row.speculative_token))
    return f"token {row.position}", plain, spec, "one ends here" if row.gap is None else f"{row.gap:.2g}"


# -- terminals


def stats_table(stats: Stats, title: str | None = None) -> Any:
    """The same figures as a ``rich`` table."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="dim")
    table.add_column()
    for name, text in figures(stats).items():
        table.add_row(name, text)
    if stats.proposed_at:
        table.add_row("kept by position", "  ".join(f"{rate:.0%}" for rate in stats.accepted_per_position))
    return table


def result_table(result: "Result") -> Any:
    """Answers, drafted text in green, and the figures."""
    from rich.console import Group
    from rich.text import Text

    flat = [c for group in result.completions for c in group]
    texts = [
        Text.assemble(*((text, "green" if drafted else "") for text, drafted in spans(one)))
        for one in flat[:SHOWN]
    ]
    more = [Text(f"and {len(flat) - SHOWN} more", style="dim")] if len(flat) > SHOWN else []
    return Group(*texts, *more, stats_table(result.total))


def report_table(report: "Report") -> Any:
    """Outcome of an audit as a ``rich`` table."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    head, *_ = str(report).splitlines()
    parts: list[Any] = [Text(head, style="green" if report.identical else "yellow")]
    changed = [row for row in report.rows if not row.identical]
    if changed:
        table = Table("prompt", "first difference", "plain", "speculative", "logit gap")
        for row in changed[:SHOWN]:
            table.add_row(str(row.prompt), *_row(row))
        parts.append(table)
    return Group(*parts, stats_table(report.speculative))


# -- streams


class Spoken:
    """What a stream has said so far for one prompt; looks like a completion."""

    def __init__(self) -> None:
        self.text: str | None = ""
        self.tokens: list[int] = []
        self.drafted: list[bool] = []
        self.tokenizer_id = ""
        self.stats = Stats()

    def add(self, piece: "Piece") -> None:
        """Take a piece in."""
        self.tokenizer_id, self.stats = piece.tokenizer_id, piece.stats
        self.text = (self.text or "") + piece.text if piece.tokenizer_id else None
        self.tokens += piece.tokens
        self.drafted += piece.drafted


def live(pieces: Iterable["Piece"]) -> Iterator["Piece"]:
    """Pieces of a stream, shown in a notebook while they pass: the growing text and its figures.

    Outside of a notebook nothing is shown; the pieces are the same.

    >>> for piece in live(specjax.stream(params, prompt)): ...                # doctest: +SKIP
    """
    show = _display()
    said: dict[int, Spoken] = {}
    for piece in pieces:
        said.setdefault(piece.index, Spoken()).add(piece)
        if show is not None:
            show(stream_html([said[i] for i in sorted(said)]))
        yield piece


def stream_html(said: Sequence[Spoken]) -> html.Html:
    """The state of a stream."""
    from specjax import metrics

    total = metrics.merge([one.stats for one in said], concurrent=True)
    return html.joined(*map(completion_html, said), stats_html(total), _legend(total))


def _display() -> Any:
    """A function that shows HTML in place of what it showed before, or None outside of notebooks."""
    try:
        from IPython import get_ipython
        from IPython.display import display
    except ImportError:
        return None
    shell = get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        return None
    handle = display(html.Html(""), display_id=True)
    return handle.update
