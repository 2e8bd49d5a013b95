"""Pictures for results folders: ``python benchmarks/plots.py RESULT.json ... [--folder FOLDER]``.

What a file holds is told by its rows: step times (``steps.py``) and decoding beside others (``peers/decode.py``) are
drawn. Pictures lie beside the file unless a folder is named.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot as plt

Rows = list[dict[str, Any]]
_OURS, _THEIRS, _FLOOR = "#1b6ca8", "#b0b7bf", "#d1495b"


def bars(
    path: Path,
    title: str,
    names: list[str],
    values: list[float],
    unit: str,
    marks: list[float | None] | None = None,
) -> Path:
    """Horizontal bars with their values; ``marks`` are drawn as a line across a bar (a floor, a limit)."""
    figure, axes = plt.subplots(figsize=(7.5, 1.2 + 0.34 * len(names)), layout="constrained")
    at = range(len(names))
    colours = [
        _THEIRS if name.startswith(("transformers", "dflash package", "flashspec")) else _OURS
        for name in names
    ]
    axes.barh(at, values, color=colours)
    for i, value in zip(at, values, strict=True):
        axes.text(value, i, f" {value:.3g}", va="center", fontsize=8)
    for i, mark in zip(at, marks or [], strict=bool(marks)):
        if mark is not None:
            axes.plot([mark, mark], [i - 0.45, i + 0.45], color=_FLOOR, linewidth=2)
    axes.set_yticks(at, names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.set_title(title, fontsize=10)
    axes.margins(x=0.12)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def lines(path: Path, title: str, series: dict[str, tuple[list[float], list[float]]], x: str, y: str) -> Path:
    """A line with points per series."""
    figure, axes = plt.subplots(figsize=(6.5, 4), layout="constrained")
    for name, (at, values) in series.items():
        axes.plot(at, values, marker="o", label=name)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def steps(report: dict[str, Any], folder: Path) -> list[Path]:
    """Times of rounds beside what their bytes take, round costs, and both over batches and contexts."""
    rows: Rows = [row for row in report["results"] if "error" not in row]
    device, made = report["device"], []
    for shape in dict.fromkeys(row["shape"] for row in rows):
        mine = [row for row in rows if row["shape"] == shape]
        first = [
            row for row in mine if (row["batch"], row["context"]) == (mine[0]["batch"], mine[0]["context"])
        ]
        where = f"{shape}, batch {first[0]['batch']}, context {first[0]['context']}, {device}"
        names = [row["key"].rsplit("/", 1)[1] for row in first]
        made.append(
            bars(
                folder / f"steps_{shape}.png",
                f"A round: {where} (line: bytes at copy speed)",
                names,
                [row["ms"] for row in first],
                "ms",
                [row["model_ms"] for row in first],
            )
        )
        limits = {
            x["about"].rsplit(" ", 1)[0]: x["most"]
            for x in report.get("limits", [])
            if x["about"].endswith(" R")
        }
        rest = [row for row in first if row["method"] != "plain"]
        if rest:
            names = [row["key"].rsplit("/", 1)[1] for row in rest]
            marks = [limits.get(row["key"]) for row in rest]
            title = f"Round cost R: {where} (line: limit)"
            made.append(
                bars(
                    folder / f"round_cost_{shape}.png",
                    title,
                    names,
                    [r["R"] for r in rest],
                    "plain steps",
                    marks,
                )
            )
        wide = [row for row in mine if row["batch"] > 1 or row["context"] != first[0]["context"]]
        if wide:
            names = [row["key"].split("/", 1)[1] for row in wide]
            values = [row["ms"] / row["model_ms"] for row in wide]
            title = f"Time over that of its bytes: {shape}, {device}"
            made.append(
                bars(folder / f"model_{shape}.png", title, names, values, "ms / model", [1.1] * len(values))
            )
    mixed = {row["key"]: row["by_distinct"] for row in rows if row.get("by_distinct")}
    if mixed:
        series = {
            key: ([x["experts"] for x in found], [x["ms"] for x in found]) for key, found in mixed.items()
        }
        path = folder / "experts_hit.png"
        made.append(
            lines(path, f"Verification by distinct experts, {device}", series, "experts per layer", "ms")
        )
    return made


def peers(report: dict[str, Any], folder: Path) -> list[Path]:
    """Milliseconds per token of every side."""
    rows = [row for row in report["results"]["sides"] if "error" not in row]
    options = report["options"]
    what = options["gguf"] if options.get("gguf") not in (None, "None") else options["shape"]
    title = f"Decoding {what}, batch 1, context {options['context']}, {options['dtype']}, {report['device']}"
    names, values = [row["side"] for row in rows], [row["ms_per_token"] for row in rows]
    made = [bars(folder / "peers_tokens.png", title, names, values, "ms per token")]
    title = title.replace("Decoding", "A round of")
    return [
        *made,
        bars(folder / "peers_rounds.png", title, names, [r["ms_per_round"] for r in rows], "ms per round"),
    ]


def draw(file: Path, folder: Path | None = None) -> list[Path]:
    """Pictures of a result file; ValueError if it holds nothing that is drawn."""
    report, folder = json.loads(file.read_text()), folder or file.parent
    folder.mkdir(parents=True, exist_ok=True)
    results = report["results"]
    kind: Callable | None = None
    if isinstance(results, dict) and "sides" in results:
        kind = peers
    elif isinstance(results, list) and any("model_ms" in row for row in results):
        kind = steps
    if kind is None:
        raise ValueError(f"{file} holds neither step times nor a comparison of sides")
    return kind(report, folder)


def main() -> None:
    """Draw every file named."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    for file in args.files:
        print(*draw(file, args.folder), sep="\n")


if __name__ == "__main__":
    main()
