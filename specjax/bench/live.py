"""Rows as they come: a table that grows on a terminal, a line per row elsewhere."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from specjax import progress
from specjax.bench.rows import Row
from specjax.bench.table import Table, line

#: Columns of the growing table: those that fit a terminal.
SHOWN = ("method", "data", "N", "batch", "T", "x plain", "tau", "R", "tau/R", "identical")
Done = Callable[[Table, Row], None]


@contextlib.contextmanager
def rows(last: int = 20, verbose: bool | None = None) -> Iterator[Done]:
    """A function that shows a table's last rows on standard error, with the progress line of whatever runs below.

    ``verbose``: False = nothing, True = lines even on a terminal.
    """
    if verbose is False:
        yield lambda table, row: None
    elif verbose or not sys.stderr.isatty():
        yield lambda table, row: print(line(row), file=sys.stderr, flush=True)
    else:
        with _live(last) as show:
            yield show


@contextlib.contextmanager
def _live(last: int) -> Iterator[Done]:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.spinner import Spinner
    from rich.text import Text

    parts: dict[str, object] = {}
    status = Spinner("dots", Text(""))
    with Live(status, console=Console(stderr=True), transient=True, refresh_per_second=4) as live:

        def say(text: str) -> None:
            status.update(text=Text(text))

        def show(table: Table, row: Row) -> None:
            parts["table"] = table.rich(last, SHOWN)
            live.update(Group(parts["table"], status))

        with progress.through(say):
            yield show
