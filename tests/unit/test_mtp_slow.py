"""Qwen's MTP layer against its float64 derivation: what drafts were drawn from, each after the ones before it."""

import jax
import jax.numpy as jnp
import mtp_files
import numpy as np
import pytest
from mtp_reference import Slow

import specjax
from specjax import registry
from specjax.types import TapSpec

K, PROMPTS = 3, [[3, 1, 4, 1, 5, 2, 6, 5, 3, 5], [2], [6, 5, 4, 3]]


def states(params, tokens, tap: int | None) -> np.ndarray:
    """The target's states after its final norm, or a residual stream, from one pass."""
    family, cfg = registry.target(params.meta.family), params.meta.target_cfg

    @jax.jit
    def run(p, tokens):
        rows, size = tokens.shape
        cache = family.init_cache(cfg, rows, size, 1, jnp.float32)
        pos = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), tokens.shape)
        full = jnp.full(rows, size, jnp.int32)
        out = family.forward(p, cfg, tokens, pos, full, cache, TapSpec((cfg.num_layers,), True), "extend")
        return out.hidden if tap is None else out.taps[tap]

    return np.asarray(run(params.target, tokens), np.float64)


@pytest.mark.parametrize(("kind", "state"), [("qwen, experts", "normed"), ("qwen", "raw")])
def test_distributions_of_every_draft(kind, state, tmp_path):
    """TAP.5, TAP.8, DST.2: embedding before state, all norms, gates per head, partial rope, experts; the state is the
    one after the target's last norm unless asked otherwise, its place counts, the normed output is recycled."""
    folder = mtp_files.folder(tmp_path / "m", kind)
    config = {"k": K, "drafting": "probabilistic", "state": state}
    params = specjax.load(folder, drafter="mtp", dtype="float32", drafter_config=config)
    assert params.meta.drafter_cfg.tap == (None if state == "normed" else params.meta.target_cfg.num_layers)
    state = specjax.start(params, PROMPTS, k=K, temperature=1.0, seed=1, max_new_tokens=5)
    proposal = jax.jit(lambda params, state: specjax.draft_step(params, state, k=K)[0])(params, state)
    hidden = states(params, state.tokens[:, :16], params.meta.drafter_cfg.tap)
    hf = mtp_files.config(kind)
    for b, length in enumerate(np.asarray(state.length)):
        slow = Slow(mtp_files.layer(kind), hf, params.target.embed, params.target.head)
        for p in range(length - 1):
            logits, recycled = slow.row(hidden[b, p], int(state.tokens[b, p + 1]))
        for step, token in enumerate(proposal.tokens[b].tolist()):
            if step:
                logits, recycled = slow.row(recycled, int(proposal.tokens[b, step - 1]))
            wanted = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
            assert np.ptp(wanted) > 3
            np.testing.assert_allclose(np.log(proposal.q[b, step]), wanted, atol=1e-4, rtol=0)
            assert 0 <= token < mtp_files.VOCAB
