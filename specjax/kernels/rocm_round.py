"""Whole decode programs compiled by XLA's AMD compiler: ``python -m specjax.kernels.rocm_round`` (``make rocm-round``).

Needs Linux on x86-64, a C compiler and binutils; no AMD GPU and no ROCm. The plug-in that matches the installed jaxlib
comes from PyPI (``jax-rocm7-pjrt``, 150 MB, 500 MB unpacked; kept), libraries that it misses are replaced by ones that
cannot do anything (:mod:`specjax.kernels.rocm_stubs`), and every program of :mod:`specjax.kernels.rocm_rounds` is
compiled in a process of its own. Nothing is run: numbers, speed and run-time faults of AMD GPUs are not seen.
"""

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGE, MEMBER = "jax-rocm7-pjrt", "xla_rocm_plugin.so"
CHIPS = ("gfx942", "gfx950")
TOOLS = ("cc", "nm", "objdump")
SECONDS = 1200  # for one program


def missing() -> list[str]:
    """What this machine lacks, in words."""
    found = []
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        found.append(
            f"the plug-in is made for Linux on x86-64, this is {sys.platform} on {platform.machine()}"
        )
    if lacking := [tool for tool in TOOLS if shutil.which(tool) is None]:
        found.append(f"{', '.join(lacking)} not found: install a C compiler and binutils")
    return found


def release() -> str:
    """The plug-in's release: it must be jaxlib's."""
    return ".".join(metadata.version("jaxlib").split(".")[:3])


def plugin(folder: Path, version: str) -> Path:
    """The plug-in's file, downloaded and unpacked on first use. OSError says what failed."""
    at = folder / f"{PACKAGE}-{version}" / MEMBER
    if not at.exists():
        at.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as wheels:
            unpack(_download(Path(wheels), version), at)
    return at


def _download(folder: Path, version: str) -> Path:
    what = f"{PACKAGE}=={version}.*" if version.count(".") == 2 else f"{PACKAGE}=={version}"
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "-q"]
    command += ["--only-binary=:all:", "--dest", str(folder), what]
    done = subprocess.run(command, capture_output=True, text=True)
    wheel = next(folder.glob("*.whl"), None)
    if done.returncode or wheel is None:
        raise OSError(f"pip could not download {what}: {done.stderr.strip()[-500:]}")
    return wheel


def unpack(wheel: Path, at: Path) -> None:
    """Take the plug-in out of a wheel; it appears whole or not at all. OSError if it is not in there."""
    with zipfile.ZipFile(wheel) as files:
        name = next((n for n in files.namelist() if n.endswith(f"/{MEMBER}")), None)
        if name is None:
            raise OSError(f"{wheel.name} holds no {MEMBER}")
        part = at.with_suffix(".part")
        with files.open(name) as source, part.open("wb") as out:
            shutil.copyfileobj(source, out)
    part.replace(at)


def cache() -> Path:
    """Where the plug-in is kept: in the virtual environment, or else in the user's cache."""
    if sys.prefix != sys.base_prefix:
        return Path(sys.prefix) / "rocm"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "specjax" / "rocm"


def child(library: Path, chip: str, name: str, part: str, rows: int, prompt: int) -> dict[str, Any]:
    """Compile one program in this process, which is good for nothing else afterwards."""
    from specjax.kernels import rocm_rounds, rocm_xla

    case = rocm_rounds.ROUNDS[name]
    compiler = rocm_xla.Compiler(library, chip)
    made = rocm_rounds.parts(case, rows, prompt, part)
    done = compiler(made.function, *made.shapes, donate=(1,))
    return {"target": case.target, "k": made.k, **dataclasses.asdict(done)}


def compiled(args: argparse.Namespace, library: Path, stubs: Path, wanted: tuple[str, ...]) -> dict[str, Any]:
    """Result of one program; ``error`` where it did not compile. A compiler that dies does not end the run."""
    name, chip, part, kernels = wanted
    command = [
        sys.executable,
        "-m",
        "specjax.kernels.rocm_round",
        "--child",
        json.dumps([str(library), *wanted]),
    ]
    command += ["--rows", str(args.rows), "--prompt", str(args.prompt)]
    env = os.environ | {
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, (str(stubs), os.environ.get("LD_LIBRARY_PATH")))),
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "SPECJAX_KERNELS": kernels,
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    about = {"drafter": name, "chip": chip, "program": part, "kernels_setting": kernels}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return about | {"compiled": False, "error": f"not done after {SECONDS} s"}
    with contextlib.suppress(IndexError, ValueError):
        return about | {"compiled": True} | json.loads(done.stdout.splitlines()[-1])
    return about | {"compiled": False, "error": failure(done.stderr, done.returncode)}


def failure(text: str, code: int) -> str:
    """The line of a process's complaints that says most: the last error, or the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = next((x for x in reversed(lines) if "Error" in x or "F0000" in x or "Check failed" in x), "")
    return (said or (lines[-1] if lines else "no message"))[:600] + (
        f" (signal {-code})" if code < 0 else f" (exit status {code})"
    )


def line(result: dict[str, Any]) -> str:
    """One result for people."""
    head = (
        f"{result['chip']} {result['drafter']} ({result['program']}, kernels {result['kernels_setting']}): "
    )
    if not result["compiled"]:
        return head + f"FAILED: {result['error']}"
    ours = ", ".join(f"{name} x{n}" for name, n in result["pallas"].items()) or "none"
    library = ", ".join(f"{name} x{n}" for name, n in result["library"].items()) or "none"
    return head + (
        f"{result['kernels']} kernels, code {result['code_bytes'] / 2**20:.1f} MiB, temporary "
        f"{result['temporary_bytes'] / 2**20:.1f} MiB, {result['seconds_to_compile']:.0f} s; our kernels: {ours}; "
        f"library calls: {library}; {len(result['spilling'])} kernels spill"
    )


def facts(version: str) -> dict[str, Any]:
    """Date, commit and versions of a run."""
    ask = lambda *words: subprocess.run(  # noqa: E731
        ["git", "-C", str(Path(__file__).parent), *words], capture_output=True, text=True
    ).stdout.strip()
    changed = "+changes" if ask("status", "--short", "-uno") else ""
    packages = ("specjax", "jax", "jaxlib", "flax")
    return {
        "date": datetime.date.today().isoformat(),
        "commit": (ask("rev-parse", "--short", "HEAD") or "unknown") + changed,
        "versions": {"python": platform.python_version(), PACKAGE: version}
        | {p: metadata.version(p) for p in packages},
        "note": "compiled without an AMD GPU; nothing was run",
    }


def main(arguments: list[str] | None = None) -> int:
    """Compile what is asked for; the exit status is 1 if something does not compile, 2 if nothing could be tried."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--chips", default=",".join(CHIPS))
    parser.add_argument(
        "--only", default="", help="drafters, with commas between (default: all; 'plain' is none)"
    )
    parser.add_argument("--programs", default="decode", help="decode, prefill, or both with a comma")
    parser.add_argument(
        "--kernels", default="xla,auto", help="SPECJAX_KERNELS: xla, auto, pallas, or several"
    )
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of every prompt")
    parser.add_argument("--plugin", default="", help="release of jax-rocm7-pjrt (default: jaxlib's)")
    parser.add_argument("--cache", type=Path, default=None, help=f"where it is kept (default: {cache()})")
    parser.add_argument("--out", type=Path, default=None, help="JSON file for the results")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.child:
        library, *wanted = json.loads(args.child)
        print(json.dumps(child(Path(library), wanted[1], wanted[0], wanted[2], args.rows, args.prompt)))
        return 0
    return _all(args, args.plugin or release())


def _all(args: argparse.Namespace, version: str) -> int:
    from specjax.kernels.rocm_rounds import ROUNDS
    from specjax.kernels.rocm_stubs import build

    if problems := missing():
        print("cannot compile for AMD here:", *problems, sep="\n  ", file=sys.stderr)
        return 2
    split = lambda text: [x.strip() for x in text.split(";" if ";" in text else ",")]  # noqa: E731
    names = list(ROUNDS) if not args.only else split(args.only)
    if unknown := sorted(set(names) - set(ROUNDS)):
        print(f"unknown drafter(s) {unknown}; known: {'; '.join(ROUNDS)}", file=sys.stderr)
        return 2
    results = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            print(f"{PACKAGE} {version} in {args.cache or cache()}", flush=True)
            library = plugin(args.cache or cache(), version)
            made = build(library, Path(folder))
        except OSError as error:
            print(f"cannot compile for AMD here: {error}", file=sys.stderr)
            return 2
        print("stand-ins: " + ", ".join(f"{x.name} ({len(x.functions)})" for x in made), flush=True)
        for chip in split(args.chips):
            for name in names:
                for part in split(args.programs):
                    for kernels in split(args.kernels):
                        results.append(compiled(args, library, Path(folder), (name, chip, part, kernels)))
                        print(line(results[-1]), flush=True)
                        _write(args, version, results)
    failed = sum(not result["compiled"] for result in results)
    print(f"{len(results)} programs, {failed} failed")
    return int(failed > 0)


def _write(args: argparse.Namespace, version: str, results: list[dict[str, Any]]) -> None:
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        options = {"rows": args.rows, "prompt": args.prompt}
        args.out.write_text(
            json.dumps(facts(version) | {"options": options, "results": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    sys.exit(main())
