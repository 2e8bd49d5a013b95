"""The Gemma 4 assistant in the loop: what it proposes after any rejection, in batches, chunks, over ring wraps."""

import functools
import json

import assistant_tiny as tiny
import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import registry
from specjax.config import Meta
from specjax.drafters import assistant
from specjax.types import AbsorbIn, Ctx, TapSpec

ROUNDS = 200
PROMPTS = [[3, 1, 4, 1, 5, 2, 0, 5, 3, 5], [2], [5, 4, 3, 2, 1, 0, 5, 4, 3, 2, 1, 0, 1, 1, 2, 3, 5]]
ROOM = {"max_new_tokens": 400, "max_len": 512, "prefill_chunk": 16, "ignore_eos": True}
LONG = pytest.mark.long


@functools.partial(jax.jit, static_argnums=2)
def one_round(params, state, k):
    proposal, state = specjax.draft_step(params, state, k=k)
    after, verdict = specjax.verify_step(params, state, proposal)
    return proposal, after, verdict.accepted


def start(params, prompts=PROMPTS, k=3, **more):
    """The texts are random, since greedy ones of so small a model repeat themselves; drafts are the likeliest."""
    return specjax.start(params, prompts, k=k, temperature=8.0, seed=1, **ROOM | more)


def walk(params, rounds: int, k: int = 3):
    """(final state, per round: lengths, drafts, feedback, accepted) of all prompts as one batch."""
    state, seen = start(params, k=k), []
    for _ in range(rounds):
        before = state
        proposal, state, accepted = one_round(params, state, k)
        seen.append((before.length, proposal.tokens, before.drafter.feedback, accepted))
    return state, [np.stack(x) for x in zip(*seen, strict=True)]


def fresh(params, tokens, k: int):
    """``proposed(lengths)``: feedback and drafts of the committed texts alone, from one pass over all of them into
    caches that forget nothing."""
    meta, size = params.meta, tokens.shape[1]
    family, cfg = registry.target(meta.family), meta.target_cfg
    rows = len(tokens)

    @jax.jit
    def whole(params):
        cache = family.init_cache(cfg, rows, size, size, jnp.float32)
        pos = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), tokens.shape)
        full = jnp.full(rows, size, jnp.int32)
        out = family.forward(
            params.target, cfg, tokens, pos, full, cache, TapSpec(hidden=True, kv=True), "extend"
        )
        return out.hidden, out.cache

    @jax.jit
    def proposed(params, hidden, cache, length):
        at = lambda x, i: jnp.take_along_axis(x, i.reshape(-1, *[1] * (x.ndim - 1)), 1)[:, 0]  # noqa: E731
        view = functools.partial(family.kv_view, params.target, cfg, cache)
        ctx = Ctx(tokens, length, at(tokens, length - 1), length > 0, None, view)
        state = assistant.State(at(hidden, length - 2))
        lent = family.shared(params.target, cfg)
        drafts = assistant.draft(params.drafter, lent, meta.drafter_cfg, k, state, ctx, None)[0].tokens
        return state.feedback, drafts

    return functools.partial(proposed, params, *whole(params))


def check(params, rounds: int, k: int = 3):
    """Every round of a walk against the committed text; returns what was accepted."""
    state, (lengths, drafts, feedback, accepted) = walk(params, rounds, k)
    proposed = fresh(params, state.tokens[:, : int(lengths.max()) + k + 2], k)
    for i, length in enumerate(lengths):
        held, tokens = proposed(jnp.asarray(length))
        np.testing.assert_allclose(feedback[i], held, atol=1e-3, rtol=1e-3)
        assert np.array_equal(drafts[i], tokens), i
    assert lengths.min(0).max() + rounds > 3 * tiny.WINDOW
    return accepted


@pytest.mark.parametrize("name", ["gemma4_small", pytest.param("gemma4_moe", marks=LONG)])
def test_200_rounds_of_rejections_leave_no_trace(name):
    """KVR.4, KVR.3, KVR.2, BAT.4: in every round state and proposal are those of the committed text alone, while
    rings wrap dozens of times; rows accept different numbers."""
    accepted = check(tiny.drafted(name, drafting="greedy"), ROUNDS)
    assert {*accepted.ravel().tolist()} == {0, 1, 2, 3}


KINDS = {
    "the smallest ring": ({}, 1),
    "the position before": ({"position_offset": 0}, 3),
    "clusters": (tiny.CLUSTERS, 3),
    "a shorter window": ({"text": {"sliding_window": 3}, "softcap": 2.0}, 3),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_rounds_of_other_kinds(kind):
    """KVR.4, KVR.1, TAP.6: also where a ring is just long enough, and the window reaches one further back."""
    changes, k = KINDS[kind]
    check(tiny.drafted("gemma4_moe", drafting="greedy", **changes), 40, k)


def test_chunks_and_rows():
    """PFX.1, BAT.1, BAT.6: proposal and state depend neither on how prompts are cut nor on the rows beside."""
    params = tiny.drafted(drafting="greedy")
    whole, parts = start(params), start(params, prefill_chunk=4)
    expected = one_round(params, whole, 3)[0].tokens
    np.testing.assert_allclose(parts.drafter.feedback, whole.drafter.feedback, atol=1e-5)
    assert np.array_equal(one_round(params, parts, 3)[0].tokens, expected)
    for b, prompt in enumerate(PROMPTS):
        alone = start(params, [prompt] * 3)
        assert np.array_equal(one_round(params, alone, 3)[0].tokens[:1], expected[b : b + 1])


def test_rejected_entries_are_not_seen():
    """KVR.2, I2: whatever lies in the target's caches at the anchor's position or beyond, the proposal is the same."""
    params = tiny.drafted(drafting="greedy")
    state = one_round(params, one_round(params, start(params), 3)[1], 3)[1]

    def spoil(x):
        if x.ndim != 4:
            return x
        rings = [kv.pos for kv in state.target if hasattr(kv, "pos") and kv.pos.shape[1] == x.shape[2]]
        pos = rings[0] if rings else jnp.broadcast_to(jnp.arange(x.shape[2]), (x.shape[0], x.shape[2]))
        return jnp.where((pos >= state.length[:, None] - 1)[:, None, :, None], 1e30, x)

    spoiled = state.replace(target=jax.tree.map(spoil, state.target))
    assert any(bool((x > 1e29).any()) for x in jax.tree.leaves(spoiled.target))
    expected = one_round(params, state, 3)[0].tokens
    assert np.array_equal(one_round(params, spoiled, 3)[0].tokens, expected)


def test_nothing_kept_changes_nothing():
    """I4, BAT.5: a block with ``keep`` 0 leaves the state of its row; others keep the state of their last position."""
    params = tiny.drafted()
    cfg, keep = params.meta.drafter_cfg, jnp.array([0, 2, 4])
    old = assistant.State(jnp.arange(96, dtype=jnp.float32).reshape(3, 32))
    hidden = jnp.asarray(np.random.default_rng(0).standard_normal((3, 4, 32)), jnp.float32)
    hidden = jnp.where((jnp.arange(4) >= keep[:, None])[..., None], jnp.nan, hidden)
    zero = jnp.zeros((3, 4), jnp.int32)
    lent = registry.target("gemma4").shared(params.target, params.meta.target_cfg)
    for mode in ("verify", "extend"):
        block = AbsorbIn(zero, zero, zero, keep, hidden, {}, mode)
        new = assistant.absorb(params.drafter, lent, cfg, old, block).feedback
        assert np.array_equal(new, [old.feedback[0], hidden[1, 1], hidden[2, 3]])


def test_greedy_ids_are_plain_ones():
    """GRD.1, MET.2: some drafts are accepted and the text is the target's."""
    call = {"max_new_tokens": 60, "max_len": 96, "ignore_eos": True}
    out = specjax.decode(tiny.drafted(), PROMPTS, k=3, **call)
    assert out.tokens == specjax.decode(tiny.target(), PROMPTS, **call).tokens
    assert 0 < out.total.accepted < out.total.proposed


@pytest.mark.long
def test_a_position_one_off_shows_in_what_is_accepted():
    """TAP.6, PEER.9: the texts are the same, the counts are not."""
    right, wrong = (walk(tiny.drafted(drafting="greedy", position_offset=i), 40)[1] for i in (1, 0))
    assert not np.array_equal(right[3], wrong[3])


def test_sampled_drafts_keep_what_they_were_drawn_from():
    """DST.2, DST.6: q sums to one and is nothing outside the chosen clusters; a row at temperature 0 is a point."""
    params = tiny.drafted(**tiny.CLUSTERS)
    state = specjax.start(params, PROMPTS, k=3, temperature=[0.7, 0.0, 1.5], seed=[1, 2, 3], **ROOM)
    got = jax.jit(lambda p, s: specjax.draft_step(p, s, k=3)[0])(params, state)
    assert got.q_ids is None
    assert np.array_equal(got.point, [False, True, False])
    np.testing.assert_allclose(got.q.sum(-1), 1, atol=1e-5)
    assert ((np.asarray(got.q[::2]) > 0).sum(-1) == 4).all()  # two clusters of two
    picked = np.take_along_axis(np.asarray(got.q), np.asarray(got.tokens)[..., None], 2)
    assert (picked > 0).all()
    assert (picked[1] == 1).all()


@pytest.mark.long
def test_low_precision_and_saving():
    """NUM.2, CKP.7: bfloat16, an assistant in another type than its target; settings survive saving."""
    wide = tiny.drafted(**tiny.CLUSTERS)
    narrow = specjax.cast(wide, "bfloat16")
    for params in (narrow, narrow.replace(drafter=wide.drafter)):
        got = jax.eval_shape(lambda p, s: specjax.draft_step(p, s, k=3)[0], params, start(narrow))
        assert got.q.dtype == jnp.float32
    assert Meta.from_json(json.loads(json.dumps(wide.meta.to_json()))) == wide.meta


@pytest.mark.long
@pytest.mark.parametrize("rows", [15, 18])
def test_padding_of_vocabularies(rows):
    """VOC.3, VOC.5: an assistant with fewer or more rows of padding proposes no id that either lacks."""
    params = tiny.drafted(vocab=16, text={"vocab_size": rows})
    got = jax.jit(lambda p, s: specjax.draft_step(p, s, k=3)[0])(params, start(params))
    assert got.q.shape[-1] == min(rows, 16)
    assert (got.q_ids is None) == (rows > 16)
    assert np.max(got.tokens) < min(rows, 16)


WRONG = {
    "width of the target": ({"backbone_hidden_size": 40}, "width 40 .*, this one is 32"),
    "other vocabulary": ({"text": {"vocab_size": 40}}, "40 tokens, the target's has 6"),
    "heads of keys": ({"text": {"num_key_value_heads": 2}}, "full_attention: .*kv_heads=2, the target's have 1"),
    "size of heads": ({"text": {"global_head_dim": 16}}, "full_attention: .*head_dim=16, the target's have 32"),
    "window": ({"text": {"sliding_window": 9}}, "looks back 9 positions, the target keeps 6"),
    "rope": (
        {"text": {"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 5e4}}}},
        "sliding_attention: rope of the assistant",
    ),
    "inputs per layer": ({"text": {"hidden_size_per_layer_input": 8}}, "hidden_size_per_layer_input=8"),
    "experts": ({"text": {"enable_moe_block": True}}, "enable_moe_block=True"),
    "keys of its own": ({"text": {"num_kv_shared_layers": 1}}, "num_kv_shared_layers is 1"),
    "clusters": ({"centroids": 4, "top_centroids": 2}, "6 tokens do not make 4 clusters"),
    "too many clusters": ({"centroids": 3, "top_centroids": 4}, "4 of 3 clusters"),
    "position": ({"position_offset": 2}, "position_offset must be 0 or 1, got 2"),
    "softcap": ({"softcap": -1.0}, "softcap must be above 0"),
    "k": ({"k": 0}, "k must be a whole number of at least 1, got 0"),
    "drafting": ({"drafting": "random"}, "drafting must be one of"),
    "unknown setting": ({"kk": 3}, r"setting\(s\) \['kk'\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused(case):
    """TAP.2, TAP.3, TAP.7, TAP.8, VOC.4: before anything compiles, naming both sides."""
    changes, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        assistant.config(tiny.settings(**changes), tiny.target().meta.target_cfg)


def test_targets_that_lend_nothing():
    """TAP.2: a latent cache has no keys of heads; a target without windows has none for sliding layers."""
    with pytest.raises(ValueError, match="keeps no keys and values of heads"):
        assistant.tiny(families.target("latent").meta.target_cfg)
    with pytest.raises(
        ValueError, match=r"layers of type .*sliding_attention.* the target keeps keys of none"
    ):
        assistant.config(tiny.settings({"vocab_size": 64}), families.target("hybrid").meta.target_cfg)
