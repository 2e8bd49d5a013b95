"""The notebooks of ``examples`` run from the first cell to the last, without an error or a word on stderr.

They are kept without outputs: what they show is made by whoever runs them, so it is never out of date.
"""

import os
import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
LIMIT = 200 * 1024  # bytes of a notebook
REAL = {"quickstart"}  # need SmolLM2
#: What must be among a notebook's printed lines.
SAID = {
    "compare_drafters": r"identical to plain decoding, token for token: 3 of 3",
    "quickstart": r"\d+ tokens in \d+ passes instead of \d+",
    "train_drafter": r"[23]\.\d\d tokens per round on prompts that it was not trained on",
}


def _read(path: Path):
    import nbformat

    return nbformat.read(path, as_version=4)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_is_fit_to_be_kept(path):
    """Valid, small, without outputs and without paths of the machine it was written on."""
    import nbformat

    assert path.stat().st_size < LIMIT
    notebook = _read(path)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert not cell.outputs, f"clear the outputs: {cell.source[:60]}"
            assert cell.execution_count is None
        assert not any(f"{root}/" in cell.source for root in ("/home", "/root", "/Users", "/tmp", "/work"))
        for link in _links(cell.source):
            assert (path.parent / link).exists(), link


def _links(text: str) -> list[str]:
    return re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """That of somebody who starts a notebook: compiler settings of the tests are not theirs."""
    given = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    # tqdm misses ipywidgets, which other packages' progress bars would use
    warnings = "default,ignore:IProgress not found"
    return given | {"SPECJAX_CACHE": str(tmp_path_factory.mktemp("cache")), "PYTHONWARNINGS": warnings}


@pytest.mark.long
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.real] if path.stem in REAL else [])
        for path in NOTEBOOKS
    ],
)
def test_notebook_runs(path, environment, tmp_path):
    import nbformat
    from nbclient import NotebookClient

    notebook = _read(path)
    client = NotebookClient(
        notebook, timeout=3600, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute(env=environment)
    if folder := os.environ.get("SPECJAX_NOTEBOOKS"):  # to look at what they show
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / path.name).write_text(nbformat.writes(notebook), "utf-8")
    assert not (said := _printed(notebook, "stderr")), said
    assert re.search(SAID[path.stem], _printed(notebook, "stdout"))


def _printed(notebook, stream: str) -> str:
    return "".join(o.text for c in notebook.cells for o in c.get("outputs", []) if o.get("name") == stream)
