"""Rows as tables: for terminals, Markdown, CSV, notebooks."""

import csv
import dataclasses
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax.bench.rows import Row

_FEW = 4  # positions whose acceptance a table shows


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _spread(row: Row) -> str:
    text = _number(row.ratio.median)
    return text if row.repeats == 1 else f"{text} ({row.ratio.low:.2f}-{row.ratio.high:.2f})"


def _parts(row: Row) -> str:
    c = row.costs
    if c is None or c.verify is None:
        return ""
    return " + ".join(_number(part) for part in (c.verify, c.draft, c.other))


def _same(row: Row) -> str:
    if row.checked == "law":
        return "law"
    text = f"{row.identical}/{row.prompts}"
    return text if row.identical == row.prompts else f"{text}, gap {row.largest_gap:.1e}"


#: Heading -> what a row shows under it. R and its parts in plain steps.
COLUMNS: dict[str, Callable[[Row], str]] = {
    "method": lambda r: r.method,
    "data": lambda r: r.dataset,
    "N": lambda r: str(r.k),
    "batch": lambda r: str(r.batch),
    "T": lambda r: f"{r.temperature:g}",
    "x plain": _spread,
    "tokens/s": lambda r: _number(r.speed.median, 1),
    "plain": lambda r: _number(r.plain_speed.median, 1),
    "tau": lambda r: _number(r.tau),
    "kept": lambda r: f"{r.stats.acceptance_rate:.0%}",
    "by position": lambda r: " ".join(f"{x:.0%}" for x in r.stats.accepted_per_position[:_FEW]),
    "R": lambda r: _number(r.costs and r.costs.round),
    "= verify + draft + other": _parts,
    "tau/R": lambda r: _number(r.predicted),
    "decoding": lambda r: _number(r.decode_ratio.median),
    "first token ms": lambda r: _number(r.first_token_ms, 1),
    "identical": _same,
}


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of a bench or a sweep. Printed and shown in notebooks as a table; ``plot`` draws, ``write`` keeps.

    ``skipped``: what was not measured, and why. ``finished``: False when time ran out before the last row.
    """

    rows: tuple[Row, ...]
    skipped: Mapping[str, str] = dataclasses.field(default_factory=dict)
    finished: bool = True

    @classmethod
    def read(cls, path: str | Path) -> "Table":
        """Rows of a ``rows.jsonl``, or of the folder that holds it. A line that was not finished is left out."""
        path = Path(path)
        path = path / "rows.jsonl" if path.is_dir() else path
        text = path.read_text("utf-8")
        found = [json.loads(line) for line in text[: text.rfind("\n") + 1].split("\n") if line]
        rows = tuple(Row.from_dict(row) for row in found if "skipped" not in row)
        return cls(rows, {row["key"]: row["skipped"] for row in found if "skipped" in row})

    @property
    def latest(self) -> tuple[Row, ...]:
        """One row per setting: the one with the most repeats, the last of equals."""
        best: dict[Any, Row] = {}
        for row in self.rows:
            key = (row.method, row.dataset, row.k, row.batch, row.temperature)
            if key not in best or row.repeats >= best[key].repeats:
                best[key] = row
        return tuple(best.values())

    def best(self, method: str, dataset: str, batch: int = 1, temperature: float = 0.0) -> Row | None:
        """The row of the best N, by the ratio to plain decoding; None without any."""
        same = [
            row
            for row in self.latest
            if (row.method, row.dataset, row.batch, row.temperature) == (method, dataset, batch, temperature)
            and row.k != "auto"
        ]
        return max(same, key=lambda row: row.ratio.median, default=None)

    def markdown(self) -> str:
        """The table, what was not measured, and notes below."""
        used = [name for name in COLUMNS if any(COLUMNS[name](row) for row in self.latest)]
        lines = [used, ["---"] * len(used), *([COLUMNS[name](row) for name in used] for row in self.latest)]
        return "\n".join(["| " + " | ".join(line) + " |" for line in lines] + self._below())

    def _below(self) -> list[str]:
        facts = dict.fromkeys(told(row) for row in self.latest)
        lines = ["", *(f"* {fact}" for fact in facts)]
        lines += [f"* {_title(row)}: {note}" for row in self.latest for note in row.notes]
        return lines + [f"* not measured: {key}: {why}" for key, why in self.skipped.items()]

    def csv(self) -> str:
        """Every row with every scalar and list, flat."""
        flat = [_flat(row.as_dict()) for row in self.rows]
        names = list(dict.fromkeys(name for row in flat for name in row))
        out = io.StringIO()
        writer = csv.DictWriter(out, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat)
        return out.getvalue()

    def write(self, folder: str | Path, plots: bool = True) -> None:
        """``rows.csv``, ``table.md`` and, with matplotlib, the plots as PNG; each replaced whole."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in (("rows.csv", self.csv()), ("table.md", self.markdown() + "\n")):
            fresh = folder / f".{name}.tmp"
            fresh.write_text(text, "utf-8")
            fresh.replace(folder / name)
        if plots and self.rows:
            from specjax.bench import plots as drawn

            drawn.save(self, folder)

    def plot(self, kind: str = "ratio") -> Any:
        """A matplotlib figure: "ratio" (over N), "acceptance" (over positions), "batch" (ratio over batch size) or
        "time" (where it goes)."""
        from specjax.bench import plots as drawn

        return drawn.figure(self, kind)

    def rich(self, last: int | None = None, names: Sequence[str] = tuple(COLUMNS)) -> Any:
        """The same for a terminal: the last rows, some of the columns."""
        from rich.table import Table as Rich
        from rich.text import Text

        shown = self.latest if last is None else self.latest[-last:]
        used = [name for name in names if any(COLUMNS[name](row) for row in shown)] or list(names)
        table = Rich()
        for name in used:
            table.add_column(name, justify="left" if name in ("method", "data") else "right")
        for row in shown:
            table.add_row(*(Text(COLUMNS[name](row)) for name in used))
        return table

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=200, file=io.StringIO(), highlight=False)
        console.print(self.rich())
        console.print(*self._below(), sep="\n", markup=False, soft_wrap=True)
        return console.file.getvalue().rstrip()  # type: ignore[attr-defined]

    __repr__ = __str__

    def _repr_markdown_(self) -> str:
        return self.markdown()


def told(row: Row) -> str:
    """How a row was measured, in a line."""
    f, versions = row.facts, row.facts.get("versions", {})
    which = ", ".join(f"{name} {version}" for name, version in versions.items())
    eos = "end-of-text ignored" if row.ignore_eos else "to the end of text"
    return (
        f"{f.get('device')} x {f.get('devices')}, {row.dtype}; {row.prompts} prompts of {row.dataset} "
        f"({row.checksum}), chat template {row.chat_template}, at most {row.max_new_tokens} tokens, {eos}; {which}; "
        f"commit {f.get('commit')}"
    )


def _title(row: Row) -> str:
    return f"{row.method}, {row.dataset}, N {row.k}, batch {row.batch}, T {row.temperature:g}"


def line(row: Row) -> str:
    """A row in a line of text."""
    parts = ", ".join(
        f"{name} {COLUMNS[name](row)}" for name in ("x plain", "tau", "R", "tau/R", "identical")
    )
    return f"{_title(row)}: {parts} ({row.seconds:.0f} s)"


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping):
        parts: Iterable[tuple[str, Any]] = (
            (f"{name}.{key}" if name else str(key), v) for key, v in value.items()
        )
        return {key: v for at, part in parts for key, v in _flat(part, at).items()}
    return {name: json.dumps(value) if isinstance(value, list) else value}
