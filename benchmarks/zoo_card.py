"""The model card of a drafter that comes with the package, from files that training and measuring left.

    python benchmarks/zoo_card.py specjax/zoo/smollm2-135m/eagle3 --training RUN/training.json --seconds 540 \
        --tau zoo_tau.json --full eagle3-full [--packages code.json] [--sources zoo_sources.json]

``--training``: what ``specjax.train.train`` writes (recipe, texts by source, steps, device). ``--tau``: what
``zoo_tau.py`` writes; ``--row`` is the drafter's name there (default: the folder's), ``--full`` that of the same
drafter before it was stored compactly. ``--sources``: what each source of texts is, with its licence; every one must
be listed. ``--packages``: what ``specjax.train.docstrings.make`` writes beside prompts made from packages.

A card holds names and figures, and no text of any prompt.
"""

import argparse
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from specjax import zoo
from specjax.checkpoints import hub, safetensors

TITLES = {"eagle3": "EAGLE-3", "mtp": "MTP", "assistant": "Assistant", "dflash": "DFlash", "dspark": "DSpark"}
LONGEST = 160
#: Fields of a recipe that say where it ran or nothing at all, and are told elsewhere.
_ELSEWHERE = ("method", "steps")


def word(text: Any) -> str:
    """A name or figure as it may stand in a card: one short line. ValueError for anything else."""
    text = str(text)
    if len(text) > LONGEST or "\n" in text or "|" in text:
        raise ValueError(f"this is no name or figure: {text[:60]!r}...")
    return text


def figure(tau: float) -> str:
    """tau, or a dash where there are no rounds."""
    return f"{tau:.2f}" if tau else "-"


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> list[str]:
    """Lines of a table."""
    head = list(head)
    line = lambda cells: "| " + " | ".join(word(cell) for cell in cells) + " |"  # noqa: E731
    return [line(head), "|" + " --- |" * len(head), *(line(row) for row in rows), ""]


def weights(folder: Path) -> tuple[int, int]:
    """(weights, bytes of the file) of a folder."""
    entries = json.loads((folder / zoo.CONFIG).read_text("utf-8")).get("compact", {})
    shapes = safetensors.Tensors(folder).shapes
    count = sum(math.prod(entries.get(name, {}).get("shape", shape)) for name, shape in shapes.items())
    return count, (folder / zoo.WEIGHTS).stat().st_size


def best_ngram(tau: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The n-gram setting with the highest tau on one file."""
    return max((rows[name] for rows in tau["ngram"].values() if name in rows), key=lambda row: row["tau"])


def acceptance(tau: Mapping[str, Any], row: str, full: str | None) -> list[str]:
    """Tables of tau and of acceptance by position."""
    mine = tau["drafters"][row]
    before = tau["drafters"][full] if full is not None else {}
    rows = []
    for name, one in mine.items():
        ngram = best_ngram(tau, name)
        rows.append(
            [
                name,
                f"{one['tau']:.2f}",
                figure(one["tau_finished"]),
                f"{before[name]['tau']:.2f}" if name in before else "-",
                f"{ngram['tau']:.2f}",
                figure(ngram["tau_finished"]),
                f"{one['share_cut']:.0%}",
                f"{one['identical']} of {one['prompts']}",
            ]
        )
    head = [
        "data set",
        "tau",
        "finished texts",
        "unquantised",
        "n-gram",
        "n-gram, finished",
        "texts cut",
        "identical",
    ]
    by_place = [[name, *(f"{x:.3f}" for x in one["accepted_per_position"])] for name, one in mine.items()]
    places = max(len(line) for line in by_place) - 1
    by_place = [line + ["-"] * (places + 1 - len(line)) for line in by_place]
    return [
        *table(head, rows),
        "Share of the drafts that are kept, by position:",
        "",
        *table(["data set", *(str(i + 1) for i in range(places))], by_place),
    ]


def data(
    training: Mapping[str, Any], sources: Mapping[str, Any], packages: Mapping[str, Any] | None
) -> list[str]:
    """What the texts are, and whose."""
    texts = training["texts"]
    if unknown := sorted(set(texts) - set(sources)):
        raise ValueError(f"nothing is known of the source(s) {unknown}: add them to the file of sources")
    rows = [
        [
            sources[name]["what"], one["documents"], one["answers"], one["tokens"], one["trained"],
            f"{one['ended']:.0%}", sources[name]["licence"], sources[name]["from"],
        ]
        for name, one in texts.items()
    ]  # fmt: skip
    head = ["prompts", "texts", "answers", "tokens", "of these trained", "ended", "licence", "from"]
    lines = [
        "Prompts of training sets alone; the answers are the target's own. No prompt that is in an evaluation set, or "
        "shares more than 30 % of its ten-word pieces with one, was used.",
        "",
        *table(head, rows),
    ]
    if packages is not None:
        used = {name: one for name, one in packages["packages"].items() if one["prompts"]}
        told = [[name, one["version"], one["licence"], one["prompts"]] for name, one in sorted(used.items())]
        lines += ["Packages whose docstrings became coding tasks:", ""]
        lines += table(["package", "version", "licence", "prompts"], told)
    return lines


def recipe(training: Mapping[str, Any], seconds: float, versions: Mapping[str, str]) -> list[str]:
    """How it was trained, and how long that took."""
    chosen = training["recipe"]
    trained = training["step"] * chosen["rows"] * chosen["length"]
    facts = {
        "steps": training["step"],
        "epochs": f"{training['step'] / max(1, training['batches_per_epoch']):.1f}",
        "places in packed rows": f"{trained:,}",
        "seconds": f"{seconds:.0f}",
        "device": training["device"],
        "jax": training.get("jax", versions.get("jax", "")),
        "tau on held-out training prompts": f"{training['validation_tau']:.2f}"
        if training["validation_tau"]
        else "-",
    }
    settings = {key: json.dumps(value) for key, value in chosen.items() if key not in _ELSEWHERE}
    return [
        *table(["fact", "value"], facts.items()),
        "Recipe (fields of `specjax.train.Recipe`):",
        "",
        *table(["field", "value"], settings.items()),
    ]


def card(folder: Path, args: argparse.Namespace) -> str:
    """The whole text."""
    read = lambda path: None if path is None else json.loads(Path(path).read_text("utf-8"))  # noqa: E731
    training, measured, sources = read(args.training), read(args.tau), read(args.sources)
    short, method = folder.parent.name, folder.name
    model = hub.SHORT_NAMES[short].hub
    count, size = weights(folder)
    options, tau = measured["options"], measured["results"]
    lines = [
        "---", "license: apache-2.0", f"base_model: {model}", "library_name: specjax", "---", "",
        f"# {TITLES[method]} drafter for {model.split('/')[-1]}", "",
        "```py", f'params = specjax.load("{short}", drafter="{method}")', "```", "",
        f"{count / 1e6:.2f} million weights in {size / 2**20:.1f} MiB ({8 * size / count:.1f} bits per weight): "
        "compact storage of specjax, docs/formats.md. Embedding and output head are the target's where they are not "
        "part of the method.", "",
        "## Acceptance", "",
        f"Greedy, {options['k']} drafts per round, {options['dtype']}, first {options['limit']} prompts of each set, "
        f"at most {options['tokens']} tokens each, on {measured['device']}. *tau*: tokens per round, the target's own "
        "one counted. *Finished texts* ended by themselves; others were cut, and texts that repeat themselves flatter "
        "tau. "
        "*Unquantised*: tau of the same weights before they were stored compactly. *n-gram*: tau of the best of six "
        "settings of prompt lookup. *Identical*: texts equal to plain decoding's; the others part at near-ties.", "",
        *acceptance(tau, args.row or method, args.full),
        "## Data", "", *data(training, sources, read(args.packages)),
        "## Training", "", *recipe(training, args.seconds, measured["versions"]),
        "## Licence", "",
        "The weights are under Apache-2.0, as the target's are. The licences of the prompts are listed above; no text "
        "of theirs is part of the package.", "",
    ]  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--training", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="of training, compilation included")
    parser.add_argument("--tau", type=Path, required=True)
    parser.add_argument("--row")
    parser.add_argument("--full")
    parser.add_argument("--packages", type=Path)
    parser.add_argument("--sources", type=Path, default=Path(__file__).with_name("zoo_sources.json"))
    args = parser.parse_args()
    folder = args.folder.resolve()
    (folder / zoo.CARD).write_text(card(folder, args), "utf-8")
    print(f"{folder / zoo.CARD} written")


if __name__ == "__main__":
    main()
