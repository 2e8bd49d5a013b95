"""``python -m specjax.selftest`` (``specjax selftest``): does specjax work on this machine?

Every kernel runs on random, ragged inputs whose unseen parts are not-a-number and is compared with float64, and at
shapes of real models, where it is compiled for the device, timed beside XLA; every drafter decodes on a tiny model and
must give plain decoding's ids. What comes out is made to be pasted into an issue. On a CPU kernels run in Pallas'
interpreter, on small shapes.
"""

import argparse
import contextlib
import dataclasses
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from specjax import calls, generate, identity, registry, testing
from specjax.bench.ahead import programs_of, threads
from specjax.config import prefill_bucket
from specjax.core import doctor, platform
from specjax.kernels import check, check_cases
from specjax.kernels.building import told
from specjax.types import Params

UNSEEN = (
    "specjax was developed without an AMD GPU: its kernels and programs were compiled for MI300X and MI355X and run on "
    "NVIDIA and CPU, never on AMD. This report is how we learn whether they run there; please put it into an issue."
)
#: What to expect, by whether shapes are reduced.
LASTS = {
    False: "This takes some minutes, mostly compiling; a line per kernel and drafter.",
    True: "This takes one to three minutes, mostly compiling; a line per kernel and drafter.",
}
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]]
NEW = 16
#: What the tiny model says after ``PROMPTS``, in float32 on a CPU. Its weights are NumPy's, the same everywhere.
IDS = [
    [46, 10, 46, 10, 28, 2, 3, 3, 6, 10, 45, 47, 36, 33, 3, 22],
    [42, 7, 41, 5, 7, 13, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5],
    [3, 33, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 39, 48, 33, 62],
]
#: bfloat16 may part where two tokens are this close, in float32 logits whose deviation is 16.
CLOSE = 1.0


@dataclasses.dataclass(frozen=True)
class Decoded:
    """One drafter on the tiny model: ``changed`` of ``prompts`` texts differ from plain decoding's, at most by ``gap``
    (float32 logits) where they part. ``tau``: tokens per round."""

    drafter: str
    dtype: str
    prompts: int = 0
    changed: int = 0
    gap: float = 0.0
    tau: float = 0.0
    seconds: float = 0.0
    problem: str = ""

    @property
    def passed(self) -> bool:
        return not self.problem

    def __str__(self) -> str:
        if self.problem:
            return f"FAILED: {self.problem}"
        same = "the same ids" if not self.changed else f"{self.changed} differ, gap {self.gap:.2g}"
        return f"{self.prompts} prompts, {same} as plain decoding, tau {self.tau:.2f}, {self.seconds:.1f} s"


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything that was found. ``finished``: False while the test runs, and in a file that a crash left behind."""

    machine: doctor.Doctor
    reduced: bool
    kernels: tuple[check.Outcome, ...] = ()
    decoded: tuple[Decoded, ...] = ()
    seconds: float = 0.0
    finished: bool = False

    @property
    def failures(self) -> list[str]:
        """Names of what went wrong."""
        found = [f"kernel {x.op}, {x.case}" for x in self.kernels if not x.passed]
        return found + [f"decoding with {x.drafter}, {x.dtype}" for x in self.decoded if not x.passed]

    @property
    def passed(self) -> bool:
        return self.finished and not self.failures

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for ``json.dumps``."""
        return dataclasses.asdict(self) | {
            "machine": self.machine.to_dict(),
            "passed": self.passed,
            "failures": self.failures,
            "note": UNSEEN,
        }

    def __str__(self) -> str:
        many = f"{len(self.kernels)} cases of kernels, {len(self.decoded)} decodes, {self.seconds:.0f} s"
        if self.reduced:
            many += ", small shapes only"
        if not self.failures:
            return f"passed: {many}"
        return "\n".join([f"FAILED: {len(self.failures)} of {many}", *(f"  {x}" for x in self.failures)])


def run(
    reduced: bool | None = None,
    say: Callable[[str], None] = lambda text: None,
    keep: Callable[[Report], None] = lambda report: None,
) -> Report:
    """The whole test. ``reduced``: small shapes only (None: on a CPU). ``say`` gets every line of text as soon as it is
    known and ``keep`` the report so far: a fault of the device may end the process."""
    began = time.monotonic()
    gpu = platform.backend() in ("cuda", "rocm")
    reduced = not gpu if reduced is None else reduced
    report = Report(doctor.doctor(), reduced)
    say(f"{report.machine}\n\n{UNSEEN}\n\n{LASTS[reduced]}\n\nkernels, relative errors against float64:")

    def add(**changes: Any) -> None:
        nonlocal report
        report = dataclasses.replace(report, seconds=time.monotonic() - began, **changes)
        keep(report)

    for outcome in kernels(gpu, reduced):
        add(kernels=(*report.kernels, outcome))
        say(f"  {outcome.op}, {outcome.case}: {outcome}")
    say(f"\ndecoding with every drafter, {NEW} tokens of a tiny random model:")
    # a chain's parts run alone as well
    names = [name for name in registry.DRAFTERS if not (reduced and name == "chain")]
    for one in decoded("float32", 2 if reduced else 3, names):
        add(decoded=(*report.decoded, one))
        say(f"  {one.drafter}, {one.dtype}: {one}")
    for one in decoded("bfloat16", 3, names) if gpu else ():
        add(decoded=(*report.decoded, one))
        say(f"  {one.drafter}, {one.dtype}: {one}")
    add(finished=True)
    say(f"\n{report}")
    return report


def kernels(gpu: bool, reduced: bool) -> Iterator[check.Outcome]:
    """Every case; operations whose kernel cannot serve this device at all are told once."""
    small = check_cases.small()
    for i, case in enumerate(small + ([] if reduced else check_cases.real())):
        want, reason = check.way(case.op)
        if want:
            # what small cases take is the launch
            yield check.run(case, want, timed=gpu and i >= len(small))
        else:
            yield check.Outcome(case.op, case.name, skipped=reason)


def decoded(dtype: str, prompts: int, names: Iterable[str]) -> Iterator[Decoded]:
    """Plain decoding against what a CPU gave (float32), then every drafter against plain decoding."""
    target, given = _target(dtype), PROMPTS[:prompts]
    options = {"max_new_tokens": NEW, "rows": prompts, "ignore_eos": True, "verbose": False}
    began, plain = time.monotonic(), None
    try:
        plain = generate.decode(target, given, **options)
        wrong = dtype == "float32" and plain.tokens != IDS[:prompts]
        problem = f"{plain.tokens} instead of a CPU's ids {IDS[:prompts]}" if wrong else ""
        seconds = time.monotonic() - began
        yield Decoded("none", dtype, prompts, int(wrong), tau=1.0, seconds=seconds, problem=problem)
    except Exception as error:  # of any compiler or device: told, and the drafters are tried all the same
        yield Decoded("none", dtype, problem=told(error))
    made: dict[str, Params | Exception] = {}
    for name in names:
        try:
            made[name] = _cast(testing.tiny_drafter(target, name), dtype)
        except Exception as error:
            made[name] = error
    if platform.backend() != "cpu":
        compile_ahead([params for params in made.values() if isinstance(params, Params)], given, options)
    for name, params in made.items():
        try:
            if isinstance(params, Exception):
                raise params
            yield _with_drafter(params, name, dtype, given, plain, options)
        except Exception as error:
            yield Decoded(name, dtype, problem=told(error))


def compile_ahead(several: Iterable[Params], given: list[list[int]], options: dict[str, Any]) -> None:
    """Compile what decoding with several drafters runs, side by side: nothing of it runs yet. What cannot be compiled
    says so when it is to run."""

    def compiled(job: Callable[[], Any]) -> None:
        with contextlib.suppress(Exception):
            job()

    jobs: list[Callable[[], Any]] = []
    for params in several:
        with contextlib.suppress(Exception):
            call = calls.plan(params, given, **options)
            jobs += programs_of(
                call, [prefill_bucket(max(map(len, given)), call.drive.prefill_chunk)]
            ).values()
    with ThreadPoolExecutor(threads(), "specjax-compile") as pool:
        list(pool.map(compiled, jobs))


def _with_drafter(params: Params, name: str, dtype: str, given, plain, options) -> Decoded:
    began = time.monotonic()
    if plain is None:
        raise RuntimeError("plain decoding failed: there is nothing to compare with")
    out = generate.decode(params, given, **options)
    pairs = zip(plain.completions, out.completions, strict=True)
    rows = [identity.compare(params, i, a[0], b[0]) for i, (a, b) in enumerate(pairs)]
    changed = [row for row in rows if not row.identical]
    gap = max((float("inf") if row.gap is None else row.gap for row in changed), default=0.0)
    found = Decoded(name, dtype, len(rows), len(changed), gap, out.total.tau, time.monotonic() - began)
    if changed and (dtype == "float32" or not gap < CLOSE):
        return dataclasses.replace(found, problem=f"{len(changed)} of {len(rows)} texts differ; {changed[0]}")
    return found


def _target(dtype: str) -> Params:
    """Heads of 16 channels are the smallest that kernels take."""
    return _cast(testing.tiny_params(0, layers=1, head_dim=16), dtype)


def _cast(params: Params, dtype: str) -> Params:
    wide = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
    return jax.tree.map(lambda x: x.astype(dtype) if wide(x) else x, params)


def write(path: Path, report: Report) -> None:
    """The report as one JSON file."""
    path.write_text(json.dumps(report.to_dict(), indent=1) + "\n")


def start(path: Path | None, quick: bool = False, say: Callable[[str], None] = print) -> int:
    """Run, say what is found, keep it in ``path``; the exit status is 0 if all is well and 1 if not."""
    keep = (lambda report: write(path, report)) if path else (lambda report: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they say is part of the report
        report = run(True if quick else None, say, keep)
    if path:
        say(f"written to {path}")
    return int(not report.passed)


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--json", type=Path, default=None, metavar="FILE", help="keep the report as JSON, too"
    )
    parser.add_argument("--quick", action="store_true", help="small shapes only, no times")
    args = parser.parse_args(arguments)
    return start(args.json, args.quick, lambda text: print(text, flush=True))


if __name__ == "__main__":
    sys.exit(main())
