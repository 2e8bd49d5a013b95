"""Tokens per second of `specjax train prepare`, by rows, rounds per chunk and width of a prefill pass.

    python benchmarks/answers.py --prompts FILE.jsonl [--target smollm2-135m] [--limit 4096] [--rows 1024]
        [--rounds 8,16] [--prefill-chunk 32,64,128] [--temperature 0] [--out FILE.json]

Every setting answers the same prompts into a folder of its own, which is deleted. Compilation is not counted.
"""

import argparse
import itertools
import tempfile
from pathlib import Path

import common

import specjax
from specjax.train import prompts, respond


def measure(
    params: specjax.Params, asked: prompts.Prompts, args: argparse.Namespace, setting: tuple[int, ...]
):
    """Figures of one setting."""
    rows, rounds, chunk = setting
    with tempfile.TemporaryDirectory() as folder:
        store = respond.prepare(
            params,
            asked,
            folder,
            max_new_tokens=args.max_new_tokens,
            max_prompt_tokens=args.max_prompt_tokens,
            temperature=args.temperature,
            rows=rows,
            rounds=rounds,
            prefill_chunk=chunk,
        )
    (run,) = store.meta[0]["runs"]
    ended = float(store.ended.mean())
    prefilled = int(len(store.ids) - store.trained.sum())
    told = {
        "rows": rows,
        "rounds": rounds,
        "prefill_chunk": chunk,
        "prompt_tokens": prefilled,
        "ended": ended,
    }
    return told | run | {"tokens_per_second": run["tokens"] / run["seconds"]}


def main() -> None:
    several = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", action="append", required=True)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--limit", type=int, default=4096, help="rows read of each file")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--max-prompt-tokens", type=int, default=192)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rows", type=several, default=[1024])
    parser.add_argument("--rounds", type=several, default=[8])
    parser.add_argument("--prefill-chunk", type=several, default=[64])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    params = specjax.load(args.target, dtype=args.dtype)
    asked = prompts.read([prompts.Source(path=path, limit=args.limit) for path in args.prompts])
    results = []
    for setting in itertools.product(args.rows, args.rounds, args.prefill_chunk):
        results.append(measure(params, asked, args, setting))
        print(results[-1], flush=True)
    common.write(args.out, args, results)


if __name__ == "__main__":
    main()
