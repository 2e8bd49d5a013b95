"""The Python examples of README and docs run as they stand."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def _examples(page: Path) -> str:
    return "\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.S | re.M))


def _cases():
    for page in PAGES:
        if code := _examples(page):
            marks = (
                (pytest.mark.real, pytest.mark.long) if "smollm2" in code else ()
            )  # long: many compilations
            yield pytest.param(page, marks=marks, id=page.name)


@pytest.mark.parametrize("page", list(_cases()))
def test_examples_run(page):
    exec(compile(_examples(page), str(page), "exec"), {"__name__": "example"})


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8")):
        assert (page.parent / target).exists(), target
