"""Targets loaded from safetensors give transformers' logits and residuals, however they are fed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parity import reference

from specjax import checkpoints, registry
from specjax.types import TapSpec

ATOL = 1e-4  # float32, logits of about +-2.5
SLOTS = 40


class Runner:
    """The model under test with its cache; logits and taps of one block per call."""

    def __init__(self, loaded, rows: int):
        self.module, self.cfg = registry.target(loaded.family), loaded.cfg
        self.weights = loaded.weights
        self.taps = TapSpec(tuple(range(self.cfg.num_layers + 1)), hidden=True)
        self.cache = self.module.init_cache(self.cfg, rows, SLOTS, 12, jnp.float32)

    def step(self, tokens, start, valid, mode):
        tokens = jnp.asarray(tokens, jnp.int32)
        pos = jnp.asarray(start, jnp.int32)[:, None] + jnp.arange(tokens.shape[1])
        run = _compiled(self.module, self.cfg, self.taps, mode)
        logits, out = run(self.weights, tokens, pos, jnp.asarray(valid, jnp.int32), self.cache)
        self.cache = out.cache
        return np.asarray(logits), out

    def commit(self, emitted):
        self.cache = self.module.commit(self.cfg, self.cache, jnp.asarray(emitted, jnp.int32))


@functools.cache
def _compiled(module, cfg, taps, mode):
    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiles faster
    def run(weights, tokens, pos, valid, cache):
        out = module.forward(weights, cfg, tokens, pos, valid, cache, taps, mode)
        return module.unembed(weights, cfg, out.hidden), out

    return run


#: Variants that differ in single layers only: fed whole, and not in every other way as well.
WHOLE_ONLY = {"llama3_rope", "llama_bias", "qwen3_yarn", "qwen3_moe_mixed"}


@pytest.fixture(scope="module", params=list(reference.MODELS))
def any_case(request, tmp_path_factory):
    return _case(request, tmp_path_factory)


@pytest.fixture(scope="module", params=[m for m in reference.MODELS if m not in WHOLE_ONLY])
def case(request, tmp_path_factory):
    return _case(request, tmp_path_factory)


def _case(request, tmp_path_factory):
    model = reference.build(request.param)
    folder = reference.save(model, tmp_path_factory.mktemp(request.param))
    ids = np.random.default_rng(1).integers(0, 128, (3, 21))
    loaded = checkpoints.load_target(checkpoints.hub.resolve(folder), jnp.float32)
    return loaded, reference.answer(model, ids)


def compare(got, want, start, rows, width):
    """Rows of a block that begins at ``start[b]`` and has ``width[b]`` real positions."""
    logits, out = got
    for b in rows:
        there, here = slice(start[b], start[b] + width[b]), slice(0, width[b])
        np.testing.assert_allclose(logits[b, here], want.logits[b, there], atol=ATOL, rtol=0)
        np.testing.assert_allclose(out.hidden[b, here], want.hidden[b, there], atol=ATOL, rtol=0)
        for j, residual in enumerate(want.residuals):
            np.testing.assert_allclose(
                out.taps[j][b, here], residual[b, there], atol=ATOL, rtol=0, err_msg=f"residual {j}"
            )


def test_full_forward(any_case):
    loaded, want = any_case
    run = Runner(loaded, 3)
    got = run.step(want.ids, [0] * 3, [21] * 3, "extend")
    assert set(got[1].taps) == set(range(loaded.cfg.num_layers + 1))
    assert got[0].dtype == np.float32
    compare(got, want, [0] * 3, range(3), [21] * 3)


def test_one_position_at_a_time(case):
    loaded, want = case
    run = Runner(loaded, 3)
    for t in range(10):
        got = run.step(want.ids[:, t : t + 1], [t] * 3, [1] * 3, "verify")
        run.commit([1] * 3)
        compare(got, want, [t] * 3, range(3), [1] * 3)


def prefill(run, want, lengths):
    """Right-padded prompt; padding holds token ids that must not matter."""
    tokens = np.where(np.arange(12) < np.asarray(lengths)[:, None], want.ids[:, :12], 77)
    return run.step(tokens, [0] * len(lengths), lengths, "extend")


def test_blocks_at_ragged_offsets(case):
    """Rows of different length: a right-padded prompt, then blocks that begin at each row's own end."""
    loaded, want = case
    run, length = Runner(loaded, 3), np.array([9, 5, 12])
    compare(prefill(run, want, length), want, [0] * 3, range(3), length)
    for _ in range(3):
        at = np.minimum(length, 21 - 4)  # a row that is through repeats its last block
        tokens = np.stack([want.ids[b, at[b] : at[b] + 4] for b in range(3)])
        got = run.step(tokens, at, [4] * 3, "verify")
        run.commit([4] * 3)
        compare(got, want, at, range(3), [4] * 3)
        length = at + 4


def test_after_rollback(case):
    """Rejected entries of a block leave no trace (KVR): garbage first, then the real tokens over it."""
    loaded, want = case
    run, length = Runner(loaded, 3), np.array([9, 5, 12])
    prefill(run, want, length)
    garbage = np.random.default_rng(2).integers(0, 128, (3, 4))
    kept = np.array([0, 1, 2])  # positions of the block that were right
    tokens = np.stack([want.ids[b, length[b] : length[b] + 4] for b in range(3)])
    run.step(np.where(np.arange(4) < kept[:, None], tokens, garbage), length, [4] * 3, "verify")
    run.commit(kept)
    length = length + kept
    tokens = np.stack([want.ids[b, length[b] : length[b] + 4] for b in range(3)])
    compare(run.step(tokens, length, [4] * 3, "verify"), want, length, range(3), [4] * 3)


def test_rows_do_not_touch_each_other(case):
    """A row's block gives the same bits whatever the other rows hold (BAT)."""
    loaded, want = case
    first, second = Runner(loaded, 3), Runner(loaded, 3)
    changed = np.concatenate([want.ids[:1], (want.ids[1:] + 5) % 128])
    a, _ = first.step(want.ids, [0] * 3, [21] * 3, "extend")
    b, _ = second.step(changed, [0] * 3, [21, 3, 0], "extend")
    np.testing.assert_array_equal(a[0], b[0])
