"""The entry of products of few rows in the table of kernels: what the kernel takes, and how it is built and bound."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax.kernels import configs, skinny_kernel as kernel
from specjax.kernels.building import compiling, differentiable, first_that_builds
from specjax.kernels.skinny_kernel import CHUNK, Case, Plan

ABOUT = "Pallas-Triton: bfloat16, float16 or float32, up to 64 rows, sizes that are multiples of 16"
MAX_ROWS = 64
_MULTIPLE = 16

#: Grids that were found to compile, by case and platform.
_built: dict[tuple[Case, str], Plan] = {}


def case(x, weights: tuple, settings) -> Case:
    """The case of rows [M K], weights [N K] and :class:`specjax.layers.linear.Settings`."""
    dtype = jnp.dtype(x.dtype)
    alike = all(w.dtype == dtype for w in weights)
    return Case(
        rows=x.shape[0],
        width=x.shape[1],
        outs=tuple(w.shape[0] for w in weights),
        dtype=dtype if alike else "unlike weights",
        out_dtype=jnp.dtype(settings.out_dtype or dtype),
        normed=settings.norm is not None,
        eps=0.0 if settings.norm is None else settings.norm[0],
        offset=settings.norm is not None and settings.norm[1],
        pieces=settings.pieces,
        activation=settings.activation,
    )


def refuse(case: Case) -> str | None:
    """Why the kernel cannot serve this case; None if it can."""
    if case.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"{case.dtype}: bfloat16, float16 or float32 for rows and weights alike"
    if case.rows > MAX_ROWS:
        return f"{case.rows} rows: beyond {MAX_ROWS} products are limited by arithmetic and XLA's"
    if case.width % (case.pieces * _MULTIPLE) or any(n % _MULTIPLE for n in case.outs):
        return (
            f"weights of {case.outs} rows and {case.width} columns in {case.pieces}: multiples of {_MULTIPLE}"
        )
    return None


def beyond(case: Case) -> bool:
    """Prefill passes and odd little weights (routers, gates of one row) are XLA's whatever is asked."""
    return (
        case.dtype == "unlike weights"
        or refuse(dataclasses.replace(case, dtype=jnp.dtype(jnp.bfloat16))) is not None
    )


def plans(case: Case, chip: str) -> list[Plan]:
    """Grids to try on a chip, the best first."""
    tiles = configs.product(chip, case.dtype.itemsize)
    return [kernel.plan(case, tile, configs.CHIPS[chip].processors) for tile in tiles]


def build(case: Case, platform: str) -> None:
    """Compile for the current device, with smaller tiles where the first do not fit; raises what stands in the way of
    the last."""
    # as many rows as its chunks hold: the code is the same
    full = dataclasses.replace(case, rows=case.chunks * CHUNK - 1)
    _built[case, platform] = _fitting(full, platform)


@functools.lru_cache(maxsize=512)
def _fitting(case: Case, platform: str) -> Plan:
    del platform
    return first_that_builds(plans(case, configs.kind()), functools.partial(compile_plan, case))


def compile_plan(case: Case, plan: Plan):
    """The compiled program with this grid, without running it."""
    with compiling():
        run = functools.partial(kernel.launch, case=case, plan=plan)
        return jax.jit(run).lower(*shapes(case)).compile()


def shapes(case: Case) -> tuple:
    """Arguments of ``kernel.launch`` as shapes."""
    s = lambda *shape: jax.ShapeDtypeStruct(shape, case.dtype)  # noqa: E731
    norms = (s(case.width // case.pieces),) * case.pieces if case.normed else ()
    return s(case.rows, case.width), *(s(n, case.width) for n in case.outs), *norms


def bind(case: Case, reference: Callable) -> Callable:
    """A function with the arguments of ``kernel.launch``. ``reference`` serves programs compiled for a CPU and gives
    the gradients."""

    def apply(*arrays):
        run = {n: functools.partial(kernel.launch, case=case, plan=_plan(case, n)) for n in ("cuda", "rocm")}
        return differentiable(run, reference)(*arrays)

    return apply


def interpreted(case: Case) -> Callable:
    """The same in Pallas' interpreter."""
    return functools.partial(kernel.launch, case=case, plan=plans(case, "default")[0], interpret=True)


def _plan(case: Case, platform: str) -> Plan:
    """What was built here, or what would be tried first on such a platform."""
    if (case, platform) in _built:
        return _built[case, platform]
    return plans(case, configs.chip_of(platform))[0]
