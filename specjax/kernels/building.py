"""What every kernel's build does: the compiler's notes left aside, and smaller tiles where the first do not fit."""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Tiles = TypeVar("Tiles")


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Where warnings are errors, Pallas' note on its Triton back end must not count as a failure to build."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        yield


def first_that_builds(choices: Iterable[Tiles], build: Callable[[Tiles], object]) -> Tiles:
    """The first choice that ``build`` takes. Raises what stands in the way of the last; ValueError without any."""
    failure: Exception = ValueError("there are no tiles to build with")
    for choice in choices:
        try:
            build(choice)
        except Exception as error:  # too much local memory, mostly; of any compiler
            failure = error
        else:
            return choice
    raise failure


def told(error: BaseException) -> str:
    """Kind and first line of an error."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:200]}"
