"""Predicted speed-ups beside those published for other engines on AMD's MI300X and MI355X.

    python benchmarks/predicted.py steps.json [--folder FOLDER]

Speed-up is tau / R: tau (tokens per round) belongs to a drafter and its data, R (a round in plain steps) to the engine.
R is what ``steps.py`` measured here on the same shape. Where no tau is published for a row, the one of a profile of
acceptance by position is taken (4.36 with five drafts, 4.92 with seven), which also says below which R we are ahead at
equal acceptance. The device is not the published one: ratios are compared, not times.

Mixtures of experts get no prediction: R depends on how many different experts a block hits, which depends on a trained
router. It is given as a function of that number. Writes ``predicted.md`` and pictures.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import plots
from steps_run import forced_tau


@dataclasses.dataclass(frozen=True)
class Published:
    """A published ratio. ``tau``: published for this drafter and data (elsewhere); ``shape``: None = not measured."""

    target: str
    method: str
    data: str
    drafts: int
    ratio: float
    shape: str | None
    ours: str
    mixed: bool = False
    tau: float | None = None


#: vLLM on MI300X and MI355X; batch sizes are not stated. tau: DSpark's paper, block 7, temperature 1.
PUBLISHED = (
    Published("Gemma-4-26B-A4B", "DFlash", "MATH500", 7, 2.87, "gemma-4-26b-a4b", "dflash-7", mixed=True),
    Published(
        "Gemma-4-26B-A4B", "Gemma 4 MTP", "MATH500", 5, 2.74, "gemma-4-26b-a4b", "assistant-5", mixed=True
    ),
    Published("Gemma-4-26B-A4B", "EAGLE-3", "GSM8K", 5, 2.27, "gemma-4-26b-a4b", "eagle3-5", mixed=True),
    Published("Gemma-4-31B", "DFlash", "MATH500", 7, 2.41, "gemma-4-31b", "dflash-7"),
    Published("Qwen3-8B", "DSpark", "GSM8K", 7, 1.63, "qwen3-8b", "dspark-7", tau=6.17),
    Published("Qwen3.6-35B-A3B", "DFlash", "MATH500", 7, 2.06, "qwen3.6-35b-a3b", "dflash-7", mixed=True),
    Published("Kimi-K2.5", "DFlash", "GSM8K", 7, 2.37, None, "", mixed=True),
)


def table(report: dict[str, Any], batch: int = 1, context: int = 1024) -> list[dict[str, Any]]:
    """One row per published ratio, with our R and what it predicts where that may be said."""
    rows = {row["key"]: row for row in report["results"] if "error" not in row}
    found = []
    for one in PUBLISHED:
        proxy = forced_tau(one.drafts)
        out: dict[str, Any] = {
            "target": one.target, "method": one.method, "data": one.data, "drafts": one.drafts,
            "published": one.ratio, "proxy_tau": proxy, "published_tau": one.tau, "R_to_undercut": proxy / one.ratio,
            "R": None, "predicted": None, "predicted_published_tau": None, "by_experts": None,
            "verdict": "not measured" if one.shape else "not measured: larger than one device",
        }  # fmt: skip
        row = rows.get(f"{one.shape}/b{batch}/{context}/{one.ours}")
        if row is not None:
            out["R"] = row["R"]
            if one.mixed:
                out["verdict"] = "R by experts hit, below"
                out["by_experts"] = _by_experts(row, rows, one, batch, context)
            else:
                out["predicted"] = proxy / row["R"]
                out["predicted_published_tau"] = None if one.tau is None else one.tau / row["R"]
                out["verdict"] = "ahead" if out["predicted"] > one.ratio else "BEHIND"
        found.append(out)
    return found


def _by_experts(row: dict[str, Any], rows: dict[str, Any], one: Published, batch: int, context: int):
    """(different tokens, experts hit, R): the round with its verification exchanged for one that hits fewer experts."""
    verified = rows.get(f"{one.shape}/b{batch}/{context}/c{one.drafts + 1}")
    if verified is None or not verified.get("by_distinct"):
        return None
    return [
        (x["tokens"], x["experts"], row["R"] + (x["ms"] - verified["ms"]) / row["plain_ms"])
        for x in verified["by_distinct"]
    ]


def markdown(found: list[dict[str, Any]], report: dict[str, Any]) -> str:
    """The table as a page."""
    show = lambda x: "" if x is None else f"{x:.2f}"  # noqa: E731
    out = [
        "# Predicted speed-up",
        "",
        f"R measured on {report['device']}, commit {report['commit']}, {report['options'].get('dtype', '')}, batch 1, "
        "context 1024, random weights. Published: vLLM on MI300X/MI355X. Prediction: tau / R.",
        "",
        "| target | method, data, drafts | published | tau (proxy) | R | R to undercut | predicted | published tau | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for x in found:
        cells = [x["target"], f"{x['method']}, {x['data']}, {x['drafts']}"]
        numbers = ("published", "proxy_tau", "R", "R_to_undercut", "predicted", "predicted_published_tau")
        out.append(f"| {' | '.join([*cells, *(show(x[n]) for n in numbers), x['verdict']])} |")
    for x in found:
        if x["by_experts"]:
            out += [
                "",
                f"## {x['target']}, {x['method']}: R by distinct experts of a layer that a block hits",
                "",
            ]
            out += ["| different tokens in a block | experts hit | R |", "| --- | --- | --- |"]
            out += [f"| {tokens} | {experts:.1f} | {cost:.2f} |" for tokens, experts, cost in x["by_experts"]]
    return "\n".join(out) + "\n"


def main() -> None:
    """Write the page and its pictures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("steps", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--context", type=int, default=1024)
    args = parser.parse_args()
    report, folder = json.loads(args.steps.read_text()), args.folder or args.steps.parent
    folder.mkdir(parents=True, exist_ok=True)
    found = table(report, context=args.context)
    page = markdown(found, report)
    (folder / "predicted.md").write_text(page)
    print(page)
    dense = [x for x in found if x["predicted"] is not None]
    if dense:
        names = [f"{x['target']} {x['method']} {x['drafts']}" for x in dense]
        title = "Predicted speed-up tau / R (line: published on MI300X/MI355X)"
        values, marks = [x["predicted"] for x in dense], [x["published"] for x in dense]
        plots.bars(folder / "predicted.png", title, names, values, "times plain decoding", marks)
    mixed = {f"{x['target']} {x['method']}": x["by_experts"] for x in found if x["by_experts"]}
    if mixed:
        series = {name: ([p[1] for p in points], [p[2] for p in points]) for name, points in mixed.items()}
        plots.lines(
            folder / "predicted_experts.png", "R by distinct experts hit", series, "experts per layer", "R"
        )


if __name__ == "__main__":
    main()
