"""The entry of DSpark's walk in the table of kernels: what the kernel takes, and how it is built and bound."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax.kernels import configs, markov_kernel as kernel
from specjax.kernels.building import compiling, first_that_builds
from specjax.kernels.markov_kernel import Case, Plan

ABOUT = (
    "Pallas-Triton: vanilla heads of a rank 16 to 512 (a power of two), greedy, bfloat16, float16 or float32"
)
MAX_ROWS, MAX_RANK = 64, 512

#: Grids that were found to compile, by case and platform.
_built: dict[tuple[Case, str], Plan] = {}


def case(before, after, logits, ids) -> Case:
    """The case of the arguments of ``kernel.launch``."""
    return Case(
        batch=logits.shape[0],
        drafts=logits.shape[1],
        rank=before.shape[1],
        vocab=before.shape[0],
        after=after.shape[0],
        size=logits.shape[2],
        dtype=jnp.dtype(before.dtype) if before.dtype == after.dtype else "unlike tables",
        mapped=ids is not None,
    )


def refuse(case: Case) -> str | None:
    """Why the kernel cannot serve this case; None if it can."""
    if case.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"{case.dtype}: bfloat16, float16 or float32 for both tables"
    if case.batch > MAX_ROWS:
        return f"{case.batch} rows: at most {MAX_ROWS}"
    if not 16 <= case.rank <= MAX_RANK or case.rank & (case.rank - 1):
        return f"rank {case.rank}: a power of two from 16 to {MAX_RANK}"
    if case.after % 16 or case.after < case.size:
        return f"a table of {case.after} rows for {case.size} ids: at least as many, a multiple of 16"
    return None


def beyond(case: Case) -> bool:
    """Heads of odd sizes are XLA's whatever is asked."""
    return refuse(case) is not None


def plans(case: Case, chip: str) -> list[Plan]:
    """Grids to try on a chip, the best first."""
    return [kernel.plan(case, tile) for tile in configs.walk(chip, case.dtype.itemsize * case.rank)]


def build(case: Case, platform: str) -> None:
    """Compile for the current device, with smaller tiles where the first do not fit; raises what stands in the way of
    the last."""
    grids = plans(case, configs.kind())
    _built[case, platform] = first_that_builds(grids, functools.partial(compile_plan, case))


def compile_plan(case: Case, plan: Plan):
    """The compiled program with this grid, without running it."""
    with compiling():
        run = functools.partial(kernel.launch, case=case, plan=plan)
        return jax.jit(run).lower(*shapes(case)).compile()


def shapes(case: Case) -> tuple:
    """Arguments of ``kernel.launch`` as shapes."""
    s = jax.ShapeDtypeStruct
    tables = s((case.vocab, case.rank), case.dtype), s((case.after, case.rank), case.dtype)
    logits = s((case.batch, case.drafts, case.size), jnp.float32)
    ids = (s((case.size,), jnp.int32),) if case.mapped else ()
    return *tables, logits, s((case.batch,), jnp.int32), *ids


def bind(case: Case, reference: Callable) -> Callable:
    """A function with the arguments of ``kernel.launch``; ``reference`` serves programs compiled for a CPU."""

    def apply(*arrays):
        run = {n: functools.partial(kernel.launch, case=case, plan=_plan(case, n)) for n in ("cuda", "rocm")}
        return jax.lax.platform_dependent(*arrays, **run, default=reference)

    return apply


def interpreted(case: Case) -> Callable:
    """The same in Pallas' interpreter."""
    return functools.partial(kernel.launch, case=case, plan=plans(case, "default")[0], interpret=True)


def _plan(case: Case, platform: str) -> Plan:
    """What was built here, or what would be tried first on such a platform."""
    if (case, platform) in _built:
        return _built[case, platform]
    return plans(case, configs.chip_of(platform))[0]
