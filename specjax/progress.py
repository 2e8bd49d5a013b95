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
def line(verbose: bool | None = None, logged: bool = False) -> Iterator[Say]:
    """A function that replaces the text of the progress line; the line vanishes at the end.

    ``verbose``: None = only on a terminal, False = never, True = also elsewhere, as ordinary lines. ``logged``: for
    work that takes hours, and whose output may go to a file: ordinary lines off a terminal unless ``verbose`` is
    False, the longer it takes the rarer, but at least one every minute.
    Do not keep it open across a ``yield``: whoever consumes the generator may want to print.
    """
    outer = _OPEN.get()
    if outer is not None:
        yield _silent if verbose is False else outer
        return
    with contextlib.ExitStack() as stack:
        say = _open(stack, verbose, logged)
        token = _OPEN.set(say)
        try:
            yield say
        finally:
            _OPEN.reset(token)


@contextlib.contextmanager
def through(say: Say) -> Iterator[None]:
    """Whoever opens a line below writes to ``say`` instead."""
    token = _OPEN.set(say)
    try:
        yield
    finally:
        _OPEN.reset(token)


def _open(stack: contextlib.ExitStack, verbose: bool | None, logged: bool) -> Say:
    if verbose is False:
        return _silent
    if not sys.stderr.isatty():
        return _plain_lines() if verbose or logged else _silent
    from rich.console import Console
    from rich.text import Text

    status = stack.enter_context(Console(stderr=True).status(""))
    return lambda text: status.update(Text(text))


def _silent(text: str) -> None:
    del text


def _plain_lines(clock: Callable[[], float] = time.monotonic) -> Say:
    """Print lines. Of those that only differ after a colon: one a second at first, one a minute at last."""
    began = clock()
    last, shown = "", began

    def say(text: str) -> None:
        nonlocal last, shown
        topic, now = text.partition(":")[0], clock()
        pause = min(60.0, max(1.0, (now - began) / 20.0))
        if topic == last and now - shown < pause:
            return
        last, shown = topic, now
        print(text, file=sys.stderr, flush=True)

    return say
