"""``specjax train docstrings``: coding prompts from documented functions."""

from pathlib import Path
from typing import Annotated, Any

import typer

from specjax import cli_options as opt
from specjax.train.cli import app


def _option(*names: str, text: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=text, metavar=metavar, show_default=False)


@app.command()
def docstrings(
    out: Annotated[Path, _option("--out", text="File of prompts; a summary goes beside it.")],
    package: Annotated[
        list[str] | None,
        _option("--package", text="An installed package, or 'python'; repeatable.", metavar="NAME"),
    ] = None,
    path: Annotated[
        list[Path] | None,
        _option(
            "--path", text="A folder of installed packages, or a source tree; repeatable.", metavar="DIR"
        ),
    ] = None,
    evaluation: Annotated[
        list[str] | None,
        _option("--evaluation", text="Leave out what is in these; repeatable.", metavar="SOURCE"),
    ] = None,
    count: Annotated[int | None, _option("--count", "-n", text="Prompts at most.")] = None,
    tokens: Annotated[int | None, _option("--tokens", text="Estimated tokens of a prompt at most.")] = None,
    seed: opt.Seed = None,
    skip: Annotated[
        bool, typer.Option("--skip", help="Leave packages out whose licence does not allow it, with a word.")
    ] = False,
    verbose: opt.Verbose = None,
) -> None:
    """Make coding prompts from docstrings and signatures of packages (read, not imported) under permissive licences."""
    from specjax import cli

    with cli._errors(verbose):
        from specjax.train import docstrings as making, packages

        refused: dict[str, str] = {}
        given = packages.gather(package or [], path or [], refused if skip else None)
        chosen = {"count": count, "tokens": tokens, "seed": seed}
        limits = making.Limits(**{k: v for k, v in chosen.items() if v is not None})
        summary = making.make(given, out, evaluation, limits)
        for name, told in summary["packages"].items():
            typer.echo(
                f"{name} {told['version']}: {told['prompts']:,} prompts; {told.get('usable', 0):,} of "
                f"{told.get('seen', 0):,} functions usable; {told['licence']}"
            )
        for name, licence in refused.items():
            typer.echo(f"{name}: left out, {licence or 'no licence stated'}")
        left_out = ", ".join(f"{n:,} {why}" for why, n in summary["left out"].items() if n)
        typer.echo(
            f"{summary['prompts']:,} prompts of {summary['functions']:,} functions in {out}"
            + (f"; left out: {left_out}" if left_out else "")
        )
