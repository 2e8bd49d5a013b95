"""Products of few rows with the weights of real models, heads and DSpark's walk: kernels beside XLA, on a GPU.

    python benchmarks/rows.py --out FILE [--only qwen3-8b|gemma-26b|gemma-31b|walk] [--budget 280] [--tiny]

Contenders take turns and caches are emptied as in ``benchmarks/kernels.py``. ``floor`` is the time to read the weights
once at 4.3 TB/s, the copy bandwidth of an H200; ``share`` is floor over the kernel's time. ``step`` adds up a whole
plain step or verified block of a model, attention and small fusions left out: kernels as the library calls them (heads
and gated blocks in one launch each, with their norms), XLA as it would compile the same products. The very first thing
is a check of every size against float64 on the host. Results are kept as in ``benchmarks/kernels.py``.
"""

import argparse
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from device_time import Clock, compile_all
from kernels import BANDWIDTH, Save, contest, distance, uniform

from specjax.core import platform
from specjax.drafters.markov import Markov, Settings as Head, _walk
from specjax.kernels import configs, head, head_kernel, markov, markov_kernel, skinny, skinny_kernel
from specjax.layers.head import Cap, _reference as plain_best
from specjax.layers.linear import Settings, _reference as plain_products

NORM = (1e-6, False)
#: Name -> (layers, width, rows of queries, of keys or values, of a gate, of the head). Gemma 26B: what every token
#: passes, without experts.
MODELS = {
    "qwen3-8b": (36, 4096, 4096, 1024, 12288, 151936),
    "gemma-26b": (30, 2816, 4096, 2048, 2112, 262144),
    "gemma-31b": (60, 5376, 8192, 4096, 21504, 262144),
}
ROWS = (1, 8, 16)
WALKS = {"walk rank 256": (151936, 256, 7), "walk rank 64": (32000, 64, 7)}


def interpret() -> bool:
    return platform.backend() not in ("cuda", "rocm")


def first(build, choices):
    """The first grid that compiles, as the library takes it; elsewhere than on a GPU the first."""
    return choices[0] if interpret() else next(c for c in choices if _compiles(build, c))


def _compiles(build, choice) -> bool:
    try:
        build(choice)
    except Exception as error:
        print(f"{choice}: {error}"[:200], flush=True)
        return False
    return True


def products(model: str, rows: int) -> dict:
    """Name -> (kernel, XLA, shapes, bytes, how often in a step)."""
    layers, width, queries, keys, gate, vocab = MODELS[model]
    jobs, dtype = {}, jnp.dtype(jnp.bfloat16)
    s = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    for name, outs, inner, settings in (
        ("heads", (queries, keys, keys), width, Settings(None, NORM)),
        ("output", (width,), queries, Settings()),
        ("gated", (gate, gate), width, Settings(None, NORM, jax.nn.silu)),
        ("down", (width,), gate, Settings()),
    ):
        tables = tuple(s(n, inner) for n in outs)
        case = skinny.case(s(rows, inner), tables, settings)
        plan = first(functools.partial(skinny.compile_plan, case), skinny.plans(case, configs.kind()))
        run = functools.partial(skinny_kernel.launch, case=case, plan=plan, interpret=interpret())
        plain = functools.partial(plain_products, count=len(tables), settings=settings)
        norm = (s(inner),) if settings.norm else ()
        jobs[name] = run, plain, (s(rows, inner), *tables, *norm), 2 * sum(outs) * inner, layers
    case = head.case(s(rows, width), s(vocab, width), Cap(), False)
    tiles = list(configs.head(configs.kind(), 2))
    tile = first(functools.partial(head.compile_tile, case), tiles)
    run = functools.partial(head_kernel.launch, case=case, tile=tile, interpret=interpret())
    plain = functools.partial(plain_best, cap=Cap(), lse=False)
    jobs["head"] = run, plain, (s(rows, width), s(vocab, width)), 2 * vocab * width, 1
    return jobs


def arrays_of(shapes) -> tuple:
    """Rows of about one, weights that keep it so."""
    made = []
    for i, shape in enumerate(shapes):
        x = uniform(int(np.prod(shape.shape)), i + 1).reshape(shape.shape)
        made.append(x * jnp.asarray(shape.shape[-1] ** -0.5, x.dtype) if i and x.ndim == 2 else x)
    return tuple(made)


def check(args) -> dict:
    """Relative errors of small sizes against float64; rows alone and among others must agree to the last bit."""
    wide, errors = lambda x: np.asarray(jnp.asarray(x, jnp.float32), np.float64), {}
    for dtype in (jnp.bfloat16, jnp.float32):
        for outs, settings in (
            ((512, 128, 128), Settings(None, NORM)),
            ((768, 768), Settings(None, NORM, jax.nn.silu)),
        ):
            x, norm = (
                uniform(64 * 1024, 1).reshape(64, 1024).astype(dtype),
                1 + uniform(1024, 2).astype(dtype) / 8,
            )
            tables = tuple(uniform(n * 1024, n).reshape(n, 1024).astype(dtype) / 32 for n in outs)
            alone = None
            for rows in (1, 8, 17, 64):
                case = skinny.case(x[:rows], tables, settings)
                plan = first(functools.partial(skinny.compile_plan, case), skinny.plans(case, configs.kind()))
                run = functools.partial(skinny_kernel.launch, case=case, plan=plan, interpret=interpret())
                got = [wide(y) for y in jax.jit(run)(x[:rows], *tables, norm)]
                h = wide(x[:rows])
                h = h / np.sqrt((h**2).mean(-1, keepdims=True) + NORM[0]) * wide(norm)
                want = [h @ wide(w).T for w in tables]
                want = want if settings.activation is None else [want[0] / (1 + np.exp(-want[0])) * want[1]]
                key = f"{jnp.dtype(dtype).name} {len(outs)} weights {rows} rows"
                errors[key] = max(distance(a, b) for a, b in zip(got, want, strict=True))
                alone = alone or [y[0] for y in got]
                if not all((a == y[0]).all() for a, y in zip(alone, got, strict=True)):
                    raise SystemExit(f"{key}: a row is not what it is alone")
                if not errors[key] < (1e-2 if dtype == jnp.bfloat16 else 1e-5):
                    raise SystemExit(f"{key}: relative error {errors[key]}")
    print("largest relative error", max(errors.values()), "rows are independent", flush=True)
    return errors


def model_rows(model: str, clock, args, save) -> None:
    """Every product of a model, and their sum over a step."""
    for rows in ROWS:
        name = f"{model} rows {rows}"
        if not save.missing(name) or save.late():
            continue
        jobs, found = products(model, rows), {}
        pairs = {
            (n, who): (job[i], job[2]) for n, job in jobs.items() for i, who in enumerate(("pallas", "xla"))
        }
        programs = compile_all(pairs)
        for part, (_, _, shapes, read, _) in jobs.items():
            arrays = arrays_of(shapes)
            calls = {who: (programs[part, who], arrays) for who in ("pallas", "xla")}
            found[part] = {"floor": 1e6 * read / BANDWIDTH} | contest(calls, clock, args)
            took = found[part]["microseconds"].get("pallas")
            found[part]["share"] = took and found[part]["floor"] / took
            print(
                f"  {part}",
                {k: v for k, v in found[part].items() if k in ("floor", "share", "microseconds")},
                flush=True,
            )
        total = lambda of: sum(of(found[part]) * job[4] for part, job in jobs.items())  # noqa: E731, B023
        step = {
            who: total(lambda row, who=who: row["microseconds"].get(who, float("nan")))
            for who in ("pallas", "xla")
        }
        save(name, {"floor": total(lambda row: row["floor"]), "microseconds": step, "parts": found})


def walks(clock, args, save) -> None:
    """DSpark's walk."""
    for name, (vocab, rank, drafts) in WALKS.items():
        if not save.missing(name) or save.late():
            continue
        case = markov_kernel.Case(1, drafts, rank, vocab, vocab, vocab, jnp.dtype(jnp.bfloat16), False)
        plan = first(functools.partial(markov.compile_plan, case), markov.plans(case, configs.kind()))
        run = functools.partial(markov_kernel.launch, case=case, plan=plan, interpret=interpret())
        settings = Head(rank, "vanilla", vocab)

        def plain(before, after, logits, anchor, settings=settings):
            p, unread = Markov(before, after, None, None), jnp.zeros((*logits.shape[:2], 1), before.dtype)
            return _walk(p, settings, unread, logits, anchor, None, None, None)[0]

        programs = compile_all(
            {who: (f, markov.shapes(case)) for who, f in (("pallas", run), ("xla", plain))}
        )
        tables = (uniform(vocab * rank, i).reshape(vocab, rank) for i in (1, 2))
        logits = 4 * uniform(drafts * vocab, 3).reshape(1, drafts, vocab).astype(jnp.float32)
        arrays = *tables, logits, jnp.asarray([5], jnp.int32)
        same = bool((programs["pallas"](*arrays) == programs["xla"](*arrays)).all())
        read = drafts * (2 * vocab * rank + 4 * vocab)
        row = {"same tokens": same, "floor": 1e6 * read / BANDWIDTH}
        save(name, row | contest({who: (p, arrays) for who, p in programs.items()}, clock, args))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", choices=[*MODELS, "walk", "check"])
    parser.add_argument("--budget", type=float, default=280, help="seconds after which no new size is begun")
    parser.add_argument("--runs", type=int, default=5, help="of each contender at a time")
    parser.add_argument("--rounds", type=int, default=2, help="how often contenders take turns")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if args.tiny:
        MODELS.update(dict.fromkeys(MODELS, (2, 64, 64, 32, 96, 256)))
        WALKS.update(dict.fromkeys(WALKS, (256, 16, 2)))
    save = Save(args)
    if save.missing("check"):
        save("check", {"errors": check(args)})
    clock = Clock(1 << 12 if args.tiny else 1 << 27)
    for model in MODELS:
        if args.only in (None, model):
            model_rows(model, clock, args, save)
    if args.only in (None, "walk"):
        walks(clock, args, save)


if __name__ == "__main__":
    main()
