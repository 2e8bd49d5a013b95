"""Command line: ``specjax convert``. What was not given is not passed on, so defaults live in one place."""

from pathlib import Path
from typing import Annotated, Any

import typer

from specjax import cli_options as opt, progress

Source = Annotated[str, typer.Argument(help="The drafter's folder, Hub id or .gguf file.")]
Folder = Annotated[Path, typer.Argument(help="Folder to write.")]
Target = Annotated[
    str,
    typer.Option(
        "--target",
        help="The model it drafts for: short name, Hugging Face id, folder or .gguf file. Of its weights only "
        "embedding and head are read.",
    ),
]
Layout = Annotated[
    str | None,
    typer.Option(
        "--layout",
        help="own (default), speculators, deepspec, zlab, eagle, transformers or native.",
        show_default=False,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", help="bfloat16 (default), float32, float16 or same.", show_default=False),
]
Compact = Annotated[
    bool | None,
    typer.Option("--compact", help="About 4.5 bits per weight; own layout only.", show_default=False),
]
Method = Annotated[
    str | None,
    typer.Option(
        "--method", help="Kind of drafter: mtp, where the layer is in a model's folder.", show_default=False
    ),
]


def convert(
    source: Source,
    folder: Folder,
    target: Target,
    layout: Layout = None,
    dtype: Dtype = None,
    compact: Compact = None,
    method: Method = None,
    verbose: opt.Verbose = None,
) -> None:
    """Write a drafter in another layout."""
    from specjax import checkpoints, cli

    given = {"layout": layout, "dtype": dtype, "compact": compact, "method": method}
    options: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    with cli._errors(verbose):
        with progress.line(verbose) as say:
            say(f"converting {source}")
            found = checkpoints.convert(source, folder, target, **options)
        for note in found.notes:
            typer.echo(f"assumed: {note}", err=True)
        typer.echo(f"{found.name} drafter ({found.format} format) written to {folder}")
