"""KV injection's entry in the table of kernels: what the kernels take, and how they are built and bound."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax.kernels import configs, kv_injection_kernel as kernel
from specjax.kernels.building import compiling, first_that_builds
from specjax.kernels.configs import Injection
from specjax.kernels.kv_injection_kernel import Case
from specjax.kernels.kv_injection_op import Heads, Projections

ABOUT = "Pallas-Triton: bfloat16 or float16, up to 16 layers, sizes that are multiples of 16"
_LAYERS = 16  # a program branches to its layer
_MULTIPLE = 16

#: Tiles that were found to compile, by case and platform.
_built: dict[tuple[Case, str], Injection] = {}


def case(x, layers: tuple[Projections, ...], caches, heads: Heads) -> Case:
    """The case of these arguments."""
    first, (keys, _) = layers[0], caches[0]
    arrays = [
        x,
        *(a for pair in caches for a in pair),
        *(a for p in layers for a in (p.k, p.v) if a is not None),
    ]
    alike = len({a.dtype for a in arrays}) == 1 and len({_parts(p) for p in layers}) == 1
    alike &= len({a.shape for pair in caches for a in pair}) == 1
    return Case(
        batch=x.shape[0],
        block=x.shape[1],
        width=x.shape[2],
        layers=len(layers),
        kv_heads=keys.shape[1],
        size=keys.shape[3],
        slots=keys.shape[2],
        dtype=jnp.dtype(x.dtype) if alike else "unlike layers",
        own_values=first.v is not None,
        k_bias=first.k_bias is not None,
        v_bias=first.v_bias is not None,
        k_norm=first.k_norm is not None,
        heads=heads,
    )


def _parts(p: Projections) -> tuple:
    return tuple(None if a is None else a.shape for a in (p.k, p.v, p.k_bias, p.v_bias, p.k_norm))


def refuse(case: Case) -> str | None:
    """Why the kernels cannot serve this case; None if they can."""
    if case.dtype == "unlike layers":
        return "layers or caches of different shapes or types"
    if case.dtype not in (jnp.bfloat16, jnp.float16):
        return f"{case.dtype.name}: XLA computes it at full precision"
    if case.layers > _LAYERS:
        return f"{case.layers} layers: at most {_LAYERS}"
    if case.width % _MULTIPLE or case.size % _MULTIPLE:
        return f"width {case.width} and head size {case.size} must be multiples of {_MULTIPLE}"
    rope = case.heads.rope
    if rope.pair not in (rope.dims // 2, case.size // 2) or rope.pair > case.size // 2:
        return f"rotated pairs {rope.pair} channels apart in heads of {case.size}"
    return None


def build(case: Case, platform: str) -> None:
    """Compile for the current device, with smaller tiles where the first do not fit; raises what stands in the way of
    the last."""
    tiles = configs.injection(configs.kind())
    _built[case, platform] = first_that_builds(tiles, functools.partial(compile_tiles, case))


def compile_tiles(case: Case, tiles: Injection):
    """The compiled program with these tiles, without running it."""
    with compiling():
        run = functools.partial(kernel.launch, case=case, tiles=tiles)
        return jax.jit(run, donate_argnums=2).lower(*shapes(case)).compile()


def shapes(case: Case) -> tuple:
    """Arguments of ``kernel.launch`` as shapes."""
    s = lambda *shape, dtype=case.dtype: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    weight, bias = s(case.kv_heads, case.size, case.width), s(case.kv_heads, case.size)
    layer = Projections(
        k=weight,
        v=weight if case.own_values else None,
        k_bias=bias if case.k_bias else None,
        v_bias=bias if case.v_bias else None,
        k_norm=s(case.size) if case.k_norm else None,
    )
    cache = s(case.batch, case.kv_heads, case.slots, case.size)
    block = s(case.batch, case.block, dtype=jnp.int32)
    x = s(case.batch, case.block, case.width)
    return x, (layer,) * case.layers, ((cache, cache),) * case.layers, block, s(case.batch, dtype=jnp.int32)


def bind(case: Case, reference: Callable) -> Callable:
    """A function with the arguments of ``kernel.launch``; ``reference`` serves programs compiled for a CPU."""

    def apply(*arrays):
        run = {
            n: functools.partial(kernel.launch, case=case, tiles=_tiles(case, n)) for n in ("cuda", "rocm")
        }
        return jax.lax.platform_dependent(*arrays, **run, default=reference)

    return apply


def interpreted(case: Case) -> Callable:
    """The same in Pallas' interpreter."""
    tiles = next(configs.injection("default"))
    return functools.partial(kernel.launch, case=case, tiles=tiles, interpret=True)


def _tiles(case: Case, platform: str) -> Injection:
    """What was built here, or what would be tried first on such a platform."""
    if (case, platform) in _built:
        return _built[case, platform]
    chip = configs.kind()
    if chip.startswith("gfx") != (platform == "rocm"):
        chip = {"cuda": "sm_90", "rocm": "gfx942"}[platform]
    return next(configs.injection(chip))
