"""Pages of the documentation site that are kept elsewhere: notebooks, CONTRIBUTING.md, CHANGELOG.md, the command line.

Links between files of the repository become links between pages.
"""

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent
#: Files of the repository that are pages of the site, by the page's path under ``docs``.
PAGES = {"contributing.md": ROOT / "CONTRIBUTING.md", "changelog.md": ROOT / "CHANGELOG.md"}
NOTEBOOKS = {f"examples/{path.stem}.md": path for path in sorted((ROOT / "examples").glob("*.ipynb"))}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages."""
    for uri, path in PAGES.items():
        files.append(File.generated(config, uri, content=path.read_text("utf-8")))
    for uri, path in NOTEBOOKS.items():
        files.append(File.generated(config, uri, content=notebook(path)))
    files.append(File.generated(config, "cli.md", content=command_line()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as they are between pages of the site."""
    up = "../" * page.file.src_uri.count("/")
    markdown = re.sub(r"\]\((?:\.\./)*README\.md(#[^)]*)?\)", lambda m: f"]({up}index.md)", markdown)
    markdown = re.sub(r"\]\((?:\.\./)*CONTRIBUTING\.md", f"]({up}contributing.md", markdown)
    markdown = re.sub(r"\]\((?:\.\./)*CHANGELOG\.md", f"]({up}changelog.md", markdown)
    markdown = re.sub(r"\]\((?:\.\./)*docs/", f"]({up}", markdown)
    notebooks = r"\]\((?:\.\./examples/|examples/)?(\w+)\.ipynb\)"
    return re.sub(notebooks, lambda m: f"]({up}examples/{m.group(1)}.md)", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings name things by roles (``:func:`` and so on), which are no Markdown: the name alone is left."""
    return re.sub(r":(?:class|func|mod|meth|data|attr):(?=<code>)", "", html)


def notebook(path: Path) -> str:
    """A notebook as Markdown: text, and code without output."""
    parts = []
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```py\n{source}\n```")
    return "\n\n".join([*parts, f"*This page is the notebook `examples/{path.name}`.*\n"])


def command_line() -> str:
    """Every command with its options, from the commands themselves."""
    import typer

    from specjax.cli import app

    group = typer.main.get_command(app)
    pages = ["# Command line", f"{group.help}\n\nEvery command has `--help`."]
    for name, command in _commands("specjax", group):
        pages.append(
            f"## {name}\n\n{(command.help or '').strip()}\n\n```\n{_usage(name, command)}\n```\n\n{_options(command)}"
        )
    return "\n\n".join(pages) + "\n"


def _commands(path: str, group: Any) -> list[tuple[str, Any]]:
    found = []
    for name, command in sorted(group.commands.items()):
        if getattr(command, "commands", None):
            found += _commands(f"{path} {name}", command)
        else:
            found.append((f"{path} {name}", command))
    return found


def _usage(name: str, command: Any) -> str:
    arguments = [p.name.upper() if p.required else f"[{p.name.upper()}]" for p in _of(command, "argument")]
    return " ".join([name, *arguments, "[OPTIONS]"])


def _options(command: Any) -> str:
    rows = ["| | |", "| --- | --- |"]
    for param in _of(command, "argument"):
        rows.append(f"| `{param.name.upper()}` | {_cell(param.help)} |")
    for param in _of(command, "option"):
        names = ", ".join(f"`{name}`" for name in (*param.opts, *param.secondary_opts))
        rows.append(f"| {names} | {_cell(param.help)} |")
    return "\n".join(rows)


def _of(command: Any, kind: str) -> list[Any]:
    return [p for p in command.params if p.param_type_name == kind and not getattr(p, "hidden", False)]


def _cell(text: str | None) -> str:
    text = re.sub(r"\s+", " ", text or "")
    return re.sub(r"([|<>*_])", r"\\\1", text)
