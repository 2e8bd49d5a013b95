"""Decode on a GPU: speed of plain and n-gram decoding of SmolLM2, audit in bfloat16 and float32.

    python benchmarks/gpu_smoke.py [--target FILE]

Prints one JSON line per configuration. Also says whether float32 ids on the GPU equal the CPU's.
"""

import argparse
import json
from pathlib import Path

import jax

import specjax

HERE = Path(__file__).parent


def turns(name: str, n: int) -> list[str]:
    """First user turns of a prompt file."""
    lines = (HERE / "prompts" / f"{name}.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line)["turns"][0] for line in lines][:n]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    print(specjax.doctor())
    prompts = turns("code_edit", 4) + turns("gsm_style", 4)
    options = {"max_new_tokens": args.tokens, "max_len": 512}
    for dtype in ("bfloat16", "float32"):
        params = specjax.load(args.target, drafter="ngram", dtype=dtype)
        plain = specjax.load(args.target, dtype=dtype)
        for rows in (1, 8):
            for name, p in (("plain", plain), ("ngram", params)):
                for _ in range(2):  # the second run is warm
                    out = specjax.decode(p, prompts, rows=rows, **options)
                t = out.total
                seconds = sum(
                    c.stats.prefill_seconds + c.stats.decode_seconds for g in out.completions for c in g
                )
                seconds = seconds if rows == 1 else t.prefill_seconds + t.decode_seconds
                print(json.dumps({"dtype": dtype, "rows": rows, "drafter": name, "tau": round(t.tau, 3),
                                  "tokens": t.new_tokens, "tokens_per_second": round(t.new_tokens / seconds, 1),
                                  "ms_per_round": round(1e3 * seconds * rows / max(t.rounds, 1), 3),
                                  "compile_seconds": round(t.compile_seconds, 1)}), flush=True)  # fmt: skip
        print(specjax.audit(params, prompts, rows=8, **options))
    gpu = specjax.decode(plain, prompts, rows=8, **options).tokens
    with jax.default_device(jax.devices("cpu")[0]):
        cpu = specjax.decode(specjax.load(args.target, dtype="float32"), prompts, rows=8, **options).tokens
    print("float32 ids, GPU against CPU:", sum(a == b for a, b in zip(gpu, cpu, strict=True)), "of", len(cpu))


if __name__ == "__main__":
    main()
