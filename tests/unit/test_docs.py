"""The Python examples of README and docs run as they stand, commands are those there are, links lead somewhere."""

import re
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
#: Run with the quick tests; the others compile more.
QUICK = {"exactness.md", "zoo.md", "speculative-config.md"}

_FENCE = re.compile(r"^```python(?: title=\"([^\"]+)\")?\n(.*?)^```", re.S | re.M)
_SHELL = re.compile(r"^```(?:bash|sh|console)?\n(.*?)^```", re.S | re.M)


def _examples(page: Path) -> list[tuple[str, str]]:
    """(name of the file that the page calls it, or "", code)."""
    return _FENCE.findall(page.read_text("utf-8"))


def _cases():
    for page in PAGES:
        if code := _examples(page):
            real = [pytest.mark.real] if any("smollm2" in text for _, text in code) else []
            long = [pytest.mark.long] if real or page.name not in QUICK else []
            yield pytest.param(page, marks=[*real, *long], id=page.name)


@pytest.mark.parametrize("page", list(_cases()))
def test_examples_run(page, tmp_path, monkeypatch):
    """PRF.6: each example in the docs, unchanged, on a CPU. A fence with a title is a file on Python's path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    known = set(sys.modules)
    for name, code in _examples(page):
        if name:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(code, "utf-8")
    script = "\n".join(code for name, code in _examples(page) if not name)
    try:
        exec(compile(script, str(page), "exec"), {"__name__": "example"})
    finally:
        for module in set(sys.modules) - known:  # files of the page are gone with it
            if str(getattr(sys.modules[module], "__file__", None) or "").startswith(str(tmp_path)):
                del sys.modules[module]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8")):
        assert (page.parent / target).exists() or (page.parent / target).name in (
            "cli.md",
            "contributing.md",
        ), target


def _commands():
    """Lines of the pages that call the command line, and options named with a command in running text."""
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        text = page.read_text("utf-8")
        lines = [line for block in _SHELL.findall(text) for line in block.replace("\\\n", " ").splitlines()]
        lines += re.findall(r"`(specjax [a-z][^`]*)`", text)
        for line in lines:
            if line.strip().startswith("specjax "):
                yield page.name, line.strip().split("  #")[0]


def test_commands_exist():
    """Every command and option that a page shows is one that the command line has."""
    import typer

    from specjax.cli import app

    group = typer.main.get_command(app)
    seen = 0
    for page, line in _commands():
        words = shlex.split(line)[1:]
        if words[0].startswith("-"):
            continue
        assert words[0] in group.commands, f"{page}: {line}"
        command = group.commands[words[0]]
        if getattr(command, "commands", None) and len(words) > 1 and words[1] in command.commands:
            command = command.commands[words[1]]
        known = {name for p in command.params for name in (*p.opts, *p.secondary_opts)} | {"--help"}
        unknown = [
            word for word in words[1:] if re.match(r"--?[a-z]", word) and word.split("=")[0] not in known
        ]
        assert not unknown, f"{page}: {line}: {unknown}"
        seen += 1
    assert seen > 10


def test_every_page_is_in_the_navigation():
    """A page that nobody finds is no documentation."""
    listed = (ROOT / "mkdocs.yml").read_text("utf-8")
    missing = [page.name for page in (ROOT / "docs").glob("*.md") if f": {page.name}\n" not in listed]
    assert not missing
