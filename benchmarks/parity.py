"""Greedy ids of SmolLM2-135M-Instruct beside transformers: float32, same dequantised weights, 64 tokens.

    python benchmarks/parity.py [--tokens 64] [--out FILE]

Runs the 20 prompts of benchmarks/prompts/gsm_style.jsonl. Where the two differ, the float32 logit gap of
the two candidates is shown: anything above 2e-4 is a bug.
"""

import argparse
import json
import warnings
from pathlib import Path

import common
import torch
import transformers
from decode import Torch, prompts, torch_model

import specjax
from specjax.identity import NEAR_TIE


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    params = specjax.load("smollm2-135m", dtype="float32")
    tokenizer = specjax.checkpoints.tokenizer.get(params.meta.tokenizer_id)
    ids = [
        list(map(int, tokenizer.chat([{"role": "user", "content": p}], add_generation_prompt=True)))
        for p in prompts("gsm_style")
    ]
    ours = specjax.decode(params, ids, max_new_tokens=args.tokens, ignore_eos=True, rows=4).tokens
    peer, rows = Torch(torch_model(params)), []
    for i, (prompt, mine) in enumerate(zip(ids, ours, strict=True)):
        theirs = peer(prompt, args.tokens)[0]
        parted = common.difference(params, prompt, mine, theirs)
        rows.append({"prompt": i, "identical": parted is None, **(parted or {"position": None, "gap": None})})
        print(rows[-1], flush=True)
    wrong = [r for r in rows if not r["identical"] and r["gap"] > NEAR_TIE]
    print(f"{sum(r['identical'] for r in rows)} of {len(rows)} identical, {len(wrong)} beyond a near-tie")
    if args.out:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        args.out.write_text(
            json.dumps({"tokens": args.tokens, "versions": versions, "rows": rows}, indent=1) + "\n"
        )
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
