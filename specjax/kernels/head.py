"""The streamed head's entry in the table of kernels: what the kernel takes, and how it is built and bound."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax.kernels import configs, head_kernel as kernel
from specjax.kernels.building import compiling, first_that_builds
from specjax.kernels.configs import Head
from specjax.kernels.head_kernel import CHUNK, Case

ABOUT = "Pallas-Triton: bfloat16, float16 or float32, up to 64 rows, sizes that are multiples of 16"
MAX_ROWS = 64
_MULTIPLE = 16

#: Tiles that were found to compile, by case and platform.
_built: dict[tuple[Case, str], Head] = {}


def case(x, table, cap, lse: bool, norm: tuple[float, bool] | None = None) -> Case:
    """The case of rows [M D], a head [V D] and :class:`specjax.layers.head.Cap`; (eps, offset) of a norm before."""
    dtype, vocab = jnp.dtype(x.dtype), table.shape[0]
    return Case(
        rows=x.shape[0],
        width=x.shape[1],
        vocab=vocab,
        size=vocab if cap.size is None else min(cap.size, vocab),
        dtype=dtype if table.dtype == dtype else "unlike the head",
        scale=cap.scale,
        softcap=cap.softcap,
        lse=lse,
        normed=norm is not None,
        eps=0.0 if norm is None else norm[0],
        offset=norm is not None and norm[1],
    )


def refuse(case: Case) -> str | None:
    """Why the kernel cannot serve this case; None if it can."""
    if case.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"{case.dtype}: bfloat16, float16 or float32 for rows and head alike"
    if case.rows > MAX_ROWS:
        return f"{case.rows} rows: beyond {MAX_ROWS} products are limited by arithmetic and XLA's"
    if case.width % _MULTIPLE or case.vocab % _MULTIPLE:
        return f"a head of {case.vocab} rows and {case.width} columns: multiples of {_MULTIPLE}"
    return None


def beyond(case: Case) -> bool:
    """Prefill passes and heads of odd sizes are XLA's whatever is asked."""
    fine = dataclasses.replace(case, dtype=jnp.dtype(jnp.bfloat16))
    return case.dtype == "unlike the head" or refuse(fine) is not None


def build(case: Case, platform: str) -> None:
    """Compile for the current device, with smaller tiles where the first do not fit; raises what stands in the way of
    the last."""
    # as many rows as its chunks hold: the code is the same
    _built[case, platform] = _fitting(dataclasses.replace(case, rows=case.chunks * CHUNK - 1))


@functools.lru_cache(maxsize=64)
def _fitting(case: Case) -> Head:
    tiles = configs.head(configs.kind(), case.dtype.itemsize)
    return first_that_builds(tiles, functools.partial(compile_tile, case))


def compile_tile(case: Case, tile: Head):
    """The compiled program with this tile, without running it."""
    with compiling():
        run = functools.partial(kernel.launch, case=case, tile=tile)
        return jax.jit(run).lower(*shapes(case)).compile()


def shapes(case: Case) -> tuple:
    """Arguments of ``kernel.launch`` as shapes."""
    s = lambda *shape: jax.ShapeDtypeStruct(shape, case.dtype)  # noqa: E731
    return s(case.rows, case.width), s(case.vocab, case.width), *((s(case.width),) if case.normed else ())


def bind(case: Case, reference: Callable) -> Callable:
    """A function with the arguments of ``kernel.launch``; ``reference`` serves programs compiled for a CPU."""

    def apply(*arrays):
        run = {n: functools.partial(kernel.launch, case=case, tile=_tile(case, n)) for n in ("cuda", "rocm")}
        return jax.lax.platform_dependent(*arrays, **run, default=reference)

    return apply


def interpreted(case: Case) -> Callable:
    """The same in Pallas' interpreter."""
    tile = next(configs.head("default", case.dtype.itemsize))
    return functools.partial(kernel.launch, case=case, tile=tile, interpret=True)


def _tile(case: Case, platform: str) -> Head:
    """What was built here, or what would be tried first on such a platform."""
    if (case, platform) in _built:
        return _built[case, platform]
    return next(configs.head(configs.chip_of(platform), case.dtype.itemsize))
