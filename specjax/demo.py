"""``specjax demo``: two questions, answered by every method there is, beside plain decoding."""

import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import specjax
from specjax import attach, progress, registry
from specjax.identity import Row, compare
from specjax.results import Completion
from specjax.types import Params

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
#: One buffer length and one prefill width for both prompts, so that both use the same compiled programs.
SHAPE = {"max_len": 512, "prefill_chunk": 128}


@dataclasses.dataclass(frozen=True)
class Run:
    """A method's answer to one prompt, and how it compares with the plain one."""

    method: str
    answer: Completion
    row: Row

    @property
    def same(self) -> str:
        """Whether the answers are identical, in words."""
        if self.row.identical:
            return "yes"
        gap = "" if self.row.gap is None else f", logit gap {self.row.gap:.1e}"
        return f"up to token {self.row.position}{gap}"


def methods(target: str = MODEL) -> tuple[str, ...]:
    """What can be shown for a target: drafters without weights, and those that come with the package."""
    return ("ngram", *(one.method for one in specjax.zoo.available(target)))


def run(max_new_tokens: int = 64, dtype: str = "auto", verbose: bool | None = None) -> bool:
    """Print the comparison; True when every pair of answers was identical."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 108, highlight=False)
    began = time.perf_counter()
    with progress.line(verbose) as say:
        say(f"loading {MODEL}")
        plain = specjax.load(MODEL, dtype=dtype)
        console.print(f"{MODEL}, greedy, {dtype_of(plain)}; loaded in {time.perf_counter() - began:.1f} s\n")
        found = compared(plain, PROMPTS, methods(), max_new_tokens, say)
    for title, runs in found.items():
        _show(console, title, runs)
    console.print(f"whole run: {time.perf_counter() - began:.0f} s")
    return all(one.row.identical for runs in found.values() for one in runs)


def compared(
    plain: Params, prompts: Mapping[str, Any], names: Sequence[str], max_new_tokens: int, say: attach.Say
) -> dict[str, list[Run]]:
    """Answers by title of the prompt, the plain one first. Each method's programs are compiled once."""
    found: dict[str, list[Run]] = {title: [] for title in prompts}
    for name in ("plain", *names):
        params = plain if name == "plain" else attached(plain, name, say)
        for i, (title, prompt) in enumerate(prompts.items()):
            say(f"{name}: {title}")
            options = {"max_new_tokens": max_new_tokens, **SHAPE}
            specjax.decode(params, prompt, **options)  # the first run of a program, at each width, costs more
            answer = specjax.decode(params, prompt, **options).completions[0][0]
            first = found[title][0].answer if found[title] else answer
            found[title].append(Run(name, answer, compare(plain, i, first, answer)))
    return found


def attached(plain: Params, name: str, say: attach.Say, settings: Mapping[str, Any] | None = None) -> Params:
    """The same target, which is not read again, with a drafter."""
    wanted = attach.plan(name, None, settings, plain.meta.name)
    assert wanted is not None
    return attach.attach(plain, wanted, say)


def dtype_of(params: Params) -> str:
    """Type of the target's matrices."""
    shared = registry.target(params.meta.family).shared(params.target, params.meta.target_cfg)
    return str(shared.embed.dtype)


def _show(console: Any, title: str, runs: list[Run]) -> None:
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    plain = runs[0].answer
    console.print(
        Panel(Text(str(plain.tokens if plain.text is None else plain.text)), title=title, title_align="left")
    )
    table = Table()
    table.add_column("method")
    for name in ("rounds", "tau", "drafts kept", "tokens/s", "x plain", "identical"):
        table.add_column(name, justify="right")
    for one in runs:
        stats = one.answer.stats
        kept = f"{stats.accepted} of {stats.proposed}" if one.method != "plain" else ""
        speed = stats.tokens_per_second
        times = f"{speed / plain.stats.tokens_per_second:.2f}" if plain.stats.tokens_per_second else ""
        same = Text(one.same, style="green" if one.row.identical else "yellow") if one is not runs[0] else ""
        table.add_row(one.method, str(stats.rounds), f"{stats.tau:.2f}", kept, f"{speed:.1f}", times, same)
    console.print(table)
    console.print()
