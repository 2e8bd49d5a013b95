"""Decode on a GPU: speed of plain and n-gram decoding of SmolLM2, identity of their ids, and of the CPU's.

    python benchmarks/gpu_smoke.py [--target FILE] [--dtypes bfloat16,float32] [--rows 1,8]

Prints one JSON line per configuration. For each dtype it says whether plain and speculative ids are equal
(first differences with their float32 logit gap); with ``--cpu`` also whether the CPU gives the same float32 ids.
"""

import argparse
import json
import time
from pathlib import Path

import jax

import specjax
import specjax.identity

HERE = Path(__file__).parent


def turns(name: str, n: int) -> list[str]:
    """First user turns of a prompt file."""
    lines = (HERE / "prompts" / f"{name}.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line)["turns"][0] for line in lines][:n]


def run(params, prompts, rows: int, options: dict) -> tuple[list, dict]:
    """Ids and figures of a warm run."""
    for _ in range(2):
        out = specjax.decode(params, prompts, rows=rows, **options)
    t = out.total
    each = [c.stats.prefill_seconds + c.stats.decode_seconds for g in out.completions for c in g]
    seconds = sum(each) if rows == 1 else t.prefill_seconds + t.decode_seconds
    return out.tokens, {
        "rows": rows,
        "drafter": params.meta.drafter or "plain",
        "tau": round(t.tau, 3),
        "tokens": t.new_tokens,
        "tokens_per_second": round(t.new_tokens / seconds, 1),
    }


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=4, help="of each set")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--rows", default="1,8")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    began = time.perf_counter()
    say = lambda **row: print(json.dumps({"at": round(time.perf_counter() - began), **row}), flush=True)  # noqa: E731
    print(specjax.doctor(), flush=True)
    prompts = turns("code_edit", args.prompts) + turns("gsm_style", args.prompts)
    options = {"max_new_tokens": args.tokens, "max_len": 512}
    for dtype in args.dtypes.split(","):
        spec = specjax.load(args.target, drafter="ngram", dtype=dtype)
        plain = specjax.identity.without_drafter(spec)
        for rows in map(int, args.rows.split(",")):
            a, figures = run(plain, prompts, rows, options)
            say(dtype=dtype, **figures)
            b, figures = run(spec, prompts, rows, options)
            say(dtype=dtype, **figures)
            say(dtype=dtype, rows=rows, identical=sum(x == y for x, y in zip(a, b, strict=True)), of=len(a))
        if a != b:
            print(specjax.audit(spec, prompts, rows=rows, **options), flush=True)
    if args.cpu:
        with jax.default_device(jax.devices("cpu")[0]):
            cpu = specjax.decode(
                specjax.load(args.target, dtype="float32"), prompts, rows=rows, **options
            ).tokens
        say(cpu_and_gpu_identical=sum(x == y for x, y in zip(a, cpu, strict=True)), of=len(cpu))


if __name__ == "__main__":
    main()
