"""Command line: ``specjax generate | chat | explain | profile | demo | zoo | doctor | convert | train``.

Calls the public API only.

Every option is a keyword of :func:`specjax.decode` or :func:`specjax.load` under the same name; an option
that is not given is not passed on, so defaults live in one place. Standard output carries text (or JSON)
and nothing else; progress and statistics go to standard error, and only when that is a terminal.
"""

import contextlib
import itertools
import json
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

import specjax
from specjax import cli_options as opt, progress
from specjax.bench.cli import bench, sweep
from specjax.cli_convert import convert
from specjax.cli_profile import profile
from specjax.cli_tune import tune
from specjax.train.cli import app as train

INTERRUPTED, FAILED = 130, 2

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Exact speculative decoding: the target model's own text, sooner.",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(specjax.__version__)
        raise typer.Exit


app.add_typer(train, name="train")
app.command()(convert)
app.command()(bench)
app.command()(sweep)
app.command()(profile)
app.command()(tune)


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    del version


@app.command()
def generate(
    target: opt.Target,
    prompt: Annotated[str | None, typer.Argument(help="One user turn; standard input if left out.")] = None,
    drafter: opt.Drafter = None,
    dtype: opt.Dtype = None,
    speculative_config: opt.Speculative = None,
    drafter_config: opt.DrafterConfig = None,
    max_new_tokens: opt.MaxNew = None,
    k: opt.K = None,
    temperature: opt.Temperature = None,
    top_k: opt.TopK = None,
    top_p: opt.TopP = None,
    min_p: opt.MinP = None,
    repetition_penalty: opt.Repetition = None,
    presence_penalty: opt.Presence = None,
    frequency_penalty: opt.Frequency = None,
    logit_bias: opt.Bias = None,
    seed: opt.Seed = None,
    n: opt.Samples = None,
    stop: opt.Stop = None,
    ignore_eos: opt.IgnoreEos = None,
    rule: opt.Rule = None,
    rows: opt.Rows = None,
    max_len: opt.MaxLen = None,
    logprobs: opt.Logprobs = None,
    loop: opt.Loop = None,
    chat_template: opt.Template = None,
    chat_template_kwargs: opt.TemplateArgs = None,
    verbose: opt.Verbose = None,
    as_json: opt.AsJson = False,
) -> None:
    """Answer one prompt."""
    given = locals()
    with _errors(verbose):
        options = opt.decode_options(given)
        text = _read_stdin() if prompt is None else prompt
        params = _load(given)
        if as_json or logprobs or n not in (None, 1):
            _generate_whole(params, text, options, as_json)
        else:
            _print_stream(specjax.stream(params, text, **options), verbose)


@app.command()
def chat(
    target: opt.Target,
    system: opt.System = None,
    drafter: opt.Drafter = None,
    dtype: opt.Dtype = None,
    speculative_config: opt.Speculative = None,
    drafter_config: opt.DrafterConfig = None,
    max_new_tokens: opt.MaxNew = None,
    k: opt.K = None,
    temperature: opt.Temperature = None,
    top_k: opt.TopK = None,
    top_p: opt.TopP = None,
    min_p: opt.MinP = None,
    repetition_penalty: opt.Repetition = None,
    presence_penalty: opt.Presence = None,
    frequency_penalty: opt.Frequency = None,
    logit_bias: opt.Bias = None,
    seed: opt.Seed = None,
    stop: opt.Stop = None,
    ignore_eos: opt.IgnoreEos = None,
    rule: opt.Rule = None,
    max_len: opt.MaxLen = None,
    loop: opt.Loop = None,
    chat_template: opt.Template = None,
    chat_template_kwargs: opt.TemplateArgs = None,
    verbose: opt.Verbose = None,
) -> None:
    """Talk to a model; an empty line is ignored, /exit or Ctrl-D leaves."""
    given = locals()
    with _errors(verbose):
        options = opt.decode_options(given)
        talk = specjax.chat(_load(given), system=system, **options)
        for turn in _turns():
            _print_stream(talk.stream(turn), verbose)


@app.command()
def explain(
    target: opt.Target,
    drafter: opt.Drafter = None,
    dtype: opt.Dtype = None,
    speculative_config: opt.Speculative = None,
    drafter_config: opt.DrafterConfig = None,
    prompt_tokens: Annotated[int, typer.Option(help="Length of every prompt.")] = 512,
    max_new_tokens: opt.MaxNew = None,
    k: opt.K = None,
    temperature: opt.Temperature = None,
    rows: opt.Rows = None,
    compile: Annotated[
        bool, typer.Option("--compile", help="Compile and take the compiler's figure of temporary memory.")
    ] = False,
    verbose: opt.Verbose = None,
    as_json: opt.AsJson = False,
) -> None:
    """Memory and programs of a call before it runs: no weight is read."""
    given = locals()
    with _errors(verbose):
        own = ("prompt_tokens", "compile")
        options = opt.decode_options({key: value for key, value in given.items() if key not in own})
        params = _load(given, shapes_only=True)
        prompts = [[0] * prompt_tokens] * (rows or 1)
        told = specjax.explain(params, prompts, compile=compile, **options)
        typer.echo(json.dumps(opt.printable(told)) if as_json else str(told))


@app.command()
def demo(
    max_new_tokens: Annotated[int, typer.Option(help="Token budget per answer.")] = 64,
    dtype: opt.Dtype = None,
    verbose: opt.Verbose = None,
) -> None:
    """Answer two prompts with every drafter there is for SmolLM2-135M, and without, and compare."""
    with _errors(verbose):
        from specjax import demo as module

        module.run(max_new_tokens=max_new_tokens, dtype=dtype or "auto", verbose=verbose)


@app.command()
def zoo(as_json: opt.AsJson = False) -> None:
    """Drafters that come with the package."""
    here = specjax.zoo.available()
    if as_json:
        told = [{"target": x.target, "method": x.method, "bytes": x.size, "card": str(x.card)} for x in here]
        typer.echo(json.dumps(told, indent=2))
        return
    for one in here:
        typer.echo(f"{one.target:<14} {one.method:<10} {one.size / 2**20:5.1f} MiB  {one.card}")
    if not here:
        typer.echo("no drafter is shipped with this installation", err=True)


@app.command()
def doctor(as_json: opt.AsJson = False, verbose: opt.Verbose = None) -> None:
    """Versions, devices, kernels, compiler options, caches; exit code 1 if something does not match."""
    with _errors(verbose):
        report = specjax.doctor()
        typer.echo(json.dumps(report.to_dict(), indent=2) if as_json else str(report))
        if report.problems:
            raise typer.Exit(1)


@app.command()
def selftest(
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Keep the report as JSON, too.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small shapes only, no times.")] = False,
    verbose: opt.Verbose = None,
) -> None:
    """Every kernel against float64 and every drafter against plain decoding on this device; exit code 1 if not."""
    with _errors(verbose):
        from specjax import selftest as module

        if status := module.start(json_file, quick, typer.echo):
            raise typer.Exit(status)


def _load(given: dict[str, Any], **more: Any) -> Any:
    from specjax.core.platform import enable_compilation_cache

    enable_compilation_cache()
    keywords = opt.load_options(given)
    with progress.line(given["verbose"]) as say:
        say(f"loading {given['target']}")
        return specjax.load(given["target"], **keywords, **more)


def _generate_whole(params: Any, text: str, options: dict[str, Any], as_json: bool) -> None:
    with progress.line(options.get("verbose")) as say:
        say("decoding")
        out = specjax.decode(params, text, **options)
    if as_json:
        fields = ("text", "tokens", "finish_reason", "logprobs", "stats")
        typer.echo(json.dumps({name: opt.printable(getattr(out, name)) for name in fields}))
    else:
        typer.echo("\n---\n".join(_flatten(out.text)))
        _note(out.stats, options.get("verbose"))
    if "interrupted" in _flatten(out.finish_reason):
        raise typer.Exit(INTERRUPTED)


def _print_stream(pieces: Iterator[Any], verbose: bool | None) -> None:
    stats = None
    try:
        for piece in _announced(pieces, verbose):
            typer.echo(piece.text, nl=False)
            sys.stdout.flush()
            stats = piece.stats
    finally:
        typer.echo()
    _note(stats, verbose)


def _announced(pieces: Iterator[Any], verbose: bool | None) -> Iterator[Any]:
    """The pieces; a progress line stands until two are there, since both first steps may compile."""
    ready: list[Any] = []
    try:
        with progress.line(verbose) as say:
            say("reading the prompt")
            ready += itertools.islice(pieces, 1)
            say("decoding")
            ready += itertools.islice(pieces, 1)
    except BaseException:
        yield from ready  # what was generated is shown even if the next step fails
        raise
    yield from ready
    yield from pieces


def _note(stats: Any, verbose: bool | None) -> None:
    """One line of statistics, or a table with ``--verbose``, for people only."""
    if stats is None or isinstance(stats, list) or not sys.stderr.isatty():
        return
    if verbose:
        from rich.console import Console

        Console(stderr=True, highlight=False).print(stats)
        return
    text = f"{stats.new_tokens} tokens, {stats.tokens_per_second:.1f} tokens/s"
    if stats.proposed:
        text += f", {stats.tau:.2f} per round, {stats.accepted} of {stats.proposed} drafts kept"
    if stats.compile_seconds:
        text += f"; compiling took {stats.compile_seconds:.1f} s"
    typer.secho(f"[{text}]", dim=True, err=True)


def _turns() -> Iterator[str]:
    """User turns: asked for on a terminal, otherwise one per line of standard input."""
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin if line.strip())
        return
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            return
        if line in ("/exit", "/quit"):
            return
        if line:
            yield line


def _read_stdin() -> str:
    if sys.stdin.isatty():
        raise ValueError("no prompt given: pass it as the second argument or through standard input")
    return sys.stdin.read()


def _flatten(items: Any) -> list[str]:
    return [items] if isinstance(items, str) else [text for item in items for text in _flatten(item)]


@contextlib.contextmanager
def _errors(verbose: bool | None) -> Iterator[None]:
    """Failures as one line and an exit code; what was printed so far stays."""
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None
    except Exception as error:
        if verbose:
            traceback.print_exc()
        expected = isinstance(error, ValueError | OSError | ImportError)
        name = "" if expected else f"{type(error).__name__}: "
        typer.secho(f"error: {name}{error}", fg="red", err=True)
        if not expected and not verbose:
            typer.echo("run again with --verbose for the traceback", err=True)
        raise typer.Exit(FAILED) from None


def main() -> None:
    """Entry point of the ``specjax`` command."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # torch is not needed and not missed
    app()


if __name__ == "__main__":
    main()
