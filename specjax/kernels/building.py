"""What every kernel does to be built and bound: the compiler's notes left aside, smaller tiles where the first do not
fit, and the reference where a program is compiled for something else."""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

import jax

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


def differentiable(kernels: Mapping[str, Callable], reference: Callable) -> Callable:
    """A function that runs the kernel of the platform it is compiled for, by its name ("cuda", "rocm"); ``reference``
    serves others and gives the gradients."""
    fast = jax.custom_jvp(lambda *arrays: jax.lax.platform_dependent(*arrays, **kernels, default=reference))
    fast.defjvp(lambda primals, tangents: jax.jvp(reference, primals, tangents))
    return fast


def told(error: BaseException) -> str:
    """Kind and first line of an error."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:200]}"
