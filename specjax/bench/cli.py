"""``specjax bench`` and ``specjax sweep``. What was not given is not passed on, so defaults live in one place."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from specjax import cli_options as opt

#: Exit code of a sweep that ran out of time: the same command goes on.
UNFINISHED = 75

METHOD = "ngram, a method that the package has a drafter of, a folder or Hub id; NAME=... names it, + joins a chain."
DATA = "builtin[:KIND], gsm8k, math500, humaneval, mbpp (from the Hub), FILE.jsonl or NAME=FILE.jsonl"
Methods = Annotated[
    list[str] | None,
    typer.Option("--methods", "--drafter", metavar="[NAME=]DRAFTER,...", help=METHOD, show_default=False),
]
Widths = Annotated[
    str | None,
    typer.Option("--k", "-k", metavar="N,...", help="Drafts per round; also auto.", show_default=False),
]
Batch = Annotated[
    str | None, typer.Option("--batch", metavar="N,...", help="Prompts decoded together.", show_default=False)
]
Temperatures = Annotated[
    str | None, typer.Option("--temperature", "-t", metavar="T,...", help="0 = greedy.", show_default=False)
]
Limit = Annotated[
    int | None, typer.Option("--limit", help="The first so many prompts of a data set.", show_default=False)
]
Longest = Annotated[
    int | None, typer.Option("--max-prompt-tokens", help="Leave out longer prompts.", show_default=False)
]
Repeats = Annotated[
    int | None, typer.Option("--repeats", help="Times that every prompt is decoded.", show_default=False)
]
Platform = Annotated[
    str | None, typer.Option("--platform", help="Fail unless this is cpu, cuda or rocm.", show_default=False)
]
NoParts = Annotated[
    bool, typer.Option("--no-parts", help="Do not time drafting and verification alone: compiles less.")
]
Chunk = Annotated[
    int | None, typer.Option("--prefill-chunk", help="Prompt tokens per prefill pass.", show_default=False)
]


def bench(
    target: opt.Target,
    data: Annotated[
        str | None, typer.Option("--data", metavar="NAME|FILE", help=DATA, show_default=False)
    ] = None,
    methods: Methods = None,
    k: Widths = None,
    batch: Batch = None,
    temperature: Temperatures = None,
    limit: Limit = None,
    max_prompt_tokens: Longest = None,
    max_new_tokens: opt.MaxNew = None,
    repeats: Repeats = None,
    dtype: opt.Dtype = None,
    platform: Platform = None,
    rule: opt.Rule = None,
    seed: opt.Seed = None,
    ignore_eos: opt.IgnoreEos = None,
    max_len: opt.MaxLen = None,
    prefill_chunk: Chunk = None,
    chat_template: opt.Template = None,
    chat_template_kwargs: opt.TemplateArgs = None,
    no_parts: NoParts = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for CSV, Markdown and plots.", show_default=False)
    ] = None,
    verbose: opt.Verbose = None,
    as_json: opt.AsJson = False,
) -> None:
    """Speed, acceptance and cost of drafters beside plain decoding, on the same prompts in turn."""
    given = locals()
    from specjax import cli

    with cli._errors(verbose):
        options = _options(given, ("target", "data", "out", "as_json", "dtype"))
        import specjax
        from specjax.bench import live
        from specjax.bench.contenders import check_platform
        from specjax.bench.data import dataset
        from specjax.bench.table import Table

        check_platform(platform)
        prompts = dataset(data or "builtin", limit)  # before a model is loaded
        params = specjax.load(target, **({} if dtype is None else {"dtype": dtype}))
        rows: list[Any] = []
        with live.rows(verbose=verbose) as show:

            def done(row: Any) -> None:
                rows.append(row)
                show(Table(tuple(rows)), row)

            table = specjax.bench(params, prompts, done=done, **options)
        if out is not None:
            table.write(out)
        _print(table, as_json)


def sweep(
    target: opt.Target,
    out: Annotated[
        Path, typer.Option("--out", help="Folder of the rows; the same command goes on where it was.")
    ],
    datasets: Annotated[
        str | None, typer.Option("--datasets", metavar="NAME|FILE,...", help=DATA, show_default=False)
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data", metavar="NAME=FILE", help="Where a data set lies; repeatable.", show_default=False
        ),
    ] = None,
    methods: Methods = None,
    k: Annotated[
        str | None,
        typer.Option(
            "--k",
            "-k",
            metavar="N,...",
            help="Drafts per round; also auto, and best (so far).",
            show_default=False,
        ),
    ] = None,
    batch: Batch = None,
    temperature: Temperatures = None,
    limit: Limit = None,
    max_prompt_tokens: Longest = None,
    max_new_tokens: opt.MaxNew = None,
    repeats: Repeats = None,
    best_repeats: Annotated[
        int | None,
        typer.Option(
            "--best-repeats", help="Measure the best N once more, this many times.", show_default=False
        ),
    ] = None,
    plain_every: Annotated[
        int | None,
        typer.Option(
            "--plain-every", help="Rows decode every so many batches plainly again.", show_default=False
        ),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option("--seconds", help="Begin no row that would not fit.", show_default=False)
    ] = None,
    compile_threads: Annotated[
        int | None,
        typer.Option(
            "--compile-threads", help="Programs compiled at once; 1 = when needed.", show_default=False
        ),
    ] = None,
    dtype: opt.Dtype = None,
    platform: Platform = None,
    rule: opt.Rule = None,
    seed: opt.Seed = None,
    ignore_eos: opt.IgnoreEos = None,
    max_len: opt.MaxLen = None,
    prefill_chunk: Chunk = None,
    chat_template: opt.Template = None,
    chat_template_kwargs: opt.TemplateArgs = None,
    no_parts: NoParts = False,
    verbose: opt.Verbose = None,
    as_json: opt.AsJson = False,
) -> None:
    """Methods x data sets x N, a row at a time; goes on where it was when it is run again."""
    given = locals()
    from specjax import cli

    with cli._errors(verbose):
        options = _options(given, ("target", "datasets", "data", "out", "as_json"))
        import specjax
        from specjax.bench import live

        with live.rows(verbose=verbose) as show:
            table = specjax.sweep(target, datasets=_datasets(datasets, data), out=out, done=show, **options)
        _print(table, as_json)
        if not table.finished:
            typer.echo("time is up: run the same command again to go on", err=True)
            raise typer.Exit(UNFINISHED)


def _options(given: dict[str, Any], own: tuple[str, ...]) -> dict[str, Any]:
    """Keywords of the public function."""
    options = {name: value for name, value in given.items() if name not in own and value is not None}
    lists = {"k": _width, "batch": _integer, "temperature": _float}
    for name, parse in lists.items():
        if name in options:
            options[name] = [parse(f"--{name}", part) for part in options[name].split(",") if part]
    if "methods" in options:
        options["methods"] = [part for text in options["methods"] for part in text.split(",") if part]
    if "chat_template" in options:
        options["chat_template"] = opt._template(options["chat_template"])
    if "chat_template_kwargs" in options:
        options["chat_template_kwargs"] = opt._json(
            "--chat-template-kwargs", options["chat_template_kwargs"], (dict,)
        )
    return {name: value for name, value in options.items() if name != "no_parts"} | (
        {"parts": False} if given["no_parts"] else {}
    )


def _datasets(names: str | None, files: list[str] | None) -> list[str]:
    """Data sets in order; files replace what a short name stands for, and are enough on their own."""
    where = {}
    for text in files or []:
        name, equals, path = text.partition("=")
        if not equals or not path:
            raise ValueError(f"--data takes NAME=FILE.jsonl, got {text!r}")
        where[name] = text
    if names is None:
        return list(where.values()) or ["builtin"]
    listed = [name for name in names.split(",") if name]
    if unused := sorted(set(where) - set(listed)):
        raise ValueError(f"--data names {unused}, which --datasets does not have")
    return [where.get(name, name) for name in listed]


def _width(name: str, text: str) -> int | str:
    return text if text in ("auto", "best") else _integer(name, text)


def _integer(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} takes whole numbers with commas between them, got {text!r}") from None


def _float(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name} takes numbers with commas between them, got {text!r}") from None


def _print(table: Any, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([row.as_dict() for row in table.rows]))
    else:
        typer.echo(str(table))
