"""One line of progress on the terminal, shared by everything that takes long.

Silent unless standard error is a terminal (or ``verbose=True`` asks for plain lines). Nested calls write
to the line that is already open, so library and command line never show two.

Example:
    >>> with line(verbose=False) as say:
    ...     say("loading weights")
"""

import contextlib
import contextvars
import sys
import time
from collections.abc import Callable, Iterator

Say = Callable[[str], None]

_OPEN: contextvars.ContextVar[Say | None] = contextvars.ContextVar("specjax_progress", default=None)


@contextlib.contextmanager
def line(verbose: bool | None = None) -> Iterator[Say]:
    """A function that replaces the text of the progress line; the line vanishes at the end.

    ``verbose``: None = only on a terminal, False = never, True = also elsewhere, as ordinary lines.
    Do not keep it open across a ``yield``: whoever consumes the generator may want to print.
    """
    outer = _OPEN.get()
    if outer is not None:
        yield _silent if verbose is False else outer
        return
    with contextlib.ExitStack() as stack:
        say = _open(stack, verbose)
        token = _OPEN.set(say)
        try:
            yield say
        finally:
            _OPEN.reset(token)


def _open(stack: contextlib.ExitStack, verbose: bool | None) -> Say:
    if verbose is False:
        return _silent
    if not sys.stderr.isatty():
        return _plain_lines() if verbose else _silent
    from rich.console import Console
    from rich.text import Text

    status = stack.enter_context(Console(stderr=True).status(""))
    return lambda text: status.update(Text(text))


def _silent(text: str) -> None:
    del text


def _plain_lines() -> Say:
    """Print lines; of those that differ only after a colon (a counter), at most one a second."""
    last, shown = "", 0.0

    def say(text: str) -> None:
        nonlocal last, shown
        topic, now = text.partition(":")[0], time.monotonic()
        if topic == last and now - shown < 1.0:
            return
        last, shown = topic, now
        print(text, file=sys.stderr, flush=True)

    return say
