"""Block attention: interpreted it equals a float64 loop on ragged contexts whose unseen slots are not numbers (KRN.3,
KRN.5, PEER.10), and the table says what runs and why (KRN.1, 2, 7, 8)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.cache import RingKV
from specjax.kernels import (
    block_attention as entry,
    block_attention_kernel as kernel,
    block_attention_plan as plans,
    configs,
    dispatch,
)
from specjax.kernels.block_attention_op import View, attend_block, own_visible, past_visible, reference

FULL, CAUSAL = View(0.2, False), View(0.2, True)


def inputs(
    view, rows=3, own=True, batch=3, heads=4, groups=2, size=16, slots=70, dtype=jnp.float32, ring=None
):
    """Ragged: an empty context (or one block alone), a full cache, and something between. NaN where nobody sees."""
    rng = np.random.default_rng(rows)
    make = lambda *s: jnp.asarray(rng.standard_normal(s), dtype)  # noqa: E731
    start = rng.integers(0, slots - rows + 1, batch)
    start[:2] = (0, slots - rows)[: min(2, batch)]
    start, positions = jnp.asarray(start, jnp.int32), None
    end = start if own else start + rows
    if ring is not None:
        start, end, positions = ring
    k, v = make(batch, groups, slots, size), make(batch, groups, slots, size)
    seen = past_visible(view, rows, start, end, slots, positions).any(1)[:, None, :, None]
    k, v = jnp.where(seen, k, jnp.nan), jnp.where(seen, v, jnp.nan)
    block = (make(batch, rows, groups, size), make(batch, rows, groups, size)) if own else None
    return make(batch, rows, heads, size), k, v, start, end, block, positions


def loop(q, k, v, start, end, block, positions, view):
    """One query and head after the other, float64."""
    past, own = (
        past_visible(view, q.shape[1], start, end, k.shape[2], positions),
        own_visible(view, q.shape[1]),
    )
    q, k, v, past, own = (np.asarray(x, np.float64) for x in (q, k, v, past, own))
    out, share = np.zeros(q.shape), q.shape[2] // k.shape[1]
    for b, n, h in np.ndindex(q.shape[:3]):
        g, seen = h // share, past[b, n] > 0
        keys, values = k[b, g][seen], v[b, g][seen]
        if block is not None:
            mine = own[n] > 0
            keys = np.concatenate([keys, np.asarray(block[0], np.float64)[b, mine, g]])
            values = np.concatenate([values, np.asarray(block[1], np.float64)[b, mine, g]])
        if len(keys):
            scores = keys @ q[b, n, h] * view.scale
            scores = view.softcap * np.tanh(scores / view.softcap) if view.softcap else scores
            weights = np.exp(scores - scores.max())
            out[b, n, h] = weights @ values / weights.sum()
    return out


def interpreted(arrays, view, most_rows=64, programs=5, tile=None):
    q, k, v, _, _, block, positions = arrays
    case = entry.case(q, k, v, block, positions, view)
    rows = min(plans.power(case.packed, plans.LEAST), most_rows)
    plan = plans.Plan(case, tile or configs.Attention(16, 4, 2, least=1), rows, programs)
    return np.asarray(jax.jit(lambda *a: kernel.launch(*a, plan=plan, interpret=True))(*arrays))


def compare(view, most_rows=64, programs=5, atol=2e-6, **changes):
    arrays = inputs(view, **changes)
    np.testing.assert_allclose(interpreted(arrays, view, most_rows, programs), loop(*arrays, view), atol=atol)


def test_a_drafted_block_equals_a_loop():
    """Stretches of the list begin and end within rows of the batch; an empty context; head size padded."""
    compare(FULL, size=24, rows=5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("view", "changes"),
    [
        (CAUSAL, {"own": False, "rows": 17, "most_rows": 16}),  # stacks of query rows
        (CAUSAL, {"own": False, "rows": 1, "programs": 1}),
        (CAUSAL, {"own": True, "rows": 2, "programs": 40}),  # more programs than tiles
        (View(0.2, True, window=20, softcap=5.0), {"own": False}),
        (View(0.2, True, window=64), {"own": False, "batch": 2}),
        (View(0.2, False, window=20, window_from="anchor"), {}),
        (View(0.2, False, window=4), {"rows": 9, "programs": 3}),
        (View(0.2, False, window=1), {"rows": 2}),
        (FULL, {"size": 256, "batch": 1, "programs": 9}),  # no loop of its own for unmasked tiles
        (FULL, {"heads": 3, "groups": 1, "batch": 5, "slots": 33}),
        (FULL, {"batch": 1, "heads": 1, "groups": 1, "slots": 16, "rows": 1, "programs": 2}),
    ],
)
def test_blocks_equal_a_loop(view, changes):
    compare(view, **changes)


@pytest.mark.long
def test_a_verified_block_in_a_ring():
    """What the cache itself makes of it: positions of another turn, rejected ones and empty slots."""
    rows, window, size, view = 3, 8, 16, View(0.2, True, window=8)
    ring = RingKV.create(2, 2, window, 4, size, jnp.float32)
    rng = np.random.default_rng(0)
    for first, many in ((0, 4), (4, 4), (6, 4), (9, rows)):  # the third replaces rejected positions
        k = jnp.asarray(rng.standard_normal((2, many, 2, size)), jnp.float32)
        start = jnp.asarray([first, 0], jnp.int32)
        pos = start[:, None] + jnp.arange(many, dtype=jnp.int32)
        ring = ring.extend(k, 2 * k, pos, jnp.full(2, many, jnp.int32), "verify")[-1]
    arrays = inputs(view, rows, False, 2, slots=window + 4, ring=(start, start + rows, ring.pos))
    np.testing.assert_allclose(interpreted(arrays, view), loop(*arrays, view), atol=2e-6)


@pytest.mark.long
def test_bfloat16_and_a_not_a_number_that_is_seen():
    """Rounded scores, float32 sums; NaN of a key reaches the rows that see it and no other (KRN.3)."""
    arrays = inputs(CAUSAL, rows=4, own=False, dtype=jnp.bfloat16)
    np.testing.assert_allclose(interpreted(arrays, CAUSAL), loop(*arrays, CAUSAL), atol=2e-2)
    q, k, v, start, end, *rest = arrays
    bad = k.at[2, :, start[2] + 2].set(jnp.nan)
    got = np.isnan(interpreted((q, bad, v, start, end, *rest), CAUSAL).astype(np.float32)).any((2, 3))
    np.testing.assert_array_equal(got, [[False] * 4, [False] * 4, [False, False, True, True]])


def test_the_reference_equals_the_loop():
    for view, own in ((CAUSAL, False), (View(0.3, False, window=4, softcap=3.0), True)):
        q, k, v, *rest = inputs(view, own=own)
        k, v = jnp.nan_to_num(k), jnp.nan_to_num(v)  # caches keep no value that is not finite
        got = reference(q, k, v, *rest, view=view)
        np.testing.assert_allclose(got, loop(q, k, v, *rest, view), atol=2e-6)


def case(**changes):
    facts = {
        "batch": 4, "rows": 8, "heads": 32, "kv_heads": 8, "size": 128, "value_size": 128, "slots": 2048,
        "dtype": jnp.dtype(jnp.bfloat16), "own": True, "ring": False, "view": FULL,
    }  # fmt: skip
    return entry.Case(**facts | changes)


@pytest.mark.parametrize("chip", configs.CHIPS)
@pytest.mark.parametrize("size", [64, 80, 96, 128, 256, 512])
def test_tiles_fit_every_chip(chip, size):
    """KRN.1, KRN.4: local memory of the tiles in flight and threads, by arithmetic; compiled in test_kernel_rocm."""
    for rows in (1, 2, 9, 17):
        grids = entry.tiles(case(size=size, value_size=size, rows=rows, heads=16, kv_heads=2), chip)
        for plan in grids:
            configs.CHIPS[chip].check(plan.tile.warps)
            assert 2 * 2 * plan.case.padded * plan.tile.keys * plan.tile.stages <= configs.CHIPS[chip].local
            assert plan.rows * plan.stacks >= plan.case.packed
        assert grids[-1].tile.stages == 1  # KRN.2: ever smaller
        assert grids[-1].tile.keys == 16


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"rows": 65}, "65 rows"),  # KRN.7
        ({"size": 20, "value_size": 20}, "heads of 20 channels"),
        ({"value_size": 64}, "values of 64"),
        ({"dtype": jnp.dtype(jnp.float32)}, "float32"),
        ({"dtype": "mixed types"}, "different types"),
        ({"batch": 5000}, "batch of 5000"),
    ],
)
def test_what_the_kernel_refuses(changes, reason):
    said = entry.refuse(case(**changes))
    assert said is None if reason is None else reason in said


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H200 9.0", "sm_90"),
        ("gfx942:sramecc+:xnack-", "gfx942"),
        ("AMD Instinct MI355X", "gfx950"),
        ("TPU v5", "default"),
        ("", "default"),
    ],
)
def test_every_device_name_has_tiles(name, kind):
    """KRN.8."""
    assert configs.kind(name) == kind
    assert configs.kind() == "default"  # this machine's


def test_on_a_cpu_the_reference_runs_and_pallas_is_refused(monkeypatch):
    arrays = inputs(FULL, batch=1, rows=1, heads=1, groups=1)
    arrays = arrays[0], *(jnp.nan_to_num(x) for x in arrays[1:3]), *arrays[3:]
    got = attend_block(*arrays, view=FULL)
    np.testing.assert_allclose(got, loop(*arrays, FULL), atol=2e-6)
    with pytest.raises(ValueError, match=r"needs a GPU and JAX runs on cpu.*'auto' or 'xla'"):
        attend_block(*arrays, view=FULL, implementation="pallas")
    with pytest.raises(ValueError, match="kernels must be one of auto, pallas, xla, interpret, got 'fast'"):
        attend_block(*arrays, view=FULL, implementation="fast")
    monkeypatch.setenv("SPECJAX_KERNELS", "triton")
    with pytest.raises(ValueError, match="SPECJAX_KERNELS must be one of"):
        dispatch.wanted()


def test_smaller_tiles_are_tried_before_the_reference(monkeypatch):
    """KRN.2, KRN.6: a compiler's complaint about memory, then tiles that compile; and what doctor says of a refusal."""
    tried = []

    def compiles(plan):
        tried.append(plan.tile)
        if plan.tile.keys > 16:
            raise RuntimeError("Shared memory size limit exceeded")

    monkeypatch.setattr(entry, "compile_plan", compiles)
    monkeypatch.setattr(dispatch.platform, "backend", lambda: "cuda")
    monkeypatch.setattr(entry, "_built", {})
    monkeypatch.setattr(dispatch, "_refused", {})
    monkeypatch.setattr(configs, "kind", lambda: "sm_90")
    shapes = entry.shapes(case())
    facts = shapes[0], shapes[1], shapes[2], shapes[5], shapes[6], FULL
    try:
        assert dispatch.choose("block_attention", *facts).implementation == "kernel"
        assert [(t.keys, t.stages) for t in tried] == [(64, 3), (64, 2), (64, 1), (32, 1), (16, 1)]
        assert entry._plan(case(), "cuda").tile == tried[-1]
        assert entry._plan(case(), "rocm").tile == configs.ATTENTION["gfx942"][128, 64]
        wide = jax.ShapeDtypeStruct((4, 65, 32, 128), jnp.bfloat16)
        assert dispatch.choose("block_attention", wide, *facts[1:]).implementation == "reference"
        assert (
            "1 case(s) ran as the reference, the last for 65 rows"
            in dispatch.explain("block_attention").reason
        )
    finally:
        dispatch._failure.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("view", "changes"),
    [
        (FULL, {"rows": 16}),
        (CAUSAL, {"rows": 17, "own": False}),
        (View(0.1, False, window=100, softcap=20.0), {"rows": 8}),
        (View(0.1, True, window=100), {"rows": 2, "own": False, "size": 256}),
        (FULL, {"rows": 4, "size": 512}),
        (FULL, {"rows": 3, "size": 96, "batch": 32, "slots": 3000}),
    ],
)
def test_on_the_device(view, changes):
    """KRN.3, KRN.6: against float64, with NaN beyond the context."""
    sizes = {"batch": 3, "heads": 16, "groups": 2, "size": 128, "slots": 1000, "dtype": jnp.bfloat16}
    arrays = inputs(view, **sizes | changes)
    run = jax.jit(lambda *a: attend_block(*a, view=view, implementation="pallas"))
    got, want = np.asarray(run(*arrays), np.float64), loop(*arrays, view)
    assert np.linalg.norm(got - want) < 1e-2 * np.linalg.norm(want)
