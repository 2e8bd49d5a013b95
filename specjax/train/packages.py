"""Python packages as sources of training prompts: their files and the licence that they state. None is imported."""

import dataclasses
import importlib.metadata as metadata
import re
import sys
import sysconfig
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax.train.wordsets import listed

#: SPDX names of licences that ask for no more than their notice.
PERMISSIVE = listed(
    "0bsd afl-3.0 apache-2.0 blueoak-1.0.0 bsd bsd-1-clause bsd-2-clause bsd-3-clause bsl-1.0 cc0-1.0 cnri-python "
    "hpnd isc mit mit-0 mit-cmu ncsa psf-2.0 python-2.0 python-2.0.1 unlicense zlib"
)
_ALLOWED = re.compile(
    r"\b(mit|bsd|apache|isc|psf|python software foundation|public domain|unlicense|boost)\b", re.I
)
_REFUSED = re.compile(
    r"gpl|general public|affero|lesser|mozilla|\bmpl|eupl|\bepl|cddl|ms-pl|cc[- ]by|creative commons|proprietary|"
    r"commercial|all rights|sspl|busl|clause clear",
    re.I,
)
#: What whole licence texts are known by, where a package has put one in the place of a name.
_TEXTS = {
    "Permission is hereby granted, free of charge": "MIT",
    "Redistribution and use in source and binary forms": "BSD",
    "Apache License": "Apache-2.0",
    "Permission to use, copy, modify, and/or distribute": "ISC",
}
_SKIPPED = listed(
    "tests test testing _testing vendor _vendor vendored _vendored extern externals third_party thirdparty "
    "site-packages dist-packages node_modules benchmarks lib2to3 idlelib turtledemo ensurepip __pycache__ migrations"
)


@dataclasses.dataclass(frozen=True)
class Package:
    """One distribution: name, version, licence as stated, its Python files (without tests and what it bundles)."""

    name: str
    version: str
    licence: str
    files: tuple[Path, ...]


def gather(
    names: Sequence[str], folders: Sequence[str | Path], refused: dict[str, str] | None = None
) -> list[Package]:
    """Packages by name (``python`` is the standard library) and in folders, each once.

    A folder holds installed packages (``pip install --target``) or is a source tree with a ``pyproject.toml``. Raises
    ValueError for a package or folder that is not there, and for a licence that is not permissive or not stated; with
    ``refused``, such packages are put there (name -> licence) and left out.
    """
    found: dict[str, Package] = {}
    for package in [*map(named, names), *(p for folder in folders for p in under(folder))]:
        if permissive(package.licence):
            found.setdefault(package.name, package)
        elif refused is None:
            raise ValueError(_refusal(package))
        else:
            refused[package.name] = package.licence
    if not found:
        raise ValueError(
            f"no package to read of {len(refused or ())} named or found"
            if refused
            else "name at least one package, or a folder that has some"
        )
    return list(found.values())


def named(name: str) -> Package:
    """The installed distribution of this name, whatever its licence. ValueError where there is none."""
    if name.lower() == "python":
        root = Path(sysconfig.get_path("stdlib"))
        return Package("python", sys.version.split()[0], "PSF-2.0", _files(root, root.rglob("*.py")))
    try:
        return _package(metadata.distribution(name))
    except metadata.PackageNotFoundError:
        raise ValueError(f"package {name!r} is not installed here; give the folder that it is in") from None


def under(folder: str | Path) -> list[Package]:
    """Distributions installed in a folder, or else the source tree that it is, whatever their licences."""
    root = Path(folder)
    if not root.is_dir():
        raise ValueError(f"{root} is no folder")
    found = [_package(d) for d in metadata.distributions(path=[str(root)])]
    if not found:
        project = root / "pyproject.toml"
        if not project.is_file():
            raise ValueError(
                f"{root} has neither installed packages (*.dist-info) nor a pyproject.toml: its licence is unknown"
            )
        given = tomllib.loads(project.read_text("utf-8")).get("project", {})
        name, version = str(given.get("name", root.name)), str(given.get("version", ""))
        found = [Package(name, version, _of_project(given), _files(root, root.rglob("*.py")))]
    return sorted(found, key=lambda p: p.name.lower())


def permissive(licence: str) -> bool:
    """Whether a licence (an SPDX expression or a name in words) asks for no more than its notice.

    Of an expression with AND every part must, of one with OR alone any part.
    """
    parts = re.split(r"\s+(?:AND|OR)\s+", re.sub(r"[()]|\s+WITH\s+\S+", " ", licence).strip())
    join = any if " OR " in licence and " AND " not in licence else all
    return bool(licence.strip()) and join(map(_part, parts))


def stated(given: Mapping[str, Any]) -> str:
    """Licence in a package's metadata (core metadata, keys as in the file; ``Classifier`` a list): expression, else
    classifiers, else the field in words; "" if none."""
    if given.get("License-Expression"):
        return str(given["License-Expression"]).strip()
    classified = [
        c.split("::")[-1].strip() for c in given.get("Classifier", ()) if c.startswith("License ::")
    ]
    classified = [c for c in classified if c != "OSI Approved"]
    if classified:
        return " AND ".join(dict.fromkeys(classified))
    text = str(given.get("License") or "").strip()
    if len(text) <= 100 and "\n" not in text:
        return text
    return next(
        (name for phrase, name in _TEXTS.items() if phrase in text and not _REFUSED.search(text[:400])), ""
    )


def _part(term: str) -> bool:
    name = term.strip()
    if name.lower() in PERMISSIVE:
        return True
    return _ALLOWED.search(name) is not None and _REFUSED.search(name) is None


def _package(found: metadata.Distribution) -> Package:
    given = found.metadata
    fields: dict[str, Any] = {"Classifier": given.get_all("Classifier") or []}
    fields |= {key: given[key] for key in ("License-Expression", "License") if key in given}
    root = Path(str(found.locate_file("")))
    listed = (root / str(f) for f in found.files or () if str(f).endswith(".py"))
    return Package(given["Name"], found.version, stated(fields), _files(root, listed))


def _of_project(given: Mapping[str, Any]) -> str:
    licence = given.get("license")
    fields: dict[str, Any] = {"Classifier": given.get("classifiers", [])}
    if isinstance(licence, str):
        fields["License-Expression"] = licence
    elif isinstance(licence, Mapping):
        fields["License"] = licence.get("text", "")
    return stated(fields)


def _refusal(package: Package) -> str:
    licence = f"the licence {package.licence!r}" if package.licence else "no licence"
    return (
        f"{package.name} {package.version}: its metadata states {licence}; prompts are made from packages under MIT, "
        "BSD, Apache, PSF, ISC and like licences only. Leave it out."
    )


def _files(root: Path, paths: Iterable[Path]) -> tuple[Path, ...]:
    def wanted(path: Path) -> bool:
        parts = path.relative_to(root).parts if path.is_relative_to(root) else path.parts
        return not (set(parts) & _SKIPPED or re.match(r"test_|conftest|setup\.py", parts[-1]))

    return tuple(sorted(p for p in paths if wanted(p) and p.is_file()))
