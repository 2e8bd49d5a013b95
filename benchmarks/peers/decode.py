"""Decoding beside other libraries, in one process and in turn: A B A B, same weights, same prompts, same tokens.

    python benchmarks/peers/decode.py --shape qwen3-8b --out FILE               # random weights made on the device
    python benchmarks/peers/decode.py --gguf SmolLM2.gguf --drafters ngram,smollm2-135m/eagle3 --out FILE
    python benchmarks/peers/decode.py --tiny                                    # whether it runs, on the CPU

Sides: specjax plain, with each drafter, and with a DFlash drafter of random weights; transformers with a static cache
and a compiled forward pass, its own ``generate`` with a static cache, and its prompt lookup; the dflash package as
published and with its two forward passes compiled; flashspec's prompt lookup. ``--sides`` picks some. Each is timed on
a short and on a long text of the same prompt: the difference is ``ms`` per round and per token, without prefill and
without what happens once. Of a side that fails the row is its error. Greedy; ids are compared with plain decoding's (in
bfloat16 they may part where two tokens are nearly equal).

Packages beside torch and transformers: ``dflash==0.1.0`` (26 kB) and ``flashspec==0.3.1`` (137 kB, needs pydantic),
both installed with ``--no-deps``.
"""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # two libraries share the device's memory
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks.steps_filler
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common
import decode_sides as peer
import jax.numpy as jnp
import numpy as np
import steps_run
from steps_shapes import SHAPES, method, tiny

import specjax
from specjax.types import Params

_BEGAN = time.perf_counter()


def say(*words: Any) -> None:
    """A line with the seconds since the start."""
    print(f"[{time.perf_counter() - _BEGAN:6.1f}]", *words, flush=True)


class Ours:
    """specjax.decode; without compilation."""

    def __init__(self, params: Params, length: int):
        self.params, self.length = params, length

    def __call__(self, ids: list[int], n: int) -> peer.Outcome:
        out = specjax.decode(
            self.params, ids, max_new_tokens=n, ignore_eos=True, max_len=self.length, chat_template=False
        )
        return out.tokens, out.stats.prefill_seconds + out.stats.decode_seconds, out.stats.rounds


def sides(args: argparse.Namespace, target: steps_run.Target | None) -> dict[str, Callable]:
    """Makers of every side, in the order they take turns."""
    plain = specjax.load(args.gguf, dtype=args.dtype) if target is None else target.params(method("plain"))
    length = args.context + args.long + 64
    found: dict[str, Callable] = {"specjax plain": lambda: Ours(plain, length)}
    for name in filter(None, args.drafters.split(",")):
        found[f"specjax {name}"] = lambda name=name: Ours(_with(args, plain, target, name), length)
    made: list[Any] = []

    def model() -> Any:
        if not made:
            made.append(peer.model(plain))
        return made[0]

    found["transformers static compiled"] = lambda: peer.Static(model(), length)
    found["transformers generate static"] = lambda: peer.Generate(model(), cache_implementation="static")
    found["transformers prompt lookup"] = lambda: peer.Generate(model(), prompt_lookup_num_tokens=10)
    for block in map(int, filter(None, args.blocks.split(","))):
        found[f"dflash package, block {block}"] = lambda b=block: peer.DFlash(model(), b, args.layers, False)
        found[f"dflash package compiled, block {block}"] = lambda b=block: peer.DFlash(
            model(), b, args.layers, True
        )
    found["flashspec prompt lookup"] = lambda: peer.FlashSpec(model(), 6, 1 << (length - 1).bit_length())
    if args.sides:
        words = args.sides.split(",")
        found = {name: make for name, make in found.items() if any(word in name for word in words)}
    return found


def _with(args: argparse.Namespace, plain: Params, target: steps_run.Target | None, name: str) -> Params:
    if target is not None:  # as steps.py names them: "dflash-7"
        return target.params(method(name))
    drafted = specjax.load(args.gguf, drafter=name, dtype=args.dtype)
    return drafted.replace(target=plain.target)


def measure(
    made: dict[str, Callable], prompts: list[list[int]], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Rows of every side and prompt."""
    took: dict[str, list] = {name: [] for name in made}
    ids: dict[str, list[list[int]]] = {name: [] for name in made}
    built, failed = {}, {}

    def fails(name: str, error: Exception) -> None:
        say("FAILED", name, traceback.format_exc()[-1500:])
        failed[name] = f"{type(error).__name__}: {error}"[:300]
        built.pop(name, None)

    for name, make in made.items():
        try:
            built[name] = make()
            for n in (args.short, args.long):
                built[name](prompts[0], n)  # compiles
            say(name, "is ready")
        except Exception as error:
            fails(name, error)
    for prompt in prompts:
        for repeat in range(args.repeats):
            for name in list(built):
                try:
                    short = built[name](prompt, args.short)
                    long = built[name](prompt, args.long)
                except Exception as error:
                    fails(name, error)
                    continue
                rounds, tokens = long[2] - short[2], len(long[0]) - len(short[0])
                seconds = long[1] - short[1]
                took[name].append(
                    (1e3 * seconds / max(rounds, 1), 1e3 * seconds / tokens, len(long[0]) / long[1])
                )
                if not repeat:
                    ids[name].append(long[0])
    rows: list[dict[str, Any]] = [{"side": name, "error": why} for name, why in failed.items()]
    plain = ids["specjax plain"] if "specjax plain" in built else None
    for name in built:
        row = {"side": name, "runs": len(took[name])}
        for i, what in enumerate(("ms_per_round", "ms_per_token", "tokens_per_second")):
            row[what] = statistics.median(x[i] for x in took[name])
        same = plain and [_common(a, b) for a, b in zip(ids[name], plain, strict=True)]
        row |= {"tokens": [len(x) for x in ids[name]], "same_as_plain": same}
        rows.append(row)
        say(
            f"{name:36} {row['ms_per_round']:9.3f} ms a round {row['ms_per_token']:9.3f} ms a token, same ids {same}"
        )
    return rows


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def widths(made: dict[str, Callable], prompt: list[int], args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of blocks of several widths in transformers, compiled."""
    found = {}
    if "transformers static compiled" in made and args.widths:
        static = made["transformers static compiled"]()
        for w in map(int, args.widths.split(",")):
            try:
                found[str(w)] = static.width(prompt, w, args.turns)
                say(f"transformers static compiled, {w} positions: {found[str(w)]:.3f} ms")
            except Exception:
                say("FAILED", w, traceback.format_exc()[-1500:])
    return found


def arguments() -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", help=f"of {','.join(SHAPES)} (dense ones)", default="qwen3-8b")
    parser.add_argument("--gguf", help="a real model instead: a file, or what specjax.load takes")
    parser.add_argument(
        "--drafters", help="of specjax; default: dflash-7,dflash-15, or ngram for a real model"
    )
    parser.add_argument("--sides", help="only those whose names contain one of these words")
    parser.add_argument(
        "--prompts", type=int, default=2, help="of a real model: of benchmarks/prompts/code_edit"
    )
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--short", type=int, default=16)
    parser.add_argument("--long", type=int, default=80)
    parser.add_argument("--blocks", default="8,16", help="of the dflash package")
    parser.add_argument("--layers", type=int, default=5, help="of DFlash drafters")
    parser.add_argument("--widths", default="1,8,16")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.drafters is None:
        args.drafters = "ngram" if args.gguf else "dflash-7,dflash-15"
    if args.gguf and args.blocks == "8,16":
        args.blocks = ""  # there is no DFlash drafter for the package to load
    if args.tiny:
        args.context, args.short, args.long, args.repeats, args.turns = 24, 3, 9, 1, 1
        args.blocks, args.layers, args.widths, args.dtype = "4", 2, "1,2", "float32"
        args.drafters = args.drafters.replace("dflash-7,dflash-15", "dflash-3")
    return args


def main() -> int:
    """1 if a side's ids are not plain decoding's in float32, or specjax itself failed."""
    args = arguments()
    target = None
    if not args.gguf:
        hf = SHAPES[args.shape]
        target = steps_run.Target(args.shape, tiny(hf) if args.tiny else hf, jnp.dtype(args.dtype))
        vocab = target.cfg.vocab_size
        prompts = [np.random.default_rng(0).integers(5, vocab - 5, args.context).tolist()]
    else:
        prompts = _prompts(args)
    made = sides(args, target)
    rows = measure(made, prompts, args)
    report = {"sides": rows, "widths_ms": widths(made, prompts[0], args)}
    common.write(args.out, args, report)
    print(json.dumps(report, indent=1))
    exact = args.dtype == "float32"
    timed = [row for row in rows if "error" not in row]
    wrong = [row["side"] for row in timed if exact and row["same_as_plain"] != row["tokens"]]
    if wrong:
        say("ids differ from plain decoding's:", wrong)
    return int(bool(wrong) or not any(row["side"] == "specjax plain" for row in timed))


def _prompts(args: argparse.Namespace) -> list[list[int]]:
    """Token ids of the first prompts of a file that comes with the benchmarks, through the chat template."""
    plain = specjax.load(args.gguf, dtype=args.dtype)
    tokenizer = specjax.checkpoints.tokenizer.get(plain.meta.tokenizer_id)
    lines = (Path(__file__).parents[1] / "prompts" / "code_edit.jsonl").read_text("utf-8").splitlines()
    turns = [json.loads(line)["turns"][0] for line in lines[: args.prompts]]
    ask = lambda text: tokenizer.chat([{"role": "user", "content": text}], add_generation_prompt=True)  # noqa: E731
    found = [list(map(int, ask(text))) for text in turns]
    args.context = max(map(len, found))
    return found


if __name__ == "__main__":
    sys.exit(main())
