"""``specjax demo``: the same two questions with and without drafting, answers side by side."""

import sys
import time
from typing import Any

import specjax
from specjax import progress
from specjax.identity import without_drafter

MODEL = "smollm2-135m"

MATHS = (
    "A baker fills 7 trays with 12 rolls each. She sells 59 rolls before noon and the rest after lunch for "
    "2 dollars each. How much does she earn after lunch? Work it out step by step."
)
CODE = """Here is a Python class:

```python
class Inventory:
    def __init__(self):
        self.items = {}

    def add(self, name, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.items[name] = self.items.get(name, 0) + amount

    def remove(self, name, amount):
        if self.items.get(name, 0) < amount:
            raise ValueError("not enough in stock")
        self.items[name] = self.items[name] - amount

    def total(self):
        return sum(self.items.values())
```

Rename `Inventory` to `Warehouse`. Show the full class."""
PROMPTS = {"maths": MATHS, "code edit": CODE}
MAX_LEN = 512  # one buffer length for both prompts, so that both use the same compiled programs


def run(max_new_tokens: int = 128, dtype: str = "auto", verbose: bool | None = None) -> bool:
    """Print the comparison; True when every pair of answers was identical."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 108, highlight=False)
    began = time.perf_counter()
    with progress.line(verbose) as say:
        say(f"loading {MODEL}")
        drafted = specjax.load(MODEL, drafter="ngram", dtype=dtype)
        load_seconds = time.perf_counter() - began
        answers = {}
        for title, prompt in PROMPTS.items():
            for name, params in (("plain", without_drafter(drafted)), ("n-gram", drafted)):
                options = {"max_new_tokens": max_new_tokens, "max_len": MAX_LEN, "verbose": verbose}
                say(f"{title}, {name}")
                specjax.decode(params, prompt, **options)  # a program's first run costs seconds of its own
                answers[title, name] = specjax.decode(params, prompt, **options)
    dtypes = {str(x.dtype) for x in _floats(drafted.target)}
    console.print(f"{MODEL}, greedy, {', '.join(sorted(dtypes))}; loaded in {load_seconds:.1f} s\n")
    same = True
    for title, prompt in PROMPTS.items():
        same &= _compare(console, title, prompt, answers[title, "plain"], answers[title, "n-gram"], drafted)
    console.print(f"whole run: {time.perf_counter() - began:.0f} s")
    return same


def _floats(tree: Any) -> list[Any]:
    import jax
    import jax.numpy as jnp

    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]


def _compare(console: Any, title: str, prompt: str, plain: Any, drafted: Any, params: Any) -> bool:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", expand=True, show_lines=True)
    table.add_column("plain", ratio=1)
    table.add_column("n-gram", ratio=1)
    table.add_row(Text(plain.text), Text(drafted.text))
    table.add_row(_stats(plain.stats), _stats(drafted.stats))
    console.print(table)
    same = list(plain.tokens) == list(drafted.tokens)
    console.print(f"identical: {'yes' if same else 'no'}", style="bold green" if same else "bold yellow")
    if not same:
        _explain_difference(console, prompt, len(plain.tokens), params)
    speed_up = drafted.stats.tokens_per_second / plain.stats.tokens_per_second
    console.print(f"speed: {speed_up:.2f}x plain\n")
    return same


def _stats(stats: Any) -> str:
    lines = [
        f"{stats.new_tokens} tokens at {stats.tokens_per_second:.1f} tokens/s",
        f"{stats.rounds} rounds, {stats.tau:.2f} tokens per round",
        f"prefill {stats.prefill_seconds:.2f} s, decode {stats.decode_seconds:.2f} s, "
        f"compile {stats.compile_seconds:.1f} s",
    ]
    if stats.proposed:
        lines.insert(2, f"{stats.accepted} of {stats.proposed} drafted tokens accepted")
    return "\n".join(lines)


def _explain_difference(console: Any, prompt: str, budget: int, params: Any) -> None:
    report = specjax.audit(params, [prompt], max_new_tokens=budget, max_len=MAX_LEN)
    row = report.rows[0]
    if row.identical:
        console.print("a second run gave identical answers")
        return
    console.print(
        f"first difference at token {row.first_divergence}; the two candidates' logits there differ by "
        f"{row.logit_gap:.1e}"
    )
