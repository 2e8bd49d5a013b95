"""A target fed in every way a decoder feeds it, against what transformers computes for the whole text."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax import checkpoints, registry
from specjax.types import TapSpec

ATOL = 1e-4  # float32, logits of about +-2.5
SLOTS, Q_MAX, LENGTH = 40, 12, 21


def load(folder, dtype=jnp.float32):
    return checkpoints.load_target(checkpoints.hub.resolve(folder), dtype)


class Runner:
    """The model under test with its cache; logits and taps of one block per call."""

    def __init__(self, loaded, rows: int = 3):
        self.module, self.cfg = registry.target(loaded.family), loaded.cfg
        self.weights = loaded.weights
        self.taps = TapSpec(tuple(range(self.cfg.num_layers + 1)), hidden=True)
        self.cache = self.module.init_cache(self.cfg, rows, SLOTS, Q_MAX, jnp.float32)

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


def compare(got, want, start, width):
    """Rows of a block that begins at ``start[b]`` and has ``width[b]`` positions that count."""
    logits, out = got
    for b in range(len(start)):
        there, here = slice(start[b], start[b] + width[b]), slice(0, width[b])
        np.testing.assert_allclose(logits[b, here], want.logits[b, there], atol=ATOL, rtol=0)
        np.testing.assert_allclose(out.hidden[b, here], want.hidden[b, there], atol=ATOL, rtol=0)
        for j, residual in enumerate(want.residuals):
            np.testing.assert_allclose(
                out.taps[j][b, here], residual[b, there], atol=ATOL, rtol=0, err_msg=f"residual {j}"
            )


def whole(loaded, want):
    """All positions in one pass."""
    run = Runner(loaded)
    got = run.step(want.ids, [0] * 3, [LENGTH] * 3, "extend")
    assert set(got[1].taps) == set(range(loaded.cfg.num_layers + 1))
    assert got[0].dtype == np.float32
    compare(got, want, [0] * 3, [LENGTH] * 3)


def one_by_one(loaded, want, count: int = 10):
    """Plain decoding from an empty cache."""
    run = Runner(loaded)
    for t in range(count):
        got = run.step(want.ids[:, t : t + 1], [t] * 3, [1] * 3, "verify")
        run.commit([1] * 3)
        compare(got, want, [t] * 3, [1] * 3)


def prefill(run: Runner, want, lengths):
    """Right-padded prompt in two chunks; padding holds token ids that must not matter."""
    for at in (0, 6):
        valid = np.clip(np.asarray(lengths) - at, 0, 6)
        tokens = np.where(np.arange(6) < valid[:, None], want.ids[:, at : at + 6], 77)
        got = run.step(tokens, [at] * 3, valid, "extend")
        compare(got, want, [at] * 3, valid)
    return np.array(lengths)


def block(run: Runner, want, length, right, rng):
    """One verified block of four: ``right[b]`` tokens of the text, then garbage; those of them are kept that are
    right. Returns the new lengths."""
    right = np.minimum(right, LENGTH - length)
    index = np.minimum(length[:, None] + np.arange(4), LENGTH - 1)
    tokens = np.where(
        np.arange(4) < right[:, None], np.take_along_axis(want.ids, index, 1), rng.integers(0, 128, (3, 4))
    )
    compare(run.step(tokens, length, [4] * 3, "verify"), want, length, right)
    run.commit(right)
    return length + right


def ragged_blocks(loaded, want):
    """Rows of different length, blocks that begin at each row's own end; rows that are through commit nothing."""
    run, rng = Runner(loaded), np.random.default_rng(2)
    length = prefill(run, want, [9, 5, 12])
    while (length < LENGTH).any():
        length = block(run, want, length, np.array([4, 4, 4]), rng)


def rollbacks(loaded, want, seed: int = 3):
    """KVR.5, KVR.6: blocks with any number of right tokens, none included; what was rejected leaves no trace."""
    run, rng = Runner(loaded), np.random.default_rng(seed)
    length = prefill(run, want, [3, 5, 7])
    while (length < LENGTH).any():
        length = block(run, want, length, rng.integers(0, 4, 3), rng)


def rows_apart(loaded, want):
    """BAT: a row's block gives the same bits whatever the other rows hold."""
    first, second = Runner(loaded), Runner(loaded)
    changed = np.concatenate([want.ids[:1], (want.ids[1:] + 5) % 128])
    a, _ = first.step(want.ids, [0] * 3, [LENGTH] * 3, "extend")
    b, _ = second.step(changed, [0] * 3, [LENGTH, 3, 0], "extend")
    np.testing.assert_array_equal(a[0], b[0])
