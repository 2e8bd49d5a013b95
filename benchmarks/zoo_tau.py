"""Tokens per round of drafters, and of n-gram settings, on prompt files: greedy, by ``specjax.decode``.

    python benchmarks/zoo_tau.py --prompts gsm8k=gsm8k.jsonl mbpp=mbpp.jsonl --drafters eagle3 mine=FOLDER --out FILE

The first ``--limit`` prompts of a file (first user turns) are the rows of one batch; all files share their programs.
Drafters are methods that come with the package, or ``NAME=FOLDER``. Plain decoding goes first: its answers say
whether a drafter's are identical, and n-gram settings are walked over them, which gives what decoding would, since
greedy answers do not depend on the drafter; the best one is then decoded as well.

tau is ``specjax.metrics.Stats.tau`` over all rounds of a file: tokens by rounds, the target's own token counted, the
prefill's token not. *Finished*: answers that ended by themselves; the others were cut at ``--tokens``.

What is done is written to ``--out`` at once (the plain answers to ``FILE.answers.json``), and left aside when the same
command runs again. After ``--seconds`` no further file is begun: call it again.
"""

import argparse
import functools
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import facts

import specjax
from specjax import demo, identity, metrics
from specjax.calls import plan
from specjax.drafters import ngram
from specjax.metrics import RoundRecord, Stats
from specjax.results import Completion
from specjax.types import Ctx

#: (longest and shortest n-gram, which of several occurrences)
NGRAMS = ((5, 5, "earliest"), (4, 2, "earliest"), (4, 2, "recent"), (3, 1, "earliest"), (3, 1, "recent"),
          (2, 1, "earliest"))  # fmt: skip
PREFILL = 128
#: Options that must be the same for what was measured before to be kept.
SAME = ("target", "limit", "tokens", "k", "dtype")


def named(text: str) -> tuple[str, str]:
    """``NAME=PATH``, or one word for both."""
    name, _, path = text.partition("=")
    return name, path or name


def read_prompts(path: str, limit: int) -> list[str]:
    """First user turns. Lines end in a line feed and nothing else."""
    lines = [line for line in Path(path).read_text("utf-8").split("\n") if line.strip()]
    return [json.loads(line)["turns"][0] for line in lines[:limit]]


def summary(answers: list[Completion]) -> dict[str, Any]:
    """Figures of answers to one file."""
    return figures([(one.stats, one.finish_reason == "stop") for one in answers])


def figures(answers: list[tuple[Stats, bool]]) -> dict[str, Any]:
    """The same of (counters, whether the answer ended by itself)."""
    whole = metrics.merge([stats for stats, _ in answers])
    part = {
        flag: metrics.merge([stats for stats, ended in answers if ended is flag]) for flag in (True, False)
    }
    return {
        "prompts": len(answers),
        "tokens": whole.new_tokens,
        "rounds": whole.rounds,
        "tau": whole.tau,
        "tau_finished": part[True].tau,
        "tau_cut": part[False].tau,
        "share_cut": sum(not ended for _, ended in answers) / len(answers),
        "acceptance_rate": whole.acceptance_rate,
        "accepted_per_position": list(whole.accepted_per_position),
        "conditional_per_position": list(whole.conditional_per_position),
    }


def differences(params: Any, plain: list[Completion], drafted: list[Completion]) -> dict[str, Any]:
    """How many answers are identical, and the float32 logit gap where others part."""
    rows = [identity.compare(params, i, a, b) for i, (a, b) in enumerate(zip(plain, drafted, strict=True))]
    gaps = [row.gap for row in rows if not row.identical]
    return {
        "identical": sum(row.identical for row in rows),
        "near_ties": sum(gap is not None and gap <= identity.NEAR_TIE for gap in gaps),
        "unexplained": sum(gap is None for gap in gaps),
        "largest_gap": max((gap for gap in gaps if gap is not None), default=0.0),
    }


@functools.partial(jax.jit, static_argnums=0)
def _lookups(cfg: ngram.Config, tokens: jax.Array, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(drafts, how many) after each of several lengths of one text ``[T]``."""
    rows, live = (lengths.shape[0], tokens.shape[0]), jnp.ones(lengths.shape, bool)
    ctx = Ctx(
        jnp.broadcast_to(tokens, rows), lengths, tokens[lengths - 1], live, None, kv_view=lambda kind: None
    )
    proposal, _ = ngram.draft(None, None, cfg, cfg.k, (), ctx, None)
    return proposal.tokens, proposal.count


def looked_up(cfg: ngram.Config, prompt: list[int], answer: list[int], ended: bool, size: int) -> Stats:
    """Counters of decoding ``answer`` with an n-gram drafter, round by round over the text itself."""
    text = np.zeros(size, np.int32)
    text[: len(prompt) + len(answer)] = prompt + answer
    lengths = np.full(-(-len(answer) // 256) * 256, len(prompt) + 1, np.int32)
    lengths[: len(answer)] += np.arange(len(answer), dtype=np.int32)
    tokens, counts = jax.device_get(_lookups(cfg, text, lengths))
    follow = np.lib.stride_tricks.sliding_window_view(np.pad(text, (0, cfg.k)), cfg.k)[lengths]
    kept = np.cumprod(tokens == follow, 1).sum(1)
    rounds, at, last = [], 0, len(answer) - 1  # the first token is the prefill's
    while at < last:
        left = last - at
        proposed = (
            int(counts[at]) if ended else min(int(counts[at]), left - 1)
        )  # a round's own token needs room too
        accepted = min(int(kept[at]), proposed, left)
        rounds.append(RoundRecord(proposed, accepted, min(accepted + 1, left)))
        at += rounds[-1].emitted
    return Stats.from_rounds(rounds, new_tokens=len(answer))


class Measurement:
    """One run of the command over a result file that may hold earlier ones."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.began, self.longest = args, time.perf_counter(), 0.0
        self.plain = specjax.load(args.target, dtype=args.dtype)
        self.sets = {name: read_prompts(path, args.limit) for name, path in map(named, args.prompts)}
        jobs = {
            name: plan(self.plain, texts, max_new_tokens=args.tokens).jobs
            for name, texts in self.sets.items()
        }
        self.size = max(job.limit for listed in jobs.values() for job in listed)
        self.known = {name: _digest([job.prompt for job in listed]) for name, listed in jobs.items()}
        self.done = self._earlier(args.out, {"sets": {}, "plain": {}, "ngram": {}, "drafters": {}})
        self.answers = self._earlier(Path(f"{args.out}.answers.json"), {})
        for name, digest in self.known.items():
            if self.done["sets"].get(name, digest) != digest:
                raise SystemExit(f"{args.out}: {name} was measured on other prompts; choose another --out")

    def _earlier(self, path: Path, empty: dict[str, Any]) -> dict[str, Any]:
        if not path.is_file():
            return empty
        data = json.loads(path.read_text("utf-8"))
        for key in SAME if "options" in data else ():
            if data["options"][key] != str(getattr(self.args, key)):
                raise SystemExit(f"{path} was made with --{key} {data['options'][key]}; choose another --out")
        return data.get("results", data)

    def keep(self) -> None:
        """Write everything so far."""
        self.done["sets"] |= self.known
        self.args.out.parent.mkdir(parents=True, exist_ok=True)
        for path, data in (
            (self.args.out, facts(self.args) | {"results": self.done}),
            (Path(f"{self.args.out}.answers.json"), self.answers),
        ):
            fresh = path.with_name(path.name + ".tmp")
            fresh.write_text(json.dumps(data, indent=1 if path == self.args.out else None) + "\n", "utf-8")
            fresh.replace(path)

    def in_time(self) -> bool:
        """Whether another file may be begun: as long as the longest so far may still fit."""
        return time.perf_counter() - self.began + self.longest < self.args.seconds

    def decode(self, params: Any, name: str, **options: Any) -> tuple[list[Completion], dict[str, Any]]:
        """Answers to one file, and what they took."""
        texts, began = self.sets[name], time.perf_counter()
        out = specjax.decode(
            params, texts, max_new_tokens=self.args.tokens, rows=self.args.limit, max_len=self.size,
            prefill_chunk=PREFILL, **options,
        )  # fmt: skip
        answers = [group[0] for group in out.completions]
        if "interrupted" in {one.finish_reason for one in answers}:
            raise KeyboardInterrupt
        seconds = time.perf_counter() - began
        self.longest = max(self.longest, seconds)
        times = {"seconds": seconds, "compile_seconds": answers[0].stats.compile_seconds}
        return answers, summary(answers) | times

    def plain_answers(self, name: str) -> list[Completion]:
        """What plain decoding said, as kept."""
        return [
            Completion(
                text=None, tokens=ids, finish_reason=reason, stats=Stats(), prompt_tokens=prompt, drafted=[]
            )
            for prompt, ids, reason in self.answers[name]
        ]

    def run(self) -> bool:
        """Everything that is not there yet; False when time ran out before."""
        for name in self.sets:
            if name in self.answers and name in self.done["plain"]:
                continue
            if not self.in_time():
                return False
            answers, row = self.decode(self.plain, name)
            self.answers[name] = [(one.prompt_tokens, one.tokens, one.finish_reason) for one in answers]
            self.told("plain", name, row, self.done["plain"])
        if not self.run_ngrams():
            return False
        return all(self.run_drafter(*named(text)) for text in self.args.drafters)

    def run_ngrams(self) -> bool:
        """The settings, walked; then the one with the highest mean tau, decoded."""
        table = self.done["ngram"]
        for name in self.sets:
            for high, low, match in NGRAMS:
                key = f"{high}..{low} {match}"
                if name in table.get(key, {}):
                    continue
                if not self.in_time():
                    return False
                cfg = ngram.Config(self.args.k, high, low, match)
                stats = [
                    (looked_up(cfg, prompt, ids, reason == "stop", self.size), reason == "stop")
                    for prompt, ids, reason in self.answers[name]
                ]
                self.told(f"n-gram {key}", name, figures(stats), table.setdefault(key, {}))
        keys = [f"{high}..{low} {match}" for high, low, match in NGRAMS]
        best = max(range(len(keys)), key=lambda i: sum(table[keys[i]][name]["tau"] for name in self.sets))
        high, low, match = NGRAMS[best]
        settings = {"k": self.args.k, "lookup_max": high, "lookup_min": low, "match": match, "costs": None}
        return self.run_drafter(f"ngram {keys[best]}", "ngram", settings)

    def run_drafter(self, name: str, where: str, settings: dict[str, Any] | None = None) -> bool:
        """One drafter on every file."""
        table, params = self.done["drafters"].setdefault(name, {}), None
        for one in self.sets:
            if one in table:
                continue
            if not self.in_time():
                return False
            if params is None:
                params = demo.attached(self.plain, where, lambda text: None, settings)
            answers, row = self.decode(params, one, k=self.args.k)
            self.told(name, one, row | differences(self.plain, self.plain_answers(one), answers), table)
        return True

    def told(self, name: str, one: str, row: dict[str, Any], table: dict[str, Any]) -> None:
        """Keep a row and print it."""
        table[one] = row
        self.keep()
        same = f"  identical {row['identical']}, near-ties {row['near_ties']}" if "identical" in row else ""
        print(
            f"{time.perf_counter() - self.began:6.1f} s  {name:<24} {one:<12} tau {row['tau']:.3f}  finished "
            f"{row['tau_finished']:.3f}  cut {row['share_cut']:.0%}{same}  "
            + " ".join(f"{x:.3f}" for x in row["accepted_per_position"]),
            flush=True,
        )


def told_as_table(done: dict[str, Any]) -> str:
    """Markdown: tau by drafter and file, of finished texts in brackets, and the best n-gram setting of each file."""
    names = list(done["sets"])
    cell = lambda row: f"{row['tau']:.2f} ({row['tau_finished']:.2f})"  # noqa: E731
    lines = [["drafter", *names], ["---"] * (len(names) + 1)]
    lines += [
        [drafter, *(cell(rows[n]) if n in rows else "" for n in names)]
        for drafter, rows in done["drafters"].items()
    ]
    best = [
        max((rows[n] for rows in done["ngram"].values() if n in rows), key=lambda row: row["tau"])
        for n in names
    ]
    lines += [["best of six n-gram settings", *map(cell, best)]]
    lines += [["texts cut", *(f"{done['plain'][n]['share_cut']:.0%}" for n in names)]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _digest(prompts: list[np.ndarray]) -> str:
    told = hashlib.sha256()
    for ids in prompts:
        told.update(np.asarray(ids, np.int32).tobytes() + b"|")
    return f"{len(prompts)} prompts, {told.hexdigest()[:16]}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default=demo.MODEL)
    parser.add_argument("--prompts", nargs="+", required=True, metavar="NAME=FILE")
    parser.add_argument("--drafters", nargs="*", default=[], metavar="NAME[=FOLDER]")
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--k", type=int, default=7)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    measurement = Measurement(args)
    if measurement.run():
        print(told_as_table(measurement.done))
    else:
        print(f"unfinished after {args.seconds:g} s: run the same command again")


if __name__ == "__main__":
    main()
