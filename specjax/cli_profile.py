"""Command line: ``specjax profile``. What was not given is not passed on, so defaults live in one place."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from specjax import cli_options as opt, progress

Prompt = Annotated[
    str | None, typer.Argument(help="One user turn; standard input if left out.", show_default=False)
]
Trace = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        help="Folder for a trace of the rounds, to open in Perfetto or TensorBoard.",
        show_default=False,
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option("--plot", help="Write a picture (PNG, SVG or PDF by its suffix).", show_default=False),
]
Repeats = Annotated[
    int | None, typer.Option("--repeats", help="Measurements, of which the least counts.", show_default=False)
]
Plain = Annotated[bool | None, typer.Option("--plain/--no-plain", help="Measure plain decoding beside.")]


def profile(
    target: opt.Target,
    prompt: Prompt = None,
    drafter: opt.Drafter = None,
    dtype: opt.Dtype = None,
    speculative_config: opt.Speculative = None,
    drafter_config: opt.DrafterConfig = None,
    max_new_tokens: opt.MaxNew = None,
    k: opt.K = None,
    temperature: opt.Temperature = None,
    seed: opt.Seed = None,
    n: opt.Samples = None,
    ignore_eos: opt.IgnoreEos = None,
    rule: opt.Rule = None,
    rows: opt.Rows = None,
    max_len: opt.MaxLen = None,
    loop: opt.Loop = None,
    chat_template: opt.Template = None,
    chat_template_kwargs: opt.TemplateArgs = None,
    repeats: Repeats = None,
    plain: Plain = None,
    trace: Trace = None,
    plot: Plot = None,
    verbose: opt.Verbose = None,
    as_json: opt.AsJson = False,
) -> None:
    """Where the time of a round goes: draft, verify, accept, commit, inject, rest, host."""
    given = locals()
    import specjax
    from specjax import cli, profiling_view

    with cli._errors(verbose):
        if plot is not None:
            profiling_view.drawable(plot)  # now rather than after the measurements
        options = opt.decode_options({key: value for key, value in given.items() if key != "plot"})
        text = cli._read_stdin() if prompt is None else prompt
        params = cli._load(given)
        with progress.line(verbose) as say:
            say("profiling")
            found = specjax.profile(params, text, **options)
        if plot is not None:
            found.plot(plot)
        if as_json:
            typer.echo(json.dumps(opt.printable(found.as_dict())))
        else:
            _console().print(found)


def _console() -> Any:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 108, highlight=False)
