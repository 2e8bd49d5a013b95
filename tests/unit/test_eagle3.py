"""EAGLE-3 in the loop: what it proposes, from what state, in batches, chunks and after any rejection."""

import functools
import json

import eagle3_tiny as tiny
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import testing
from specjax.config import Meta
from specjax.drafters import eagle3
from specjax.types import AbsorbIn

K, ROUNDS = 3, 200
PROMPTS = [[3, 1, 4, 1, 5, 2, 6, 5, 3, 5], [2], [6, 5, 4, 3, 2, 1, 0, 6, 5, 4, 3, 2, 1, 0, 1, 1, 2, 3, 5]]
OTHERS = ("llama", "no taps", "latent, two layers")
ROOM = {"max_new_tokens": 400, "max_len": 512, "prefill_chunk": 16, "ignore_eos": True}


@jax.jit
def one_round(params, state):
    proposal, state = specjax.draft_step(params, state, k=K)
    after, verdict = specjax.verify_step(params, state, proposal)
    return proposal, after, verdict.accepted


@jax.jit
def proposed(params, state):
    return specjax.draft_step(params, state, k=K)[0]


@functools.cache
def walk(kind: str, rounds: int, **changes):
    """(final state, per round: lengths, drafts, feedback, accepted) of all prompts as one batch.

    The texts are random, since greedy ones of so small a model repeat themselves; the drafts are the likeliest.
    """
    params, seen = tiny.drafted(kind, drafting="greedy", **changes), []
    state = specjax.start(params, PROMPTS, k=K, temperature=8.0, seed=1, **ROOM)
    for _ in range(rounds):
        before = state
        proposal, state, accepted = one_round(params, state)
        seen.append((before.length, proposal.tokens, before.drafter.feedback, accepted))
    return state, [np.stack(x) for x in zip(*seen, strict=True)]


def expected(kind: str, tokens: np.ndarray, lengths: np.ndarray):
    """(drafts, gaps of the best two logits, state) per row and round, computed from nothing in float64."""
    params = tiny.drafted(kind)
    reference = tiny.slow(params, kind)
    every = tiny.features(reference, params.meta.drafter_cfg, tokens)
    for b, text in enumerate(tokens):
        reference.clear()
        logits, states = reference.absorb(every[b, : lengths[-1, b] - 1], text)
        for i in reversed(range(len(lengths))):  # later rows are forgotten one round after the other
            last = lengths[i, b] - 2
            reference.cut(last + 1)
            drafts, rows = reference.chain(logits[last], states[last], last, K)
            yield b, i, drafts, [np.diff(np.sort(row)[-2:])[0] for row in rows], states[last]


def check_rounds(kind: str, rounds: int):
    state, (lengths, drafts, feedback, accepted) = walk(kind, rounds)
    assert {*accepted.ravel().tolist()} >= {0, 1}, "rejections of several kinds"
    compared = 0
    for b, i, tokens, gaps, held in expected(kind, np.asarray(state.tokens), lengths):
        np.testing.assert_allclose(feedback[i, b], held, atol=1e-3, rtol=1e-3)
        clear = int(np.cumprod(np.array(gaps) > 1e-3).sum())  # beyond a near-tie rounding decides
        assert drafts[i, b, :clear].tolist() == tokens[:clear], (i, b)
        compared += clear
    assert compared > 0.95 * drafts.size


@pytest.mark.parametrize("kind", ["reduced", pytest.param("qwen3, 3.1", marks=pytest.mark.long)])
def test_200_rounds_of_rejections_leave_no_trace(kind):
    """KVR.4, KVR.3, VOC.1: in every round the state and the next proposal are those of the committed text alone,
    computed from nothing; d2t holds offsets."""
    check_rounds(kind, ROUNDS)


LONG = pytest.mark.long


@pytest.mark.parametrize("kind", ["sliding", "latent", *(pytest.param(k, marks=LONG) for k in OTHERS)])
def test_rounds_of_other_kinds(kind):
    """KVR.4, TAP.3, TAP.6, TAP.7, CKP.6: windows, biases, another width, own tables; latent attention with YaRN; no
    taps."""
    check_rounds(kind, 30)


def test_a_resumed_prefix_gives_the_same_proposal():
    """KVR.4, PFX.2: after rounds of all kinds the proposal equals the one after prefilling the committed text."""
    params = tiny.drafted("reduced", drafting="greedy")
    end, (lengths, drafts, feedback, _) = walk("reduced", ROUNDS)
    text = np.asarray(end.tokens)
    for i in range(5, ROUNDS, 25):
        rows = [text[b, : n - 1].tolist() for b, n in enumerate(lengths[i])]
        anchors = [{int(text[b, n - 1]): 1e9} for b, n in enumerate(lengths[i])]
        state = specjax.start(params, rows, k=K, logit_bias=anchors, **ROOM | {"max_new_tokens": 9})
        assert np.array_equal(state.length, lengths[i])
        np.testing.assert_allclose(state.drafter.feedback, feedback[i], atol=1e-4)
        assert np.array_equal(proposed(params, state).tokens, drafts[i])


@pytest.mark.parametrize("kind", ["sliding", *(pytest.param(k, marks=LONG) for k in ("reduced", "latent"))])
def test_prefill_chunks(kind):
    """PFX.1: state and first proposal do not depend on how the prompt is cut (in five for the longest)."""
    params = tiny.drafted(kind, drafting="greedy")
    parts = specjax.start(params, PROMPTS, k=K, temperature=8.0, seed=1, **ROOM | {"prefill_chunk": 4})
    _, (lengths, drafts, feedback, _) = walk(kind, 30)
    assert np.array_equal(parts.length, lengths[0])
    np.testing.assert_allclose(parts.drafter.feedback, feedback[0], atol=1e-5)
    assert np.array_equal(one_round(params, parts)[0].tokens, drafts[0])


@pytest.mark.parametrize("kind", ["sliding", *(pytest.param(k, marks=LONG) for k in ("reduced", "latent"))])
def test_rows_of_a_batch(kind):
    """BAT.1, BAT.4: each row's text and accepted drafts are those of its own run."""
    params, (state, (_, _, _, accepted)) = tiny.drafted(kind, drafting="greedy"), walk(kind, 30)
    for b, prompt in enumerate(PROMPTS):
        alone = specjax.start(params, [prompt], k=K, temperature=8.0, seed=1, **ROOM)
        for i in range(30):
            _, alone, kept = one_round(params, alone)
            assert (i, kept[0]) == (i, accepted[i, b])
        n = int(alone.length[0])
        assert np.array_equal(alone.tokens[0, :n], state.tokens[b, :n])


def test_wrong_taps_show_in_accepted_counts():
    """TAP.1: with taps one layer off the drafter still runs, and its accepted counts are no longer the reference's."""
    right, wrong = walk("reduced", ROUNDS)[1][3], walk("reduced", 30, taps=(0, 1, 2))[1][3]
    assert not np.array_equal(right[:30], wrong)


def test_sampled_drafts_keep_what_they_were_drawn_from():
    """DST.2, DST.6: q is the softmax of the draft logits at the row's temperature, over the draft vocabulary; a row at
    temperature 0 is a point."""
    params = tiny.drafted("reduced")
    state = specjax.start(params, PROMPTS, k=K, temperature=[0.7, 0.0, 1.5], seed=[1, 2, 3], **ROOM)
    got = proposed(params, state)
    texts, reference = np.asarray(state.tokens), tiny.slow(params, "reduced")
    every = tiny.features(reference, params.meta.drafter_cfg, texts)
    assert np.array_equal(got.q_ids, tiny.IDS)
    assert np.array_equal(got.point, [False, True, False])
    for b, temperature in ((0, 0.7), (1, 0.0), (2, 1.5)):
        n = int(state.length[b])
        reference.clear()
        logits, held = reference.absorb(every[b, : n - 1], texts[b])
        row, at = logits[-1], held[-1]
        for i, token in enumerate(np.asarray(got.tokens)[b]):
            best = row == row.max()
            wanted = np.exp(row / temperature - np.max(row / temperature)) if temperature else best * 1.0
            np.testing.assert_allclose(got.q[b, i], wanted / wanted.sum(), atol=1e-4)
            assert token in tiny.IDS[best] if not temperature else token in tiny.IDS
            row, at = reference.row(at, int(token), n - 1 + i)


def test_nothing_kept_changes_nothing():
    """I4, BAT.5: a block with ``keep`` 0, NaN in it or not, leaves what a row drafts from as it is."""
    params = tiny.drafted("llama")
    cfg, (lent, state, ctx) = params.meta.drafter_cfg, tiny.ready(params)
    pos = ctx.length[:, None] - 1 + jnp.arange(K + 1)
    zero, bad = jnp.zeros_like(pos), jnp.full((3, K + 1, tiny.WIDTH), jnp.nan)
    for mode in ("verify", "extend"):
        block = AbsorbIn(zero, zero, pos, jnp.zeros(3, jnp.int32), None, dict.fromkeys(cfg.taps, bad), mode)
        after = tiny.absorb(params.drafter, lent, cfg, state, block)
        assert np.array_equal(after.feedback, state.feedback)
        again = tiny.propose(params.drafter, lent, cfg, K, after, ctx, None)[0]
        assert np.array_equal(again.tokens, tiny.draft(params).tokens)


def test_greedy_drafting_of_sampled_rows():
    """DST.1: drafting="greedy" proposes points whatever the temperature, and gives no q."""
    params = tiny.drafted("reduced", drafting="greedy")
    got = tiny.draft(params, temperature=jnp.ones(3))
    assert got.q is None
    assert np.array_equal(got.tokens, tiny.draft(params).tokens)


def test_zero_offsets_are_the_identity():
    """VOC.1."""
    params = tiny.drafted("reduced")
    zeros = params.replace(drafter=params.drafter.replace(d2t=jnp.zeros_like(params.drafter.d2t)))
    assert np.array_equal(tiny.IDS[tiny.draft(zeros, k=1).tokens], tiny.draft(params, k=1).tokens)


def test_one_pass_less_than_drafts():
    """The first draft needs no pass of its own, and every k gives the same drafts."""
    params = tiny.drafted("llama")
    assert "length=4" in str(jax.make_jaxpr(lambda p: tiny.draft(p, k=5))(params))
    widest = tiny.draft(params, k=5)
    for k in (1, 2):
        assert np.array_equal(tiny.draft(params, k=k).tokens, widest.tokens[:, :k])
    assert np.array_equal(widest.count, [5, 5, 5])


def test_positions_beyond_the_drafters_limit():
    """CTX.2: ``max_position_embeddings`` of the drafter bounds nothing: rope is computed from the position."""
    layer = tiny.LAYER | {"max_position_embeddings": 8}
    limited, free = tiny.drafted("llama", transformer=layer), tiny.drafted("llama")
    assert np.array_equal(tiny.draft(limited, length=20).tokens, tiny.draft(free, length=20).tokens)


def test_low_precision():
    """NUM.2: bfloat16 weights, caches and state; a drafter in another type than its target."""
    wide = tiny.drafted("qwen3, 3.1")
    narrow = specjax.cast(wide, "bfloat16")
    for params in (narrow, narrow.replace(drafter=wide.drafter)):
        _, state, _ = tiny.ready(params)
        assert {x.dtype for x in jax.tree.leaves(state)} == {params.drafter.norm.dtype}
        assert np.all(np.isfinite(state.feedback.astype(jnp.float32)))
        got = tiny.draft(params, temperature=jnp.ones(3))
        assert got.q.dtype == jnp.float32
        np.testing.assert_allclose(got.q.sum(-1), 1, atol=1e-5)


@pytest.mark.parametrize("rows", [15, 18])
def test_padding_of_vocabularies(rows):
    """VOC.3, VOC.5: a drafter with fewer or more rows of padding than the target's 16 proposes no id that either
    lacks, whatever it drew from."""
    base = testing.tiny_params(5, vocab=16, width=tiny.WIDTH, layers=3)
    layer = tiny.LAYER | {"vocab_size": rows}
    cfg = eagle3.config(tiny.settings("llama", transformer=layer, own_embed=True), base.meta.target_cfg)
    got = tiny.draft(tiny.attached(base, cfg), temperature=jnp.array([0.0, 1.0, 9.0]), k=5)
    assert got.q.shape[-1] == min(rows, 16)
    assert (got.q_ids is None) == (rows > 16)
    assert np.max(got.tokens) < min(rows, 16)


@pytest.mark.long
@pytest.mark.parametrize("rule", ["match", "reject"])
def test_sampled_decoding(rule):
    """DST.1, RNG.1: drafts are accepted at a temperature, "match" gives plain decoding's tokens, seeds matter."""
    options = {"max_new_tokens": 30, "temperature": 1.2, "seed": [1, 2, 3], "rule": rule, "max_len": 64}
    out = specjax.decode(tiny.drafted("reduced"), PROMPTS, k=K, **options)
    assert out.total.accepted > 0
    if rule == "match":
        assert out.tokens == specjax.decode(tiny.target(), PROMPTS, **options | {"rule": "auto"}).tokens
    assert out.tokens != specjax.decode(tiny.drafted("reduced"), PROMPTS, k=K, **options | {"seed": 9}).tokens


@pytest.mark.parametrize("kind", ["sliding", "latent"])
def test_settings_survive_saving(kind):
    """CKP.7: what is written with the parameters gives the same config back."""
    meta = tiny.drafted(kind).meta
    assert Meta.from_json(json.loads(json.dumps(meta.to_json()))) == meta


def test_memory_of_the_caches():
    """KVR.1: a window bounds its layer's cache; latent attention keeps rank + rope numbers per position."""
    held = lambda kind, slots: [  # noqa: E731
        sum(x[0].size for x in jax.tree.leaves(kv))
        for kv in eagle3.init_state(tiny.drafted(kind).meta.drafter_cfg, 1, slots, 4, jnp.float32).cache
    ]
    assert held("sliding", 64)[0] == held("sliding", 512)[0] < held("sliding", 64)[1]
    assert held("latent", 64) == [64 * (10 + 4)]
    assert eagle3.min_resume(tiny.drafted("sliding").meta.drafter_cfg, 9) == 8
    assert eagle3.min_resume(tiny.drafted("llama").meta.drafter_cfg, 9) == 1


WRONG = {
    "tap outside": ({"taps": (1, 2, 5)}, r"after \[5\] layers, but the target has 3"),
    "tap below": ({"taps": (-1, 2, 3)}, r"after \[-1\] layers, but the target has 3"),
    "taps and projection": ({"taps": (1, 3), "fc_inputs": 48}, r"reads 48 features, but 2 taps .* give 32"),
    "doubled tap": ({"taps": (2, 2, 3)}, r"different layers.*\[2, 2, 3\]"),
    "no tap": ({"taps": ()}, "at least one"),
    "width of the target": ({"target_hidden_size": 20}, "width 20, this one is 16"),
    "other vocabulary": ({"transformer": tiny.LAYER | {"vocab_size": 20}}, "20 tokens, the target's has 7"),
    "reduced without a map": ({"draft_vocab_size": 4}, "4 tokens, the embedding 7.* no table d2t"),
    "head of the target": ({"transformer": tiny.LAYER | {"hidden_size": 24}}, "24 wide; the target's is 16"),
    "both norms": ({"fc_norm": True, "norm_before_fc": True}, "exclude each other"),
    "projection without taps": ({"use_aux_hidden_state": False, "fc_inputs": 48}, "use_aux_hidden_state is false"),
    "unknown setting": ({"tapps": (1, 2, 3)}, r"setting\(s\) \['tapps'\]"),
    "k": ({"k": 0}, "k must be a whole number of at least 1, got 0"),
    "drafting": ({"drafting": "random"}, "drafting must be one of"),
    "flag": ({"norm_output": "yes"}, "norm_output must be true or false"),
    "rope": (
        {"transformer": tiny.LAYER | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}},
        "unknown rope type 'dynamic'",
    ),
    "nested and flat rope": (
        {"transformer": tiny.LAYER | {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}},
        "rope_theta is 10000.0 at top level but 500000.0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused(case):
    """TAP.2, TAP.3, TAP.4, TAP.7, VOC.2, VOC.4, TAP.8: before anything compiles, naming both sides."""
    changes, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        tiny.drafted("llama", **changes)
