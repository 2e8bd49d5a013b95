"""Command line: ``specjax tune``. What was not given is not passed on, so defaults live in one place."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from specjax import cli_options as opt
from specjax.bench import cli as bench

Rows = Annotated[
    str | None,
    typer.Option(
        "--rows",
        metavar="N,...",
        help="Prompts decoded together; of several the fastest.",
        show_default=False,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", help="Folder for target, drafter and the choice; load it by its name.", show_default=False
    ),
]


def tune(
    target: opt.Target,
    data: Annotated[
        str | None, typer.Option("--data", metavar="NAME|FILE", help=bench.DATA, show_default=False)
    ] = None,
    methods: bench.Methods = None,
    rows: Rows = None,
    limit: bench.Limit = None,
    max_new_tokens: opt.MaxNew = None,
    temperature: opt.Temperature = None,
    dtype: opt.Dtype = None,
    rule: opt.Rule = None,
    seed: opt.Seed = None,
    ignore_eos: opt.IgnoreEos = None,
    max_len: opt.MaxLen = None,
    out: Out = None,
    verbose: opt.Verbose = None,
    as_json: opt.AsJson = False,
) -> None:
    """Choose drafter, drafts per round and rows for prompts like these, from few runs."""
    given = locals()
    from specjax import cli

    with cli._errors(verbose):
        options = {name: given[name] for name in _PASSED if given[name] is not None}
        if rows is not None:
            options["rows"] = [bench._integer("--rows", part) for part in rows.split(",") if part]
        if methods is not None:
            options["methods"] = [part for text in methods for part in text.split(",") if part]
        if temperature is not None:
            options["temperature"] = opt._float("--temperature", temperature)
        import specjax
        from specjax.bench.data import dataset

        prompts = dataset(data or "builtin", limit)  # before a model is loaded
        tuned = specjax.tune(
            specjax.load(target, **({} if dtype is None else {"dtype": dtype})), prompts, **options
        )
        if out is not None:
            specjax.save(tuned.params, out)
        typer.echo(json.dumps(_printable(tuned)) if as_json else str(tuned))


_PASSED = ("max_new_tokens", "rule", "seed", "ignore_eos", "max_len", "verbose")


def _printable(tuned: Any) -> Any:
    return {
        "method": tuned.method,
        "k": tuned.k,
        "rows": tuned.rows,
        "ratio": tuned.best.ratio,
        "tokens_per_second": tuned.best.speed,
        "found": opt.printable(tuned.found),
    }
