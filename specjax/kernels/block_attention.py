"""Block attention's entry in the table of kernels: what the kernel takes, and how it is built and bound."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax.kernels import block_attention_kernel as kernel, configs
from specjax.kernels.block_attention_op import View
from specjax.kernels.block_attention_plan import Case, Plan, plan
from specjax.kernels.building import compiling, first_that_builds
from specjax.kernels.configs import LEAST, Attention
from specjax.kernels.sizes import power

ABOUT = "Pallas-Triton: bfloat16 or float16, blocks of up to 64 rows, head sizes from 16 to 512 that are multiples of 8"
MAX_ROWS = 64
_SIZES = (16, 512)
_BATCH = 1024  # rows of a batch whose lengths a program looks through

#: Tiles that were found to compile, by case and platform.
_built: dict[tuple[Case, str], Attention] = {}


def case(q, keys, values, block, positions, view: View) -> Case:
    """The case of these arguments."""
    batch, rows, heads, size = q.shape
    return Case(
        batch=batch,
        rows=rows,
        heads=heads,
        kv_heads=keys.shape[1],
        size=size,
        value_size=values.shape[3],
        slots=keys.shape[2],
        dtype=jnp.dtype(q.dtype)
        if all(q.dtype == x.dtype for x in (keys, values, *(block or ())))
        else "mixed types",
        own=block is not None,
        ring=positions is not None,
        view=view,
    )


def refuse(case: Case) -> str | None:
    """Why the kernel cannot serve this case; None if it can."""
    if case.dtype == "mixed types":
        return "queries, keys and values of different types"
    if case.dtype not in (jnp.bfloat16, jnp.float16):
        return f"{case.dtype.name}: XLA computes it at full precision"
    if case.size != case.value_size:
        return f"keys of {case.size} and values of {case.value_size} channels"
    if not _SIZES[0] <= case.size <= _SIZES[1] or case.size % 8:
        return f"heads of {case.size} channels: not a multiple of 8 between {_SIZES[0]} and {_SIZES[1]}"
    if case.rows > MAX_ROWS:
        return f"{case.rows} rows: beyond {MAX_ROWS} XLA's products are used"
    if case.batch > _BATCH:
        return f"a batch of {case.batch}: at most {_BATCH}"
    if case.heads % case.kv_heads:
        return f"{case.heads} query heads over {case.kv_heads} key/value heads"
    return None


def beyond(case: Case) -> bool:
    """Prefill passes: their products are large enough for XLA's."""
    return case.rows > MAX_ROWS


def tiles(case: Case, chip: str) -> list[Plan]:
    """Grids to try on a chip, the best first."""
    most = configs.attention_rows(chip, case.padded)
    rows = min(power(case.packed, LEAST), most)
    count = configs.CHIPS[chip].processors
    return [plan(case, tile, most, count) for tile in configs.attention(chip, case.padded, rows)]


def build(case: Case, platform: str) -> None:
    """Compile for the current device, with smaller tiles where the first do not fit; raises what stands in the way of
    the last."""
    _built[case, platform] = first_that_builds(tiles(case, configs.kind()), compile_plan).tile


def compile_plan(grid: Plan):
    """The compiled program of one grid, without running it."""
    with compiling():
        return jax.jit(functools.partial(kernel.launch, plan=grid)).lower(*shapes(grid.case)).compile()


def shapes(case: Case) -> tuple:
    """Arguments of ``kernel.launch`` as shapes."""
    s = lambda *shape, dtype=case.dtype: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    cached = s(case.batch, case.kv_heads, case.slots, case.size)
    fresh = s(case.batch, case.rows, case.kv_heads, case.size)
    one = s(case.batch, dtype=jnp.int32)
    return (
        s(case.batch, case.rows, case.heads, case.size), cached, cached, one, one,
        (fresh, fresh) if case.own else None,
        s(case.batch, case.slots, dtype=jnp.int32) if case.ring else None,
    )  # fmt: skip


def bind(case: Case, reference: Callable) -> Callable:
    """A function with the arguments of ``kernel.launch``; ``reference`` serves programs compiled for a CPU."""

    def apply(*arrays):
        run = {name: functools.partial(kernel.launch, plan=_plan(case, name)) for name in ("cuda", "rocm")}
        return jax.lax.platform_dependent(*arrays, **run, default=reference)

    return apply


def interpreted(case: Case) -> Callable:
    """The same in Pallas' interpreter."""
    return functools.partial(kernel.launch, plan=tiles(case, "default")[0], interpret=True)


def _plan(case: Case, platform: str) -> Plan:
    """What was built here, or what would be tried first on such a platform."""
    chip = configs.kind()
    if (case, platform) not in _built and chip.startswith("gfx") != (platform == "rocm"):
        chip = {"cuda": "sm_90", "rocm": "gfx942"}[platform]
    plans = tiles(case, chip)
    return next((p for p in plans if p.tile == _built.get((case, platform))), plans[0])
