"""Command line: ``specjax train ...``. What was not given is not passed on, so defaults live in one place."""

import dataclasses
import inspect
import itertools
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from specjax import cli_options as opt, progress

app = typer.Typer()

Folder = Annotated[Path, typer.Argument(help="Folder of the texts.")]
SOURCES = "A file of JSON lines, a data set of the Hugging Face Hub, or a .json list of sources; repeatable."


@app.command()
def prepare(
    target: opt.Target,
    folder: Annotated[
        Path, typer.Argument(help="Folder for the texts; prepared again, goes on where it was.")
    ],
    prompts: Annotated[list[str], typer.Option("--prompts", metavar="[NAME=]SOURCE", help=SOURCES)],
    evaluation: Annotated[
        list[str] | None,
        typer.Option(
            "--evaluation", metavar="SOURCE", help="Leave out prompts that are in these; repeatable."
        ),
    ] = None,
    suffix: Annotated[
        list[str] | None,
        typer.Option(
            "--suffix",
            metavar="NAME=TEXT",
            help="Ask a source's prompts with this behind them, too; repeatable.",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", help="Rows read of every source.")] = None,
    given: Annotated[
        bool, typer.Option("--given", help="Train on the answers that the conversations have.")
    ] = False,
    marks: Annotated[
        tuple[str, str] | None,
        typer.Option("--marks", metavar="BEFORE AFTER", help="With --given: texts around every answer."),
    ] = None,
    lenient: Annotated[
        bool, typer.Option("--lenient", help="With --given: leave out conversations that cannot be read.")
    ] = False,
    samples: Annotated[
        int | None, typer.Option("--samples", "-n", help="Answers per prompt.", show_default=False)
    ] = None,
    max_new_tokens: opt.MaxNew = None,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(help="Leave out longer prompts.", show_default=False)
    ] = None,
    temperature: Annotated[
        str | None,
        typer.Option(
            "--temperature",
            "-t",
            metavar="FLOAT,...|model",
            help="One per sample; 0 = greedy.",
            show_default=False,
        ),
    ] = None,
    top_k: opt.TopK = None,
    top_p: opt.TopP = None,
    min_p: opt.MinP = None,
    repetition_penalty: opt.Repetition = None,
    seed: opt.Seed = None,
    rows: opt.Rows = None,
    dtype: opt.Dtype = None,
    chat_template: opt.Template = None,
    chat_template_kwargs: opt.TemplateArgs = None,
    verbose: opt.Verbose = None,
) -> None:
    """Answer prompts with the target: the texts a drafter is trained on."""
    values = locals()
    from specjax import cli

    with cli._errors(verbose):
        from specjax.train import given as of_given, prompts as reading, respond

        sources = with_suffixes(
            [s for text in prompts for s in reading.as_sources(text)], suffix or [], limit
        )
        own = ("folder", "prompts", "suffix", "limit", "given", "marks", "lenient", "temperature", "dtype")
        options = opt.decode_options({k: v for k, v in values.items() if k not in own})
        if temperature is not None:
            options["temperature"] = _temperatures(temperature)
        run: Any = of_given.prepare_given if given else respond.prepare
        if given:
            options |= {"marks": marks, "lenient": lenient}
        elif marks or lenient:
            raise ValueError("--marks and --lenient go with --given only")
        known = inspect.signature(run).parameters
        if unknown := [name for name in options if name not in known]:
            raise ValueError(f"--{unknown[0].replace('_', '-')} does not go with --given: nothing is decoded")
        asked = reading.read(sources, answers=given)
        with progress.line(verbose, logged=True):
            params = cli._load({"target": target, "dtype": dtype, "verbose": verbose})
            store = run(params, asked, folder, **options)
        _tell(store)


@app.command()
def show(
    target: opt.Target,
    folder: Folder,
    count: Annotated[int, typer.Option("--count", "-n", help="Texts shown.")] = 3,
    source: Annotated[str | None, typer.Option("--source", help="Of this source only.")] = None,
    pairs: Annotated[
        bool, typer.Option("--pairs", help="List (index of the context's last token, label) too.")
    ] = False,
    verbose: opt.Verbose = None,
) -> None:
    """Print texts with their trained tokens marked."""
    from specjax import cli

    with cli._errors(verbose):
        import specjax
        from specjax import checkpoints
        from specjax.train import answers, store as texts

        store = texts.load(folder, partial=True)
        if source is not None and source not in store.sources:
            raise ValueError(f"no source {source!r} in {folder}; it has {', '.join(store.sources)}")
        meta = specjax.load(target, shapes_only=True).meta
        tokenizer = checkpoints.tokenizer.get(meta.tokenizer_id)
        documents = (store.document(i) for i in range(len(store)))
        wanted = (d for d in documents if source is None or d.source == source)
        for d in itertools.islice(wanted, count):
            typer.secho(
                f"--- {d.source}, prompt {d.prompt:016x}, sample {d.sample}, {len(d.ids)} tokens", bold=True
            )
            _print_marked(answers.marked(tokenizer, d.ids.tolist(), d.spans))
            if pairs:
                typer.echo(json.dumps(answers.pairs(d.ids.tolist(), d.spans)))


def with_suffixes(sources: list[Any], suffixes: list[str], limit: int | None) -> list[Any]:
    """Sources with further suffixes (``NAME=TEXT``) and a limit."""
    found = {s.label: s if limit is None else dataclasses.replace(s, limit=limit) for s in sources}
    for given in suffixes:
        name, equals, text = given.partition("=")
        if not equals or name not in found:
            raise ValueError(f"--suffix takes NAME=TEXT with NAME one of {', '.join(found)}, got {given!r}")
        found[name] = dataclasses.replace(found[name], suffixes=(*found[name].suffixes, text))
    return list(found.values())


def _temperatures(text: str) -> Any:
    if text == "model":
        return text
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--temperature takes numbers with commas, or 'model', got {text!r}") from None


def _print_marked(tokens: list[tuple[str, bool]]) -> None:
    """Trained tokens in colour on a terminal, in brackets elsewhere."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        from specjax.train.answers import bracketed

        typer.echo(bracketed(tokens))
        return
    styles = ("black on green", "black on bright_green")  # in turn, so that tokens can be told apart
    text = Text()
    for i, (piece, trained) in enumerate(tokens):
        text.append(piece, styles[i % 2] if trained else "dim")
    console.print(text)


def _tell(store: Any) -> None:
    meta = store.meta[0]
    for name, count in store.counts().items():
        left_out = {
            k: n for k, n in meta["prompts"].get(name, {}).items() if k not in ("rows", "prompts") and n
        }
        more = f"; left out: {', '.join(f'{n:,} {k}' for k, n in left_out.items())}" if left_out else ""
        typer.echo(
            f"{name}: {count['documents']:,} texts, {count['trained']:,} of {count['tokens']:,} tokens trained, "
            f"{count['ended']:.1%} of the answers came to their end{more}"
        )
    for run in meta.get("runs", [])[-1:]:
        rate = run["tokens"] / max(run["seconds"], 1e-9)
        typer.echo(f"{run['answers']:,} answers, {run['tokens']:,} tokens, {rate:,.0f} tokens/s")


import specjax.train.cli_docstrings  # noqa: E402
import specjax.train.cli_run  # noqa: E402, F401  (adds the command itself to the app)
