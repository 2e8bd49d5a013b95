"""How a profile looks: a table for terminals, HTML for notebooks, a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specjax import html

if TYPE_CHECKING:
    from specjax.profiling import Profile

#: What a part is, in a few words.
MEANING = {
    "draft": "the drafter's passes",
    "verify": "the target's pass over anchor and drafts",
    "accept": "head, and how many drafts are kept",
    "commit": "tokens and caches written",
    "inject": "the drafter takes in the target's features",
    "rest": "records, keys, what parts cost each other",
    "host": "reading records, starting chunks",
}


def slices(profile: "Profile") -> list[tuple[str, float]]:
    """Parts, rest and host in order, in seconds; parts that do not exist are left out."""
    parts = [(name, seconds) for name, seconds in profile.parts.items() if seconds]
    return [*parts, ("rest", profile.rest), ("host", profile.host)]


def heading(profile: "Profile") -> str:
    """What was measured, in one line."""
    seen = ", ".join(f"{times} of {width}" for width, times in profile.widths.items())
    return (
        f"{profile.target}, drafter {profile.drafter}, k {profile.k}, rows {profile.rows}, {profile.dtype}, "
        f"{profile.device}; {profile.rounds} rounds (positions verified: {seen})"
    )


def verdict(profile: "Profile") -> str:
    """What the round gives for what it costs, in one line."""
    tau = profile.stats.tau
    if profile.plain is None or profile.cost is None:
        return f"tau {tau:.2f}"
    return (
        f"tau {tau:.2f}; a round costs R = {profile.cost:.2f} plain steps of {_ms(profile.plain)} ms; tau / R = "
        f"{profile.expected:.2f}, with the host {profile.measured:.2f} times plain decoding"
    )


def rows(profile: "Profile") -> list[tuple[str, str, str, str, str]]:
    """Part, milliseconds, share of the whole, milliseconds in the trace, meaning; the last row is the sum."""
    whole = profile.round + profile.host
    scopes = profile.scopes or {}
    seen = lambda name: _ms(scopes[name]) if name in scopes else ""  # noqa: E731
    told = [
        (
            name,
            _ms(seconds),
            _share(seconds, whole),
            seen("other" if name == "rest" else name),
            MEANING[name],
        )
        for name, seconds in slices(profile)
    ]
    return [
        *told,
        ("round", _ms(whole), _share(whole, whole), _ms(sum(scopes.values())) if scopes else "", ""),
    ]


def header(profile: "Profile") -> tuple[str, ...]:
    """Names of the columns of :func:`shown`."""
    return ("part", "ms", "share", *(("traced ms",) if profile.scopes else ()), "")


def shown(profile: "Profile") -> list[tuple[str, ...]]:
    """:func:`rows` without the trace's column where there is no trace."""
    return [row if profile.scopes else (*row[:3], row[4]) for row in rows(profile)]


def text(profile: "Profile") -> str:
    """Plain lines."""
    lines = [heading(profile)]
    for name, ms, share, traced, meaning in rows(profile):
        lines.append(f"  {name:<7}{ms:>10} ms{share:>6}{traced:>10}  {meaning}".rstrip())
    return "\n".join([*lines, verdict(profile)])


def table(profile: "Profile") -> Any:
    """A ``rich`` table between what was measured and what it means."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    names, found = header(profile), shown(profile)
    table = Table()
    for i, name in enumerate(names):
        table.add_column(name, justify="right" if 0 < i < len(names) - 1 else "left")
    for row in found[:-1]:
        table.add_row(*row)
    table.add_section()
    table.add_row(*found[-1])
    return Group(Text(heading(profile)), table, Text(verdict(profile)))


def page(profile: "Profile") -> html.Html:
    """HTML: a bar of the parts, and the table."""
    parts = slices(profile)
    colours = {name: i for i, (name, _) in enumerate(parts)}
    bar = html.stacked([(name, max(seconds, 0.0)) for name, seconds in parts], profile.round + profile.host)
    found = [
        (html.joined(html.swatch(colours[name]), " ", name) if name in colours else name, *numbers)
        for name, *numbers in shown(profile)
    ]
    return html.joined(
        html.caption(heading(profile)),
        bar,
        html.table(header(profile), found),
        html.caption(verdict(profile)),
    )


def plot(profile: "Profile", path: str | Path | None = None) -> Any:
    """A figure: a round beside the plain steps that give as many tokens; acceptance by position."""
    drawable(path)
    from matplotlib.figure import Figure

    kept = profile.stats.accepted_per_position
    figure = Figure(figsize=(10 if kept else 7, 3.2), layout="constrained")
    axes = figure.subplots(1, 2 if kept else 1, width_ratios=(2, 1) if kept else None, squeeze=False)[0]
    _plot_round(axes[0], profile)
    if kept:
        _plot_kept(axes[1], kept)
    figure.suptitle(f"{profile.target}, {profile.drafter}, k {profile.k}: {profile.device}", fontsize=10)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def drawable(path: str | Path | None = None) -> None:
    """ImportError without matplotlib, ValueError for a kind of file that it does not write, FileNotFoundError for a
    folder that is not there."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("pictures need matplotlib: pip install 'specjax[plot]'") from None
    if path is None:
        return
    suffix, kinds = Path(path).suffix.lstrip(".").lower(), Figure().canvas.get_supported_filetypes()
    if suffix not in kinds:
        raise ValueError(
            f"a picture cannot be written to {str(path)!r}: its suffix must be {', '.join(sorted(kinds))}"
        )
    if not Path(path).parent.is_dir():
        raise FileNotFoundError(f"the folder of {str(path)!r} does not exist")


def _plot_round(axes: Any, profile: "Profile") -> None:
    left = 0.0
    for name, seconds in slices(profile):
        width = 1e3 * max(seconds, 0.0)
        axes.barh(1, width, left=left, label=f"{name} {_ms(seconds)} ms")
        left += width
    names = ["a round"]
    if profile.plain is not None:
        steps = 1e3 * profile.stats.tau * (profile.plain + (profile.plain_host or 0.0))
        axes.barh(0, steps, color="lightgrey", edgecolor="grey")
        names = ["plain, as\nmany tokens", "a round"]
    axes.set(yticks=range(2 - len(names), 2), yticklabels=names, xlabel="ms")
    axes.legend(fontsize=7, ncols=2)
    axes.set_ylim(2 - len(names) - 0.5, 2.9)


def _plot_kept(axes: Any, kept: Sequence[float]) -> None:
    axes.bar(range(1, len(kept) + 1), kept)
    axes.set(
        xlabel="position of the draft", ylabel="share kept", ylim=(0, 1.02), xticks=range(1, len(kept) + 1)
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if abs(seconds) < 1 else f"{1e3 * seconds:.0f}"


def _share(seconds: float, whole: float) -> str:
    return f"{seconds / whole:.0%}" if whole else ""
