"""The DFlash drafter: what it reads, what it caches, what it proposes."""

import dataclasses
import functools

import block_tiny as tiny
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.drafters import dflash, dflash2
from specjax.drafters.dflash_config import Convolution, Selection
from specjax.kernels.block_attention_op import past_visible
from specjax.types import AbsorbIn

PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6, 5], [8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6]]
DFLASH2 = {"conv": Convolution(2, 8), "selector": Selection(6, 4), "softcap": 8.0, "output_multiplier": 0.7}
KINDS = {
    "fill": {},
    "shift": {"layout": "shift", "rows": 4},
    "anchor window": {"window_from": "anchor", "causal": (False, False)},
    "reduced": {"draft_vocab": 10, "own_head": 10},
    "dflash2": DFLASH2,
}


@functools.cache
def params(kind: str = "fill"):
    return tiny.params(**KINDS[kind])


DRAFT = jax.jit(tiny.draft, static_argnums=1)


def rows_from(p, state, length, anchor):
    return jax.jit(tiny.dflash_rows)(p, state, tiny.context(length, anchor))


def test_two_hundred_rounds_of_rejections():
    """KVR.4: the proposal of every round is the one a fresh prefill of the committed tokens gives. KVR.3: nothing
    builds up. Rows are ragged and rejected independently."""
    p, k = params(), 4
    seen, state = tiny.forced_rounds(p, PROMPTS, 200, k)
    whole = [np.asarray(state.tokens[b, :n]).tolist() for b, n in enumerate(np.asarray(state.length))]
    room = state.tokens.shape[1]  # the same programs as for the short prompts
    fresh = specjax.start(p, whole, max_new_tokens=1, k=k, ignore_eos=True, max_len=room, prefill_chunk=16)
    for length, anchor, drafts in seen:
        again = DRAFT(p, k, fresh.drafter, tiny.context(length, anchor))
        assert again.tokens.tolist() == drafts.tolist()
    ours, theirs = (rows_from(p, s.drafter, state.length, tiny.anchors(state)) for s in (state, fresh))
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_chunks_of_a_prompt():
    """PFX.1: caches and first proposal do not depend on how the prompt is cut."""
    p, prompt = params(), [int(t) for t in np.random.default_rng(0).integers(0, tiny.VOCAB, 45)]
    one, many = (specjax.start(p, [prompt], max_new_tokens=8, prefill_chunk=c) for c in (64, 16))
    for a, b in zip(one.drafter, many.drafter, strict=True):
        np.testing.assert_allclose(a.k[:, :, :45], b.k[:, :, :45], atol=1e-5)
        np.testing.assert_allclose(a.v[:, :, :45], b.v[:, :, :45], atol=1e-5)
    first = [DRAFT(p, 4, s.drafter, tiny.context(s.length, tiny.anchors(s))).tokens for s in (one, many)]
    assert first[0].tolist() == first[1].tolist()


@pytest.mark.parametrize("mode", ["extend", "verify"])
def test_rows_beyond_keep_leave_no_trace(mode):
    """I7: positions at or beyond ``keep`` change nothing that is visible; with keep = 0 nothing at all is."""
    p, cfg = params(), params().meta.drafter_cfg
    rng = np.random.default_rng(2)
    state = dflash.init_state(cfg, 3, 16, 5, jnp.float32)
    state = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), state)
    start, keep = np.array([3, 0, 7]), np.array([2, 0, 5])
    pos = jnp.asarray(start[:, None] + np.arange(5), jnp.int32)
    taps = {j: jnp.asarray(rng.standard_normal((3, 5, 32)), jnp.float32) for j in cfg.taps}
    block = AbsorbIn(pos, pos, pos, jnp.asarray(keep, jnp.int32), None, taps, mode)
    after = jax.jit(functools.partial(dflash.absorb, p.drafter, tiny.shared(p), cfg))(state, block)
    for old, new in zip(state, after, strict=True):
        for b in range(3):
            gone = slice(start[b] + (5 if mode == "verify" else keep[b]), None)
            np.testing.assert_array_equal(old.k[b, :, : start[b]], new.k[b, :, : start[b]])
            np.testing.assert_array_equal(old.k[b, :, gone], new.k[b, :, gone])
            kept = new.k[b, :, start[b] : start[b] + keep[b]] - old.k[b, :, start[b] : start[b] + keep[b]]
            assert (np.abs(kept) > 0).all()


def test_garbage_beyond_the_anchor_is_invisible():
    """PEER.9: the context is what was committed before the anchor, whatever else the cache holds."""
    p, length = params(), np.array([6, 1, 13])
    state = specjax.start(p, PROMPTS, max_new_tokens=8).drafter
    slot = np.arange(state[0].k.shape[2])[:, None] >= length[:, None, None, None] - 1
    spoil = lambda x, value: jnp.where(slot, value, x)  # noqa: E731
    poisoned = tuple(kv.replace(k=spoil(kv.k, jnp.nan), v=spoil(kv.v, 1e30)) for kv in state)
    clean = rows_from(p, state, length, [1, 2, 3])
    np.testing.assert_array_equal(rows_from(p, poisoned, length, [1, 2, 3]), clean)
    assert np.isfinite(clean).all()
    alone = rows_from(p, jax.tree.map(lambda x: x[2:], state), length[2:], [3])  # I6
    np.testing.assert_allclose(alone[0], clean[2], atol=1e-5)


def test_block_inputs():
    """PEER.9: the anchor's raw row, then the mask's, both times the drafter's scale; or the file's own vector."""
    p = tiny.params(input_scale=3.0)
    embed, anchor = np.asarray(p.target.embed), jnp.array([4, 7])
    x = dflash.block_inputs(p.drafter, tiny.shared(p), p.meta.drafter_cfg, anchor)
    np.testing.assert_allclose(x[:, 0], 3 * embed[[4, 7]], rtol=1e-6)
    np.testing.assert_allclose(x[:, 1:], np.broadcast_to(3 * embed[tiny.VOCAB - 1], (2, 4, 32)), rtol=1e-6)
    p = tiny.params(input_scale=3.0, mask_embedding=True, own_embed=30)
    x = dflash.block_inputs(p.drafter, tiny.shared(p), p.meta.drafter_cfg, anchor)
    np.testing.assert_allclose(x[:, 0], 3 * np.asarray(p.drafter.embed)[[4, 7]], rtol=1e-6)
    np.testing.assert_array_equal(x[:, 1:], np.broadcast_to(p.drafter.mask, (2, 4, 32)))


@pytest.mark.parametrize("origin", ["row", "anchor"])
@pytest.mark.parametrize("causal", [True, False])
def test_what_each_row_sees(origin, causal):
    """TAP.6, PEER.10: the visible positions, counted out."""
    cfg = dataclasses.replace(
        params().meta.drafter_cfg, window_from=origin, causal=(False, causal), body=windows(4)
    )
    starts = np.array([0, 3, 10])
    for layer, window in enumerate((None, 4)):
        at = jnp.asarray(starts, jnp.int32)
        past = past_visible(dflash.view(cfg, layer), cfg.rows, at, at, 14)
        own = dflash.block_visible(cfg, layer)
        for b, row in np.ndindex(3, 5):
            place, start = starts[b] + row, starts[b]
            oldest = 0 if window is None else start - 4 if origin == "anchor" else place - 3
            assert np.flatnonzero(past[b, row]).tolist() == [j for j in range(14) if oldest <= j < start]
            near = [i for i in range(5) if window is None or origin == "anchor" or abs(i - row) < window]
            assert np.flatnonzero(own[row]).tolist() == [
                i for i in near if i <= row or layer == 0 or not causal
            ]


def windows(size: int):
    return dataclasses.replace(params().meta.drafter_cfg.body, windows=(None, size))


def test_number_of_proposals():
    """CTX.3: a block of N rows gives N - 1 drafts in layout "fill" and N in "shift", never more; the
    statistics say how many."""
    p, rows = params(), {"fill": 5, "shift": 4}
    out = specjax.decode(p, PROMPTS[0], max_new_tokens=30, ignore_eos=True)
    assert out.tokens == specjax.decode(tiny.target(), PROMPTS[0], max_new_tokens=30, ignore_eos=True).tokens
    assert len(out.stats.proposed_at) == 4
    for layout, n in rows.items():
        p = params(layout)
        assert (p.meta.drafter_cfg.rows, dflash.max_k(p.meta.drafter_cfg)) == (n, 4)
        with pytest.raises(ValueError, match=r"k=5.*at most 4"):
            specjax.decode(p, PROMPTS[0], k=5)
        with pytest.raises(ValueError, match="k must be from 1 to 4"):
            dataclasses.replace(p.meta.drafter_cfg, k=5)


def test_fewer_drafts_are_the_first_of_many():
    """All rows run however many drafts are wanted."""
    p = params()
    state = dflash.init_state(p.meta.drafter_cfg, 3, 8, 5, jnp.float32)
    whole, part = (DRAFT(p, k, state, tiny.context([3, 1, 2], [1, 2, 3])).tokens for k in (4, 2))
    assert whole[:, :2].tolist() == part.tolist()


@pytest.mark.parametrize("kind", ["fill", "reduced"])
def test_q_is_what_was_sampled(kind):
    """Every draft is the arg-max of log q plus its own noise; rows at temperature 0 are points, and of a reduced
    vocabulary q stays in it."""
    p, rows, k = params(kind), 6, 4
    keys = jax.random.split(jax.random.key(1), rows)
    temperature = jnp.array([1.0, 0.0, 0.5, 2.0, 1.0, 1.0])
    state = dflash.init_state(p.meta.drafter_cfg, rows, 8, 5, jnp.float32)
    ctx = tiny.context([3] * rows, [1, 1, 2, 3, 4, 4], temperature)
    got = DRAFT(p, k, state, ctx, keys)
    assert got.point.tolist() == [t == 0 for t in temperature.tolist()]
    np.testing.assert_allclose(got.q.sum(-1), 1, atol=1e-5)
    ids = np.arange(tiny.VOCAB) if got.q_ids is None else np.asarray(got.q_ids)
    drawn = noisy(keys, got.q, range(len(ids)))
    assert ids[drawn].tolist() == got.tokens.tolist()


def noisy(keys, q, places):
    """Arg-max of log q plus each row's and step's noise."""
    shape = (len(places),)
    noise = [[jax.random.gumbel(jax.random.fold_in(key, t), shape) for t in range(4)] for key in keys]
    with np.errstate(divide="ignore"):
        return np.argmax(np.log(np.asarray(q)) + np.asarray(noise), -1)


def test_selector_scores_follow_the_chosen_path():
    """DFlash2's q of a position is the softmax of its candidates' scores after the token chosen before."""
    p, rows = params("dflash2"), 5
    selector, cfg, rng = p.drafter.selector, p.meta.drafter_cfg.selector, np.random.default_rng(0)
    hidden = rng.standard_normal((rows, 4, 32)).astype(np.float32)
    logits = rng.standard_normal((rows, 4, tiny.VOCAB)).astype(np.float32)
    keys, temperature = jax.random.split(jax.random.key(3), rows), jnp.linspace(0.5, 1.5, rows)
    tokens, q = jax.jit(dflash2.walk, static_argnums=1)(
        selector, cfg, jnp.asarray(hidden), jnp.asarray(logits), jnp.arange(rows), keys, temperature
    )
    before, after, project = (
        np.asarray(x) for x in (selector.predecessor, selector.successor, selector.project)
    )
    previous = np.concatenate([np.arange(rows)[:, None], np.asarray(tokens)[:, :-1]], 1)
    for b, t in np.ndindex(rows, 4):
        ids = np.argsort(logits[b, t])[-cfg.top :]
        score = logits[b, t, ids] + after[ids] @ (before[previous[b, t]] * (project @ hidden[b, t]))
        weight = np.exp((score - score.max()) / float(temperature[b]))
        expected = np.zeros(tiny.VOCAB)
        expected[ids] = weight / weight.sum()
        np.testing.assert_allclose(q[b, t], expected, atol=1e-4)
    best = np.asarray(jax.lax.top_k(logits, cfg.top)[1])
    drawn = noisy(keys, np.take_along_axis(np.asarray(q), best, -1), range(cfg.top))
    assert np.take_along_axis(best, drawn[..., None], -1)[..., 0].tolist() == tokens.tolist()


def test_reduced_vocabulary_decodes_exactly():
    """VOC.1: draft ids are mapped to target ids, in the proposal and in q; the output is the target's."""
    p = params("reduced")
    ids = np.array([1, 2, 3, 5, 8, 13, 21, 22, 23, 0])
    p = p.replace(drafter=p.drafter.replace(d2t=jnp.asarray(ids - np.arange(10), jnp.int32)))
    plain = specjax.decode(tiny.target(), PROMPTS[0], max_new_tokens=30, ignore_eos=True)
    assert specjax.decode(p, PROMPTS[0], max_new_tokens=30, ignore_eos=True).tokens == plain.tokens
    dstate = dflash.init_state(p.meta.drafter_cfg, 2, 8, 5, jnp.float32)
    ctx = tiny.context([3, 3], [1, 2], jnp.array([1.0, 0.5]))
    proposal = DRAFT(p, 4, dstate, ctx, jax.random.split(jax.random.key(0), 2))
    assert set(np.asarray(proposal.tokens).ravel().tolist()) <= set(ids.tolist())
    assert proposal.q_ids.tolist() == ids.tolist()


def test_own_head_with_other_padding():
    """VOC.3: a head with fewer or more padding rows than the target's proposes ids of the target only."""
    for size in (tiny.VOCAB - 3, tiny.VOCAB + 3):
        p = tiny.params(own_head=size)
        logits = dflash.unembed(p.drafter, tiny.shared(p), p.meta.drafter_cfg, jnp.ones((1, 2, 32)))
        assert logits.shape[-1] == tiny.VOCAB
        assert (np.isfinite(logits).sum(-1) == min(size, tiny.VOCAB)).all()
