"""Acceptance as training measures it beside that of decoding, draft position by draft position (same texts).

    python benchmarks/trained_acceptance.py --target smollm2-135m --drafters mtp eagle3 dflash dspark assistant \
        --prompts FILE.jsonl [--limit 100] [--tokens 256] [--dtype bfloat16] [--k 7] [--out FILE]

Prompts are JSON lines with ``turns``, ``messages`` or ``prompt``. The target's greedy answers are decoded with each
drafter; the counters of that decoding stand beside those of :func:`specjax.train.evaluate.of_texts` on the same ids.
Prints one JSON line per drafter and file: ``decoding`` and ``training`` (share of the rounds that proposed draft i and
kept it, one entry per position), the largest difference in points, tau of either, and how many prompts agree to the
draft. Exit status 1 if any position differs by more than two points. In float32 the two agree up to near-ties; in
bfloat16 the two passes round differently.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import common

import specjax
from specjax.metrics import merge
from specjax.train import evaluate, rows

#: Points by which a position may differ.
ALLOWED = 2.0


def prompts(path: Path, limit: int) -> list[Any]:
    """The first user turn of every prompt, with what the file says before it."""
    found = []
    for where, row in rows.read(str(path), limit=limit):
        messages = rows.messages(where, row)
        first = next(i for i, m in enumerate(messages) if m["role"] == "user")
        found.append(messages[: first + 1] if first else messages[0]["content"])
    return found


def measure(params: Any, asked: list[Any], k: int | None, tokens: int, at_once: int) -> dict[str, Any]:
    """Both figures, and their differences."""
    began = time.perf_counter()
    more = {} if k is None else {"k": k}
    out = specjax.decode(params, asked, max_new_tokens=tokens, temperature=0.0, rows=at_once, **more)
    decoded = time.perf_counter()
    answered = [(one.prompt_tokens, one.tokens) for group in out.completions for one in group]
    trained = evaluate.of_texts(params, answered, k, budget=tokens, rows=at_once)
    decoding, training = out.total, merge(trained)
    one, other = decoding.accepted_per_position, training.accepted_per_position
    points = [100 * abs(a - b) for a, b in zip(one, other, strict=True)]
    stats = [one.stats for group in out.completions for one in group]
    same = [
        a.accepted_at == b.accepted_at and a.rounds == b.rounds for a, b in zip(stats, trained, strict=True)
    ]
    return {
        "prompts": len(answered),
        "tau": {"decoding": decoding.tau, "training": training.tau},
        "decoding": one,
        "training": other,
        "points": max(points, default=0.0),
        "equal": sum(same),
        "seconds": [decoded - began, time.perf_counter() - decoded],
    }


def main() -> int:
    """One line per drafter and file of prompts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True, help="as specjax.load takes it")
    parser.add_argument("--drafters", nargs="+", required=True, help="names or folders")
    parser.add_argument("--prompts", nargs="+", required=True, type=Path)
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--k", type=int)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rows", type=int, default=32, help="texts at once")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = []
    for drafter in args.drafters:
        params = specjax.load(args.target, drafter=drafter, dtype=args.dtype)
        for path in args.prompts:
            found = measure(params, prompts(path, args.limit), args.k, args.tokens, args.rows)
            results.append({"drafter": str(drafter), "file": path.stem} | found)
            print(json.dumps(results[-1]), flush=True)
            common.write(args.out, args, results)
    return int(any(result["points"] > ALLOWED for result in results))


if __name__ == "__main__":
    sys.exit(main())
