"""Coding prompts from documented functions: licences, descriptions, wordings, what is left out."""

import json
import random
import re

import pytest
from typer.testing import CliRunner

from specjax import cli
from specjax.train import asking, contamination, docstrings, doctext, packages, prompts, tasks
from specjax.train.docstrings import Limits

SOURCE = '''
"""A module that must not be imported."""
raise RuntimeError("imported")
from typing import Any
import math, numpy as np


def running_total(numbers: list[int], start: int = 0) -> list[int]:
    """Return the running totals of a list of numbers, beginning with ``start``.

    Every total is the sum of all numbers up to its place.

    Args:
        numbers: The numbers to add.
        start: What the first total begins with.

    Returns:
        A list with one total per number.

    >>> given = [1, 2, 3]
    >>> running_total(given)
    [1, 3, 6]
    """
    out = []
    for n in numbers:
        start += n
        out.append(start)
    return out


def count_vowels(text):
    """Counts the vowels in a text and returns their number."""
    return sum(c in "aeiou" for c in text)


def number_of_vowels(text):
    """Count the vowels of a text and return the number."""
    return 0


def spin(array: "np.ndarray"):
    """Rotates the eigenframe of a tensor by hyperbolic quaternions of the manifold."""
    return np.spin(array).quux.frobnicate(array)


def old(x):
    """Deprecated: return the double of the given number."""
    return 2 * x


def tiny(x):
    """Do it."""
    return x


def suma(x):
    """Devuelve la suma de los numeros que hay en una lista para el usuario."""
    return x


def is_round(number):
    """
    Check if a number is round, that is, whether it ends in one or more zeros when it is written down in decimal.
    """
    return not number % 10


class Box:
    def weigh(self, things, unit="kg"):
        """Add up the weights of all things in a box."""
        return sum(things)

    def open(self):
        """Open the lid of this box and look at the things."""
        return self.lid
'''


def package(folder, name="shelf", licence="License-Expression: MIT", source=SOURCE):
    """An installed package, as pip leaves it."""
    files = {
        f"{name}/__init__.py": "",
        f"{name}/core.py": source,
        f"{name}/tests/test_core.py": source,
        f"{name}/broken.py": "def (",
    }
    files[f"{name}-1.0.dist-info/METADATA"] = (
        f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\n{licence}\n"
    )
    files[f"{name}-1.0.dist-info/RECORD"] = "".join(f"{path},,\n" for path in files)
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def turns(path) -> list[str]:
    return [json.loads(line)["turns"][0] for line in path.read_text().splitlines()]


LICENCES = {
    "License-Expression: MIT": True,
    "License-Expression: BSD-3-Clause AND (Apache-2.0 WITH LLVM-exception)": True,
    "License-Expression: MIT AND LGPL-3.0-only": False,
    "License-Expression: MIT OR GPL-2.0-only": True,
    "License-Expression: MPL-2.0": False,
    "Classifier: License :: OSI Approved :: MIT License": True,
    "Classifier: License :: OSI Approved :: GNU General Public License v3 (GPLv3)": False,
    "License: BSD-like\nClassifier: License :: OSI Approved": True,
    "License: Python Software Foundation License": True,
    "License: CC-BY-NC 4.0": False,
    "License: Copyright (c) A. N. Other.\n        Permission is hereby granted, free of charge, to": True,
    "License: UNKNOWN": False,
    "Summary: none stated": False,
}


def test_licences(tmp_path):
    """Expressions, classifiers, words and whole texts; what is not permissive, or not stated, is refused by name."""
    for i, (field, good) in enumerate(LICENCES.items()):
        folder = package(tmp_path / str(i), licence=field)
        refused: dict[str, str] = {}
        if good:
            assert packages.gather([], [folder])[0].name == "shelf", field
            continue
        with pytest.raises(
            ValueError, match=r"shelf 1\.0: its metadata states (the|no) licence.*Leave it out"
        ):
            packages.gather([], [folder])
        with pytest.raises(ValueError, match="no package to read of 1"):
            packages.gather([], [folder], refused)
        assert list(refused) == ["shelf"], field
    tree = tmp_path / "tree"
    tree.mkdir()
    with pytest.raises(ValueError, match="its licence is unknown"):
        packages.gather([], [tree])
    (tree / "pyproject.toml").write_text('[project]\nname = "tree"\nlicense = {text = "MIT"}\n')
    assert packages.gather([], [tree])[0].licence == "MIT"
    with pytest.raises(ValueError, match="'no-such-package' is not installed"):
        packages.gather(["no-such-package"], [])
    with pytest.raises(ValueError, match="name at least one package"):
        packages.gather([], [])


def test_prompts_of_a_package(tmp_path):
    """PEER.17: forms and counts; the package is not imported; the same seed gives the same file."""
    given = packages.gather([], [package(tmp_path / "p")])
    assert {f.name for f in given[0].files} == {"__init__.py", "core.py", "broken.py"}
    summary = docstrings.make(given, tmp_path / "a.jsonl")
    told = summary["packages"]["shelf"]
    assert (told["licence"], told["seen"], told["unreadable files"]) == ("MIT", 10, 1)
    assert told["prompts"] == summary["prompts"] == len(turns(tmp_path / "a.jsonl"))
    assert summary["left out"] == {
        "contaminated": 0,
        "duplicates": 1,
        "jargon": 2,
    }  # spin, weigh: no common words
    assert summary == json.loads((tmp_path / "a.json").read_text())
    docstrings.make(given, tmp_path / "b.jsonl")
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    texts = turns(tmp_path / "a.jsonl")
    assert len(set(texts)) == len(texts)
    assert not re.search(r"Deprecated|Devuelve|Do it|lid|hyperbolic|[^`]``[^`]", "\n".join(texts))
    first = [t for t in texts if t.startswith(asking.INSTRUCTIONS[0])]
    totals = next(t for t in first if "running_total" in t)
    fence = re.search(r"```python\n(.*)\n```$", totals, re.S)
    assert fence
    assert "running totals of a list of numbers, beginning with start." in re.sub(r"\s+", " ", fence[1])
    compile(fence[1] + "    return None", "prompt", "exec")
    assert "running_total([1, 2, 3])" in totals  # the value that a line before gave a name to
    assert any("```" not in t and "the vowels" in t for t in texts)
    assert len(prompts.read(str(tmp_path / "a.jsonl"))) == len(texts)
    few = docstrings.make(given, tmp_path / "c.jsonl", limits=Limits(count=2))
    assert few["prompts"] == 2
    with pytest.raises(ValueError, match="count"):
        Limits(count=0)


def test_evaluation_is_left_out(tmp_path):
    """PEER.17: by the name of a function to complete, by most of a description's words, by shingles."""
    given = packages.gather([], [package(tmp_path / "p")])
    rows = [
        {"turns": ["Complete this:\n```python\ndef running_total(a, b):\n    ```"]},
        {"turns": ["Write a python function to count vowels in the given text and return their number."]},
        {
            "turns": [
                "Is a number round, that is, whether it ends in one or more zeros when it is written down?"
            ]
        },
    ]
    evaluation = tmp_path / "e.jsonl"
    evaluation.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match="no prompts: of 6 usable functions"):
        docstrings.make(given, tmp_path / "a.jsonl", [str(evaluation)])
    evaluation.write_text("\n".join(map(json.dumps, rows[1:])))
    summary = docstrings.make(given, tmp_path / "a.jsonl", [str(evaluation)])
    assert summary["left out"]["contaminated"] == 3  # the vowels twice
    found = prompts.read(str(tmp_path / "a.jsonl"))
    assert len(contamination.check(found, [str(evaluation)])[0]) == len(found) > 0


SENTENCES = {
    "Returns the sum of two numbers.": "return the sum of two numbers",
    "Lazily flattens nested lists.": "lazily flatten nested lists",
    "Return True if ``n`` is even, False otherwise.": "check whether ``n`` is even",
    "True if all items of a list are equal.": "check whether all items of a list are equal",
    "This function computes the mean of a list.": "compute the mean of a list",
    "The number of words in a text.": "return the number of words in a text",
    "Sorts a list and returns the largest item.": "sort a list and return the largest item",
    "Applies a function to every item.": "apply a function to every item",
    "Akaike information criterion of a model.": None,
    "Same as the function above.": None,
    "Returns self.": None,
}


def test_sentences_become_tasks():
    for sentence, expected in SENTENCES.items():
        assert tasks.task(sentence) == expected, sentence
    assert tasks.third("return the sum") == "returns the sum"
    assert tasks.third("lazily flatten and return it") == "lazily flattens and returns it"
    assert tasks.third("copy and push") == "copies and push"


DOCSTRINGS = {
    "Return :func:`~a.b.total` of the **weights** in `bag` [1]_.": "Return total of the weights in bag.",
    "Split a text into words.\n\nParameters\n----------\ntext : str\n    The text.": "Split a text into words.",
    "Split a text into words.\n    :param text: the text": "Split a text into words.",
    "Find items, e.g. Words in a text, and count them. More here.": "Find items, e.g. Words in a text, and count them.",
    "Compute $x^2$ of the given number in the list.": None,
    "Title of this\n=============\nReturn the sum of numbers.": None,
    "For internal use: return the sum of the numbers.": None,
    ">>> f(1)\n2": None,
}


def test_docstrings_in_plain_words():
    for text, expected in DOCSTRINGS.items():
        found = doctext.parse(text, "f")
        assert (found and found.summary) == expected, text
    doc = doctext.parse(
        "Add one to a number.\n\n>>> f(g(1))\n3\n>>> m.f(1)\n2\n>>> f(2) # three\n3\n\nf(4) -> 5\nf(6) -> a seven",
        "f",
    )
    assert doc
    assert doc.examples == (("f(1)", "2"), ("f(2)", "3"), ("f(4)", "5"))


def test_prompts_fit():
    """Long docstrings are shortened from the end; estimates of tokens are near."""
    more = " ".join(f"It also does thing number {'x' * (i % 7 + 1)} with care." for i in range(60))
    assert doctext.parse(f"Sort the items of a list. {more}", "f") is None  # more than 150 words
    assert asking.size("Sort 123 items.") == 1 + 3 + 1 + 1
    long = doctext.Doc("Sort the items of a list.", more, "", "", ())
    function = docstrings.Function("p", "m", "f", ("a",), "def f(a):", "def f(a):", (), long, 2)
    for text in asking.asked(function, 100, random.Random(0)):
        assert asking.size(text) <= 100


def test_command(tmp_path):
    package(tmp_path / "p")
    package(tmp_path / "p", "closed", "License-Expression: GPL-3.0-only")
    out = tmp_path / "out" / "prompts.jsonl"
    args = ["train", "docstrings", "--path", str(tmp_path / "p"), "--out", str(out)]
    failed = CliRunner().invoke(cli.app, args)
    assert failed.exit_code == cli.FAILED
    assert "closed 1.0" in failed.output
    assert not out.exists()
    done = CliRunner().invoke(cli.app, [*args, "--skip", "-n", "3"])
    assert done.exit_code == 0, done.output
    assert "shelf 1.0: 3 prompts" in done.output
    assert "closed: left out, GPL-3.0-only" in done.output
    assert len(turns(out)) == 3
