"""Figures of a table of rows. Needs matplotlib (``pip install specjax[plot]``)."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specjax.bench.rows import Row


def figure(table: Any, kind: str) -> Any:
    """A matplotlib figure of one kind; ValueError for an unknown one or where no row has what it shows."""
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(map(repr, KINDS))}, got {kind!r}")
    drawn = KINDS[kind](table)
    if drawn is None:
        raise ValueError(f"no row has what the plot {kind!r} shows")
    return drawn


def save(table: Any, folder: Path) -> list[Path]:
    """``KIND.png`` for every kind that the rows have something for; nothing without matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return []
    files = []
    for kind, draw in KINDS.items():
        if (drawn := draw(table)) is not None:
            files.append(folder / f"{kind}.png")
            drawn.savefig(files[-1], dpi=120)
    return files


def _axes(columns: int, width: float = 4.2) -> tuple[Any, list[Any]]:
    """A figure that no window shows, whatever matplotlib is set to."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(width * columns, 3.4), layout="constrained")
    return drawn, list(drawn.subplots(1, columns, squeeze=False, sharey=True)[0])


def _names(rows: Sequence[Row], name: str) -> list[Any]:
    return list(dict.fromkeys(getattr(row, name) for row in rows))


def _alone(table: Any) -> list[Row]:
    """Greedy rows of the smallest batch, fixed N."""
    rows = [row for row in table.latest if row.temperature == 0 and row.k != "auto"]
    least = min((row.batch for row in rows), default=1)
    return [row for row in rows if row.batch == least]


def _lines(axes: Any, rows: Sequence[Row], x: Callable[[Row], float], label: str = "method") -> None:
    for name in _names(rows, label):
        mine = sorted((row for row in rows if getattr(row, label) == name), key=x)
        ratios = [row.ratio for row in mine]
        errors = [[r.median - r.low for r in ratios], [r.high - r.median for r in ratios]]
        told = f"T {name:g}" if label == "temperature" else str(name)
        axes.errorbar(
            [x(row) for row in mine], [r.median for r in ratios], errors, marker="o", capsize=2, label=told
        )
    axes.axhline(1, color="0.6", linewidth=0.8)


def ratio_over_n(table: Any) -> Any:
    """Tokens per second by plain decoding's, over the number of drafts; a panel per data set."""
    rows = _alone(table)
    if not rows:
        return None
    drawn, panels = _axes(len(_names(rows, "dataset")))
    for axes, dataset in zip(panels, _names(rows, "dataset"), strict=True):
        mine = [row for row in rows if row.dataset == dataset]
        _lines(axes, mine, lambda row: int(row.k))
        axes.set(title=dataset, xlabel="drafts per round N", xticks=sorted(set(_names(mine, "k"))))
    panels[0].set_ylabel("tokens/s by plain decoding's")
    panels[-1].legend(fontsize="small")
    return drawn


def acceptance(table: Any) -> Any:
    """Share of rounds that kept a draft, over its position, at the largest N; a panel per data set."""
    rows = [row for row in _alone(table) if row.stats.proposed]
    if not rows:
        return None
    drawn, panels = _axes(len(_names(rows, "dataset")))
    for axes, dataset in zip(panels, _names(rows, "dataset"), strict=True):
        for method in _names(rows, "method"):
            mine = [row for row in rows if (row.dataset, row.method) == (dataset, method)]
            if not mine:
                continue
            rates = max(mine, key=lambda row: int(row.k)).stats.accepted_per_position
            axes.plot(range(1, len(rates) + 1), rates, marker="o", label=method)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set(title=dataset, xlabel="position of the draft", ylim=(0, 1))
    panels[0].set_ylabel("kept")
    panels[-1].legend(fontsize="small")
    return drawn


def ratio_over_batch(table: Any) -> Any:
    """The ratio over the batch size: a panel per method and data set, a line per temperature; the best N of each."""
    rows = [row for row in table.latest if row.k != "auto"]
    best: dict[Any, Row] = {}
    for row in rows:
        key = (row.method, row.dataset, row.batch, row.temperature)
        if key not in best or row.ratio.median > best[key].ratio.median:
            best[key] = row
    panels_of = dict.fromkeys((r.method, r.dataset) for r in best.values() if r.batch > 1)
    if not panels_of:
        return None
    drawn, panels = _axes(len(panels_of), 3.2)
    for axes, (method, dataset) in zip(panels, panels_of, strict=True):
        mine = [row for key, row in best.items() if key[:2] == (method, dataset)]
        _lines(axes, mine, lambda row: row.batch, "temperature")
        axes.set_xscale("log", base=2)
        sizes = sorted(set(_names(mine, "batch")))
        axes.set_xticks(sizes, map(str, sizes))
        axes.set(title=f"{method}, {dataset}", xlabel="batch size")
    panels[0].set_ylabel("tokens/s by plain decoding's")
    panels[-1].legend(fontsize="small")
    return drawn


def where_time_goes(table: Any) -> Any:
    """A round's verification, drafting and the rest, in plain steps, beside tau: a bar per method and N."""
    rows = [row for row in _alone(table) if row.costs is not None and row.costs.other is not None]
    if not rows:
        return None
    rows = [row for row in rows if row.dataset == rows[0].dataset]
    drawn, (axes,) = _axes(1, max(4.2, 0.5 * len(rows) + 1.5))
    bottom = [0.0] * len(rows)
    for part in ("verify", "draft", "other"):
        sizes = [max(getattr(row.costs, part), 0.0) for row in rows]
        axes.bar(range(len(rows)), sizes, bottom=bottom, label=part)
        bottom = [a + b for a, b in zip(bottom, sizes, strict=True)]
    axes.plot(range(len(rows)), [row.tau for row in rows], "k_", markersize=14, label="tau")
    axes.set_xticks(
        range(len(rows)), [f"{row.method} {row.k}" for row in rows], rotation=60, ha="right", fontsize="small"
    )
    axes.set(title=rows[0].dataset, ylabel="plain steps")
    drawn.legend(loc="outside right upper", fontsize="small")
    return drawn


KINDS: dict[str, Callable[[Any], Any]] = {
    "ratio": ratio_over_n,
    "acceptance": acceptance,
    "batch": ratio_over_batch,
    "time": where_time_goes,
}
