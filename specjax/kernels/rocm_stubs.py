"""Libraries that stand in for ROCm's, so that XLA's AMD plug-in can be loaded where there is none.

The plug-in holds XLA's compiler, Triton, LLVM and a linker for AMD, and asks ROCm's libraries only to run programs.
Which libraries and functions it asks for is read from its own tables of symbols (binutils' ``nm`` and ``objdump``);
for each a function is made that returns an error. With them nothing runs, and everything compiles.
"""

import collections
import dataclasses
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

#: Libraries that every Linux has.
_SYSTEM = re.compile(r"lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s|z|util|resolv)\.so|ld-linux")
#: C++ run-time's own names, some of which carry no version: a stand-in would take their place.
_STANDARD = re.compile(r"_ZT|_ZK?N?K?St|_ZN?K?10__cxxabi")
_FAILS = 100  # hipErrorNoDevice; no library of ROCm takes it for success


@dataclasses.dataclass(frozen=True)
class Library:
    """One library to stand in for: its name and its functions, as (name, version or "")."""

    name: str
    functions: tuple[tuple[str, str], ...]

    @property
    def source(self) -> str:
        """C code: every function returns an error."""
        one = '__asm__(".globl {0}\\n.type {0},@function\\n{0}:\\n mov ${1},%eax\\n ret\\n");\n'
        return "".join(one.format(name, _FAILS) for name, _ in self.functions) or "int empty_;\n"

    @property
    def versions(self) -> str:
        """The linker's script of versions; "" without any."""
        found = collections.defaultdict(list)
        for name, version in self.functions:
            if version:
                found[version].append(name)
        return "".join(f"{v} {{ global: {'; '.join(names)}; }};\n" for v, names in sorted(found.items()))


def wanted(headers: str, symbols: str) -> tuple[Library, ...]:
    """Libraries and functions that a shared object needs and that no Linux has.

    ``headers``: what ``objdump -p`` prints of it; ``symbols``: ``nm -D --undefined-only``. A function with a version is
    in the library that the headers name for that version. The linker looks for one without in all libraries, so the
    first has them all.
    """
    names = [n for n in re.findall(r"^ +NEEDED +(\S+)", headers, re.M) if not _SYSTEM.match(n)]
    if not names:
        return ()
    owners, owner = collections.defaultdict(set), ""
    for line in headers.partition("Version References:")[2].splitlines():
        if found := re.match(r" +required from (\S+):", line):
            owner = found[1]
        elif (parts := line.split()) and owner in names:
            owners[parts[-1]].add(owner)
    functions: dict[str, list[tuple[str, str]]] = {name: [] for name in names}
    for line in filter(str.strip, symbols.splitlines()):
        kind, symbol = line.split()[-2:]
        name, _, version = symbol.replace("@@", "@").partition("@")
        if kind != "U" or _STANDARD.match(name):
            continue
        for library in owners.get(version, ()) if version else names[:1]:
            functions[library].append((name, version))
    return tuple(Library(name, tuple(found)) for name, found in functions.items())


def build(plugin: Path, folder: Path, compiler: str = "cc") -> tuple[Library, ...]:
    """Stand-ins for what ``plugin`` needs, compiled into ``folder``; OSError if one cannot be."""
    libraries = wanted(
        _run(["objdump", "-p", str(plugin)]), _run(["nm", "-D", "--undefined-only", str(plugin)])
    )
    folder.mkdir(parents=True, exist_ok=True)
    for library in libraries:
        source, versions = folder / f"{library.name}.c", folder / f"{library.name}.map"
        source.write_text(library.source)
        command = [compiler, "-shared", "-fPIC", "-nostdlib", str(source), "-o", str(folder / library.name)]
        command.append(f"-Wl,-soname,{library.name}")
        if library.versions:
            versions.write_text(library.versions)
            command.append(f"-Wl,--version-script={versions}")
        _run(command)
    return libraries


def _run(command: Iterable[str]) -> str:
    done = subprocess.run([*command], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)} failed: {done.stderr.strip()[-500:] or done.returncode}")
    return done.stdout
