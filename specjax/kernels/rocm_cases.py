"""Shapes that kernels are compiled at for GPUs that are not there."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax.kernels import (
    block_attention,
    block_attention_kernel,
    configs,
    experts,
    experts_op,
    grouped_experts,
    head,
    head_kernel,
    kv_injection,
    kv_injection_kernel,
    markov,
    markov_kernel,
    skinny,
    skinny_kernel,
)
from specjax.kernels.block_attention_op import View
from specjax.kernels.kv_injection_op import Heads
from specjax.layers.rope import RopeConfig


@dataclasses.dataclass(frozen=True)
class Case:
    """``make(chip)`` gives a function and shapes; ``kernels``: names, and whether matrix units are expected.

    ``scratch``: bytes per thread that a chip's code may spill.
    """

    name: str
    kernels: dict[str, bool]
    make: Callable[[str], tuple]
    scratch: dict[str, int] = dataclasses.field(default_factory=dict)


def attention(name: str, view: View | None = None, **changes) -> Case:
    """Block attention with the first tiles that a chip's table has for it."""
    sizes = {
        "batch": 4,
        "rows": 16,
        "heads": 32,
        "kv_heads": 8,
        "size": 128,
        "slots": 4096,
        "own": True,
        "ring": False,
    }
    sizes |= changes
    view = view or View(scale=sizes["size"] ** -0.5, causal=False)
    case = block_attention.Case(**sizes, value_size=sizes["size"], dtype=jnp.dtype(jnp.bfloat16), view=view)

    def make(chip):
        plan = block_attention.tiles(case, chip)[0]
        run = functools.partial(block_attention_kernel.launch, plan=plan)
        return run, *block_attention.shapes(case)

    # half a megabyte of sums per 64 rows: Hopper's registers are short by a few, outside of the loop over keys
    scratch = {"sm_90": 160} if case.padded == 512 else {}
    return Case(f"attention {name}", {"block_attention": True, "block_attention_join": False}, make, scratch)


def decoding() -> list[Case]:
    """What decoding calls beyond: plain steps and verified blocks of 8 rows, of Gemma 4 and of Qwen3.5."""
    cached = functools.partial(attention, own=False)
    window = View(1.0, True, window=1024)
    return [
        cached("plain step", View(128**-0.5, True), rows=1),
        cached("plain step d512", View(1.0, True), rows=1, size=512, kv_heads=4),
        cached("verify d256", View(256**-0.5, True), rows=8, size=256, heads=16, kv_heads=4),
        cached("verify d512", View(1.0, True), rows=8, size=512, kv_heads=4),
        cached("verify d256 in a ring", window, rows=8, size=256, kv_heads=16, ring=True, slots=1032),
    ]


def injection(tokens: int, **changes) -> Case:
    """The five layers of a drafter for an 8B model."""
    case = kv_injection.Case(
        batch=tokens, block=1, width=4096, layers=5, kv_heads=8, size=128, slots=2048, dtype=jnp.dtype(jnp.bfloat16),
        own_values=True, k_bias=False, v_bias=False, k_norm=True, heads=Heads(RopeConfig(128, 1e6), 1e-6),
    )  # fmt: skip
    case = dataclasses.replace(case, **changes)

    def make(chip):
        tiles = next(configs.injection(chip))
        return functools.partial(kv_injection_kernel.launch, case=case, tiles=tiles), *kv_injection.shapes(
            case
        )

    names = {"kv_injection": False} | ({"kv_injection_project": True} if tokens <= 64 else {})
    # not spilled: sine and cosine of large angles keep a few words there
    return Case(f"injection of {tokens}", names, make, {"sm_90": 64})


def mixture(tokens: int) -> Case:
    """A block of experts of a 30B-A3B model."""
    case = experts.Case(tokens, 8, 128, 2048, 768, jnp.dtype(jnp.bfloat16), jax.nn.silu)

    def make(chip):
        tiles = experts.TILES["cuda" if chip.startswith("sm") else "rocm"]
        return functools.partial(experts.launch, case=case, tiles=tiles), *experts_op.shapes(case)

    return Case(
        f"experts {tokens} tokens", {"experts_list": False, "experts_up": True, "experts_down": True}, make
    )


def grouped(tokens: int) -> Case:
    """The same block for many tokens."""
    case = grouped_experts.Case(tokens, 8, 128, 2048, 768, jnp.dtype(jnp.bfloat16), jax.nn.silu)

    def make(chip):
        tiles = grouped_experts.choices(case, "cuda" if chip.startswith("sm") else "rocm")[0]
        return functools.partial(grouped_experts.launch, case=case, tiles=tiles), *experts_op.shapes(case)

    names = {"grouped_experts_up": True, "grouped_experts_down": True}
    return Case(f"experts {tokens} tokens grouped", names, make)


def product(
    name: str, rows: int, outs: tuple[int, ...] = (4096,), width: int = 4096, dtype=jnp.bfloat16, **changes
) -> Case:
    """Few rows times the weights of an 8B model."""
    case = skinny_kernel.Case(rows, width, outs, jnp.dtype(dtype), jnp.dtype(dtype), **changes)

    def make(chip):
        return functools.partial(
            skinny_kernel.launch, case=case, plan=skinny.plans(case, chip)[0]
        ), *skinny.shapes(case)

    return Case(f"product {name}", {"skinny": dtype != jnp.float32}, make)


def streamed(name: str, rows: int, vocab: int = 151936, dtype=jnp.bfloat16, **changes) -> Case:
    """The head of an 8B model, of which the best ids are wanted."""
    case = head_kernel.Case(rows, 4096, vocab, changes.pop("size", vocab), jnp.dtype(dtype), **changes)

    def make(chip):
        tile = next(configs.head(chip, case.dtype.itemsize))
        return functools.partial(head_kernel.launch, case=case, tile=tile), *head.shapes(case)

    return Case(f"head {name}", {"head": dtype != jnp.float32}, make)


def walk(name: str, rank: int, **changes) -> Case:
    """The first two launches of DSpark's walk; later ones are like the second."""
    sizes = {
        "batch": 1,
        "drafts": 2,
        "vocab": 151936,
        "after": 151936,
        "size": 151936,
        "mapped": False,
    } | changes
    case = markov_kernel.Case(rank=rank, dtype=jnp.dtype(jnp.bfloat16), **sizes)

    def make(chip):
        plan = markov.plans(case, chip)[0]
        return functools.partial(markov_kernel.launch, case=case, plan=plan), *markov.shapes(case)

    return Case(f"walk {name}", {"markov": True}, make)


def cases() -> list[Case]:
    """All of them."""
    verify = View(scale=128**-0.5, causal=True)
    found = [
        attention("d64", size=64),
        attention("d80", size=80, heads=8),
        attention("d96", size=96, rows=8),
        attention("d128 one row", rows=1),
        attention("d128 8 rows", rows=8),
        attention("d128"),
        attention("d128 32 rows", rows=32),
        attention("d256 8 rows", size=256, heads=16, kv_heads=2, rows=8),
        attention("d256", size=256, heads=16, kv_heads=2),
        attention("d512 8 rows", size=512, heads=16, kv_heads=2, rows=8),
        attention("verify 17 rows", verify, rows=17, own=False),
        attention("window and soft cap", View(128**-0.5, False, window=1024, softcap=50.0)),
        attention("window from the anchor", View(128**-0.5, False, window=1024, window_from="anchor")),
        attention("ring", View(128**-0.5, True, window=1024), own=False, ring=True, slots=1040),
        *decoding(),
    ]
    gemma = Heads(RopeConfig(128, 1e6, span=512), 1e-6, wide=True, value_norm=True)
    found += [injection(1), injection(8), injection(64), injection(256)]
    found += [
        dataclasses.replace(
            injection(16, size=512, kv_heads=2, own_values=False, heads=gemma), name="injection d512"
        )
    ]
    heads, normed = (4096, 1024, 1024), {"normed": True, "eps": 1e-6}
    gated = {"outs": (12288, 12288), "activation": jax.nn.silu} | normed
    found += [
        product("of one row", 1),
        product("down", 8, width=12288),
        product("of 64 rows", 64),
        product("heads", 1, heads, **normed),
        product("heads of 32 rows", 32, heads, **normed),
        product("heads of two normed pieces", 1, heads, 8192, **normed, pieces=2),
        product("gated", 16, **gated),
        product("gated of 64 rows", 64, **gated),
        product("float32", 8, dtype=jnp.float32),
        product("float32 gated", 16, dtype=jnp.float32, **gated),
        streamed("of 8 rows", 8),
        streamed("of 64 rows, capped, with probabilities", 64, size=151669, softcap=30.0, lse=True),
        streamed("normed", 1, 32000, normed=True, eps=1e-6),
        streamed("float32", 1, dtype=jnp.float32),
        walk("of rank 256", 256),
        walk("of rank 64 over 17 rows", 64, batch=17, after=32000, size=32000, mapped=True),
    ]
    return [*found, mixture(1), mixture(16), grouped(128), grouped(1024), grouped(2048)]
