"""``specjax train --target T --method M --prompts P --out O``: from prompts to a drafter folder in one command."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from specjax import cli_options as opt
from specjax.train.cli import SOURCES, _temperatures, app

_PREPARE = ("samples", "max_new_tokens", "max_prompt_tokens", "evaluation")
_RECIPE = ("steps", "rows", "length", "learning_rate", "source", "seed")
_WATCH = ("log_every", "evaluate_every", "save_every", "patience", "seconds")


def _option(*names: str, text: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=text, metavar=metavar, show_default=False)


@app.callback(invoke_without_command=True)
def run(
    context: typer.Context,
    target: Annotated[str | None, _option("--target", text="The target, as for `specjax generate`.")] = None,
    method: Annotated[
        str | None, _option("--method", text="eagle3, mtp, assistant, dflash or dspark.", metavar="NAME")
    ] = None,
    out: Annotated[
        Path | None,
        _option("--out", text="Folder of the run; texts go to OUT/texts, the drafter to OUT/run/drafter."),
    ] = None,
    prompts: Annotated[list[str] | None, _option("--prompts", text=SOURCES, metavar="[NAME=]SOURCE")] = None,
    texts: Annotated[
        list[Path] | None, _option("--texts", text="Folders of texts in place of prompts; repeatable.")
    ] = None,
    evaluation: Annotated[
        list[str] | None, _option("--evaluation", text="Leave out prompts that are in these; repeatable.")
    ] = None,
    samples: Annotated[int | None, _option("--samples", text="Answers per prompt.")] = None,
    temperature: Annotated[
        str | None,
        _option("--temperature", text="Of the answers, one per sample.", metavar="FLOAT,...|model"),
    ] = None,
    max_new_tokens: opt.MaxNew = None,
    max_prompt_tokens: Annotated[
        int | None, _option("--max-prompt-tokens", text="Leave out longer prompts.")
    ] = None,
    settings: Annotated[
        str | None, _option("--settings", text="The drafter's shape: layers, taps, k ...", metavar="JSON")
    ] = None,
    steps: Annotated[int | None, _option("--steps", text="Optimiser steps.")] = None,
    rows: Annotated[int | None, _option("--rows", text="Packed rows of a step's batch.")] = None,
    length: Annotated[int | None, _option("--length", text="Tokens of a row.")] = None,
    learning_rate: Annotated[float | None, _option("--learning-rate", text="Its peak.")] = None,
    source: Annotated[
        str | None, _option("--source", text="Of the target's features: online, offline or hybrid.")
    ] = None,
    seed: opt.Seed = None,
    recipe: Annotated[
        str | None,
        _option("--recipe", text="Other fields of the recipe (specjax.train.Recipe).", metavar="JSON"),
    ] = None,
    features: Annotated[Path | None, _option("--features", text="Folder of saved features.")] = None,
    validation: Annotated[float | None, _option("--validation", text="Share of prompts held out.")] = None,
    log_every: Annotated[int | None, _option("--log-every", text="Steps between rows of metrics.")] = None,
    evaluate_every: Annotated[
        int | None, _option("--evaluate-every", text="Steps between evaluations.")
    ] = None,
    save_every: Annotated[int | None, _option("--save-every", text="Steps between checkpoints.")] = None,
    patience: Annotated[
        int | None, _option("--patience", text="Stop after so many evaluations without a better tau.")
    ] = None,
    seconds: Annotated[
        float | None, _option("--seconds", text="Save and leave after this time; run again to go on.")
    ] = None,
    layout: Annotated[
        str | None, _option("--layout", text="Of the drafter's folder (own, speculators ...).")
    ] = None,
    dtype: opt.Dtype = None,
    verbose: opt.Verbose = None,
) -> None:
    """Make drafters. With --target, --method and --out: answers to prompts, training and export in one go; called again
    after a stop it goes on where it was."""
    given = {name: value for name, value in locals().items() if value is not None and name != "context"}
    if context.invoked_subcommand is not None:
        if stray := sorted(given):
            raise typer.BadParameter(
                f"--{stray[0].replace('_', '-')} belongs behind '{context.invoked_subcommand}'"
            )
        return
    if not given:
        typer.echo(context.get_help())
        raise typer.Exit
    from specjax import cli, progress

    with cli._errors(verbose):
        _check(given)
        with progress.line(verbose, logged=True):
            fitted = _train(given)
        _tell(fitted, given["out"])


def _check(given: dict[str, Any]) -> None:
    """ValueError for what is missing or does not go together, before anything is loaded."""
    for name in ("target", "method", "out"):
        if name not in given:
            raise ValueError(f"--{name} is needed")
    if ("prompts" in given) == ("texts" in given):
        raise ValueError("give either --prompts, to be answered, or --texts, folders that were prepared")
    if stray := sorted({*_PREPARE, "temperature"} & set(given)) if "texts" in given else []:
        raise ValueError(
            f"--{stray[0].replace('_', '-')} goes with --prompts only: --texts are answered already"
        )
    from specjax.train import methods

    methods.method(given["method"])


def _train(given: dict[str, Any]) -> Any:
    from specjax import cli
    from specjax.train import Watch, prepare, prompts as reading, train
    from specjax.train.run import check

    picked = lambda names: {name: given[name] for name in names if name in given}  # noqa: E731
    fields = _object(given, "recipe") | picked(_RECIPE)
    shape = _object(given, "settings")
    watch = Watch(**picked(_WATCH))
    params = cli._load(
        {"target": given["target"], "dtype": given.get("dtype"), "verbose": given.get("verbose")}
    )
    check(params, given["method"], shape, given.get("layout", "own"), **fields)
    texts: Any = given.get("texts")
    if texts is None:
        options = picked(_PREPARE)
        if "temperature" in given:
            options["temperature"] = _temperatures(given["temperature"])
        sources = [s for text in given["prompts"] for s in reading.as_sources(text)]
        texts = prepare(params, sources, given["out"] / "texts", **options, **picked(("seed", "verbose")))
    more = picked(("features", "validation", "layout", "verbose"))
    return train(
        params, texts, given["method"], given["out"] / "run", settings=shape, watch=watch, **more, **fields
    )


def _object(given: dict[str, Any], name: str) -> dict[str, Any]:
    """A JSON object given as an option; {} without one."""
    try:
        value = json.loads(given.get(name, "{}"))
    except ValueError as error:
        raise ValueError(f"--{name} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"--{name} must be a JSON object, got {given[name]!r}")
    return value


def _tell(fitted: Any, out: Path) -> None:
    if not fitted.finished:
        typer.echo(f"stopped after {fitted.steps} steps; the same command goes on from there")
        return
    last = next((row for row in reversed(fitted.history) if row["step"] == fitted.step), None)
    if last is not None:
        shares = " ".join(f"{x:.2f}" for x in last["accepted_per_position"])
        typer.echo(f"tau {last['tau']:.2f} on held-out prompts; accepted per position {shares}")
    typer.echo(f"drafter: {out / 'run' / 'drafter'} (step {fitted.step} of {fitted.steps})")
