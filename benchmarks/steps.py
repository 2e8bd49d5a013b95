"""Step times on real shapes: a plain step, c(w), drafter passes, whole rounds and the host's part.

    python benchmarks/steps.py --out benchmarks/results/<date>-<device>/steps.json [--seconds 420] [--profile dflash-7]
    python benchmarks/steps.py --tiny                   # tiny shapes, float32: whether it runs

Weights are random and made on the device; the programs are those that decode, but acceptance is forced (see
``steps_run.py``). Every time is a median over turns in which all methods of a group (a shape, a batch, a context) take
part one after the other; R is the time over that of a plain step of the same turns. ``model_ms`` is what the bytes that
have to be read take at the speed of a copy measured in the same run. c(w) verifies given drafts with no drafter; on
mixtures of experts it is measured for blocks of fewer different tokens as well, with the distinct experts they hit
(``experts_counted``; in other rows as many as tokens would hit that chose on their own).
``host_ms`` is what a round takes in the decoding loop beyond its device call.

Groups come in the order of the limits they decide. Results are written after every group; a file that is there is
continued: rows in it are not measured again (``--again`` does). ``--seconds`` starts no further group after that time.
``JAX_COMPILATION_CACHE_DIR`` keeps compiled programs between runs. ``--profile`` prints and keeps a table of kernels
of the methods named. ``--dry`` traces the programs and says what memory they take, on any machine.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks.steps_filler
sys.path.insert(0, str(Path(__file__).resolve().parent))

import common
import jax
import jax.numpy as jnp
import steps_model
import steps_profile
import steps_run
from steps_shapes import SHAPES, Method, method, tiny

from specjax import profiling_kernels

_BEGAN = time.perf_counter()


@dataclasses.dataclass(frozen=True)
class Group:
    """Methods that are measured in turn."""

    shape: str
    batch: int
    context: int
    methods: tuple[str, ...]
    ragged: bool = False  # rows from an eighth of the context up to it

    @property
    def name(self) -> str:
        return f"{self.shape}/b{self.batch}/{self.context}{'r' if self.ragged else ''}"


_FIRST = ("c8", "c16", "dflash-7", "dflash-15", "eagle3-3", "eagle3-5")
_SECOND = (
    "dspark-7",
    "mtp-3",
    "mtp32k-3",
    "ngram-7",
    "eagle3-7",
    "eagle3-1",
    "mtp-1",
    "mtp32k-1",
    "c2",
    "c4",
    "c32",
)
_WIDE = ("c8", "dflash-7", "eagle3-3")
_GEMMA = ("c6", "c8", "dflash-7", "assistant-5", "eagle3-5")
_MIXED = {
    "qwen3.6-35b-a3b": ("c8", "c16", "dflash-7", "mtp-3", "mtp32k-3"),
    "gemma-4-26b-a4b": _GEMMA,
    "gemma-4-31b": ("c8", "dflash-7", "eagle3-5"),
    "llama-3.1-8b": ("c8", "eagle3-3", "eagle3-5", "dflash-7"),
}


def default_groups() -> list[Group]:
    """What is measured when nothing is asked for, the hard limits first."""
    found = [Group("qwen3-8b", 1, 1024, _FIRST), Group("qwen3-8b", 1, 1024, _SECOND)]
    found += [
        Group("qwen3-8b", b, n, _WIDE) for b, n in ((8, 1024), (32, 1024), (8, 8192), (8, 2048), (32, 2048))
    ]
    found += [Group("smollm2-135m", 1, 1024, ("c8", "eagle3-3", "dflash-7", "dspark-7", "ngram-7"))]
    found += [Group(shape, 1, 1024, methods) for shape, methods in _MIXED.items()]
    found += [Group("qwen3-8b", 32, 8192, _WIDE, ragged=True)]
    found += [
        Group("qwen3-8b", b, n, _WIDE) for b, n in ((32, 8192), (8, 32768), (1, 8192), (1, 2048), (1, 32768))
    ]
    for shape in ("qwen3.6-35b-a3b", "gemma-4-26b-a4b", "llama-3.1-8b", "gemma-4-31b"):
        wide = ((8, 1024), (32, 1024), (8, 8192), (1, 8192), (32, 8192), (8, 32768))
        found += [Group(shape, b, n, ("c8", "dflash-7")) for b, n in wide]
    return found


def groups(args: argparse.Namespace) -> list[Group]:
    """What is measured, in order."""
    if not (args.shapes or args.methods or args.batches or args.contexts):
        return default_groups()
    shapes = args.shapes.split(",") if args.shapes else ["qwen3-8b"]
    methods = tuple(args.methods.split(",")) if args.methods else _FIRST
    sizes = lambda text, default: [int(x) for x in (text or default).split(",")]  # noqa: E731
    return [
        Group(shape, batch, context, methods, args.ragged)
        for shape in shapes
        for batch in sizes(args.batches, "1")
        for context in sizes(args.contexts, "1024")
    ]


def say(*words: Any) -> None:
    """A line with the seconds since the start."""
    print(f"[{time.perf_counter() - _BEGAN:6.1f}]", *words, flush=True)


class Book:
    """Rows by key, in a file that is continued."""

    def __init__(self, path: Path | None, args: argparse.Namespace):
        self.path, self.args, self.rows = path, args, {}
        if path is not None and path.is_file():
            self.rows = {row["key"]: row for row in json.loads(path.read_text())["results"]}
            say(f"{len(self.rows)} rows in {path} are kept")

    def lacks(self, key: str) -> bool:
        return self.args.again or key not in self.rows or "error" in self.rows[key]

    def add(self, row: dict[str, Any]) -> None:
        self.rows[row["key"]] = row

    def write(self) -> None:
        if self.path is None:
            return
        rows = list(self.rows.values())
        found = [x for row in rows if "error" not in row for x in steps_model.limits(row)]
        report = common.facts(self.args) | {
            "results": rows,
            "limits": [dataclasses.asdict(x) | {"held": x.held} for x in found],
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".part")
        temporary.write_text(json.dumps(report, indent=1) + "\n")
        temporary.replace(self.path)


def key(group: Group, how: str) -> str:
    return f"{group.name}/{how}"


def run_group(
    target: steps_run.Target, group: Group, wanted: list[str], book: Book, args: argparse.Namespace
) -> None:
    """Measure the methods of a group, a plain step among them."""
    made: dict[str, Any] = {}
    for name in ("plain", *wanted):
        try:
            made[name] = steps_run.Contender(
                target, method(name), group.batch, group.context, args.room, group.ragged
            )
        except ValueError as error:
            _failed(book, group, name, error)
    made, passes, counts = _compiled(made, group, book, args)
    say(group.name, "is compiled:", ", ".join(made))
    if "plain" not in made:
        return
    ms: dict[str, list[float]] = {name: [] for name in made}
    slopes, drafts = {name: [] for name in made}, {name: [] for name in passes}
    copy = steps_run.bandwidth(args.copy)
    turns = args.repeats
    for _ in range(turns):
        for name in list(made):
            try:
                took, slope = made[name].time(args.calls)
                ms[name].append(took)
                slopes[name].append(slope)
                if name in passes:
                    drafts[name].append(passes[name].time())
            except Exception as error:
                _failed(book, group, name, error)
                made.pop(name)
                passes.pop(name, None)
    copy = statistics.median([copy, steps_run.bandwidth(args.copy)])
    for name, contender in made.items():
        hit = _hit(counts[name]) if name in counts else None
        row = _row(group, name, contender, ms[name], statistics.median(ms["plain"]), copy, hit)
        row["slope_ms"] = statistics.median(slopes[name])
        if drafts.get(name):
            row["draft_ms"] = statistics.median(drafts[name])
        if group.batch == 1 or name == "plain":
            row["host_ms"] = statistics.median(contender.driven() for _ in range(2)) - row["ms"]
            row["tau_seen"] = contender.tau
        if contender.how.name == "c" and hit:
            row["by_distinct"] = _by_distinct(contender, hit, copy, args)
        if name in args.profile.split(","):
            row["kernels"] = steps_profile.profile(contender)
            print(profiling_kernels.table(row["kernels"], row["ms"]), flush=True)
        book.add(row)
        say(_told(row))
        for limit in steps_model.limits(row):
            say("   ", limit)
    book.write()


def dry(group: Group, args: argparse.Namespace) -> None:
    """Trace the programs of a group and say what memory they take."""
    hf = SHAPES[group.shape]
    target = steps_run.Target(
        group.shape, tiny(hf) if args.tiny else hf, jnp.dtype(args.dtype), shapes_only=True
    )
    for name in ("plain", *group.methods):
        contender = steps_run.Contender(
            target, method(name), group.batch, group.context, args.room, group.ragged
        )
        sizes = contender.bytes()
        gib = [f"{x / 2**30:.2f}" for x in (*sizes, sum(sizes))]
        say(key(group, name), "weights {}, state {}, a round {}: {} GiB".format(*gib))


def _compiled(
    made: dict[str, Any], group: Group, book: Book, args: argparse.Namespace
) -> tuple[dict, dict, dict]:
    """What could be compiled, the drafting passes of those that have a drafter, and counts of experts."""
    passes, counts = {}, {}
    for name, contender in made.items():
        mixed = getattr(contender.program.pair.target_cfg, "experts", 0)
        if contender.engine.weights[1] is not None and not args.no_draft:
            passes[name] = steps_run.DraftPass(contender)
        if contender.how.name in ("plain", "c") and mixed:
            counts[name] = steps_run.ExpertCount(contender)
    jobs = [(name, part) for part in (made, passes, counts) for name in part]

    def one(job):
        name, part = job
        try:
            part[name].compile()
        except Exception as error:
            return error
        return None

    workers = 1 if jax.default_backend() == "cpu" else 14
    with ThreadPoolExecutor(workers) as pool:
        errors = list(pool.map(one, jobs))
    for (name, part), error in zip(jobs, errors, strict=True):
        if error is not None:
            if part is made:
                _failed(book, group, name, error)
            part.pop(name)
    return made, {name: x for name, x in passes.items() if name in made}, counts


def _hit(count: steps_run.ExpertCount) -> dict[int, float]:
    """Distinct experts by number of different tokens in a block."""
    width = count.contender.how.k + 1
    return {d: count(d) for d in sorted({d for d in (1, 2, 4, 8, width) if d <= width})}


def _row(
    group: Group, name: str, contender, ms: list[float], plain: float, copy: float, hit
) -> dict[str, Any]:
    how: Method = contender.how
    most = None if hit is None else hit[how.k + 1]
    if most is None and getattr(contender.program.pair.target_cfg, "experts", 0):
        most = _independent(contender)
    size = steps_model.round_bytes(contender, most)
    quarters = statistics.quantiles(ms, n=4) if len(ms) > 1 else [ms[0]] * 3
    tau = steps_run.forced_tau(how.k) if how.name not in ("plain", "c") else None
    speed = None if tau is None else 1e3 * group.batch * tau / statistics.median(ms)
    return {
        "key": key(group, name), "shape": group.shape, "batch": group.batch, "context": group.context,
        "ragged": group.ragged,
        "method": how.name, "k": how.k, "ms": statistics.median(ms), "quartiles": [quarters[0], quarters[2]],
        "runs": len(ms), "plain_ms": plain, "R": statistics.median(ms) / plain, "bytes": dataclasses.asdict(size),
        "model_ms": 1e3 * size.total / copy, "copy_bytes_per_second": copy, "distinct_experts": most,
        "experts_counted": hit is not None,
        "forced_tau": tau, "tokens_per_second": speed,
        "dtype": contender.program.dtype, "commit": common.commit(),
    }  # fmt: skip


def _independent(contender) -> float:
    """Distinct experts of a layer if every token of every row chose on its own."""
    cfg, tokens = contender.program.pair.target_cfg, contender.batch * (contender.how.k + 1)
    return cfg.experts * (1 - (1 - cfg.experts_per_token / cfg.experts) ** tokens)


def _by_distinct(contender, hit: dict[int, float], copy: float, args) -> list[dict[str, Any]]:
    """Times of the same verification over blocks with fewer different tokens."""
    rows = []
    for distinct, experts in hit.items():
        took = [contender.time(args.calls, distinct)[0] for _ in range(3)]
        size = steps_model.round_bytes(contender, experts)
        rows.append({"tokens": distinct, "experts": experts, "expert_bytes": size.experts,
                     "ms": statistics.median(took), "model_ms": 1e3 * size.total / copy})  # fmt: skip
    return rows


def _told(row: dict[str, Any]) -> str:
    more = "".join(
        f", {label} {row[name]:.3f}"
        for name, label in (
            ("draft_ms", "drafting"),
            ("host_ms", "host"),
            ("distinct_experts", "experts hit"),
        )
        if row.get(name) is not None
    )
    return (
        f"{row['key']}: {row['ms']:.3f} ms (device {row['slope_ms']:.3f}), R {row['R']:.3f}, model "
        f"{row['model_ms']:.3f} ms ({row['ms'] / row['model_ms']:.2f}x){more}"
    )


def _failed(book: Book, group: Group, name: str, error: Exception) -> None:
    text = "".join(traceback.format_exception(error))[-2000:]
    book.add({"key": key(group, name), "error": text})
    say("FAILED", key(group, name), f"{type(error).__name__}: {str(error)[:300]}")


def arguments() -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", help=f"of {','.join(SHAPES)}")
    parser.add_argument(
        "--methods", help="plain, c8, c16, dflash-7, dspark-7, eagle3-3, mtp-3, mtp32k-3, ngram-7 ..."
    )
    parser.add_argument("--batches")
    parser.add_argument("--contexts")
    parser.add_argument("--ragged", action="store_true", help="rows from an eighth of the context up to it")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no group after this time")
    parser.add_argument("--groups", type=int, default=10**6, help="at most so many groups")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--calls", type=int, default=2, help="device calls per turn")
    parser.add_argument("--profile", default="", help="methods whose kernels are told")
    parser.add_argument("--no-draft", action="store_true", help="leave drafting passes out: fewer programs")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--again", action="store_true", help="measure what the file has as well")
    parser.add_argument(
        "--dry", action="store_true", help="trace everything and tell its memory, run nothing"
    )
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.room, args.copy = steps_run.ROOM, 1 << 29
    if args.tiny:
        args.dtype, args.copy, args.repeats, args.calls, args.room = "float32", 1 << 16, 2, 1, 320
    return args


def main() -> int:
    """Groups one after the other; 1 if a hard limit is missed or a method failed."""
    args = arguments()
    from specjax.core.platform import enable_compilation_cache

    enable_compilation_cache()
    steps_run.force()
    book, target = Book(args.out, args), None
    for done, group in enumerate(groups(args)):
        if done >= args.groups or time.perf_counter() - _BEGAN > args.seconds:
            say("stopped before", key(group, "..."))
            break
        if args.dry:
            dry(group, args)
            continue
        wanted = [name for name in group.methods if name != "plain" and book.lacks(key(group, name))]
        if not wanted and not book.lacks(key(group, "plain")):
            continue
        if target is None or target.name != group.shape:
            target = None  # the one before is let go first
            hf = SHAPES[group.shape]
            target = steps_run.Target(group.shape, tiny(hf) if args.tiny else hf, jnp.dtype(args.dtype))
            say(group.shape, "weights are made on", jax.devices()[0].device_kind)
        try:
            run_group(target, group, wanted, book, args)
        except Exception as error:
            _failed(book, group, "plain", error)
    book.write()
    rows = list(book.rows.values())
    found = [x for row in rows if "error" not in row for x in steps_model.limits(row)]
    print(*sorted(map(str, found)), sep="\n")
    return int(any(x.hard and not x.held for x in found) or any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
