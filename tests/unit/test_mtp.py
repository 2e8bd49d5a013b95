"""MTP drafters in the loop: what they propose, from what state, in batches, chunks and after any rejection."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import mtp_files
import numpy as np
import pytest

import specjax
from specjax import registry, testing
from specjax.config import Meta
from specjax.core import programs
from specjax.drafters import mtp
from specjax.types import AbsorbIn, ArraySpec, Ctx

K, ROUNDS, VOCAB = 3, 60, 7
PROMPTS = [[3, 1, 4, 1, 5, 2, 6, 5, 3, 5], [2], [6, 5, 4, 3, 2, 1, 0, 6, 5, 4, 3, 2, 1, 0, 1, 1, 2, 3, 5]]
ROOM = {"max_new_tokens": 270, "max_len": 320, "prefill_chunk": 16, "ignore_eos": True}


@functools.cache
def drafted(**changes) -> specjax.Params:
    """A small Llama with a layer of Qwen's kind; norms are not at their trivial values, the head is the target's."""
    base = testing.tiny_params(5, vocab=VOCAB, width=16, layers=1)
    params, rng = (
        testing.tiny_drafter(base, "mtp", 1, **{"drafting": "greedy", **changes}),
        np.random.default_rng(1),
    )
    lively = lambda spec, x: x + 0.3 * rng.standard_normal(x.shape) * (spec.init != "normal")  # noqa: E731
    specs = mtp.abstract(params.meta.drafter_cfg)
    weights = jax.tree.map(lively, specs, params.drafter, is_leaf=lambda x: isinstance(x, ArraySpec))
    return dataclasses.replace(params, drafter=jax.tree.map(lambda x: x.astype(jnp.float32), weights))


def native(kind: str, path) -> specjax.Params:
    """A target of its own family with the layer from its own files."""
    config = {"k": K, "drafting": "greedy"}
    return specjax.load(
        mtp_files.folder(path / "m", kind), drafter="mtp", dtype="float32", drafter_config=config
    )


@functools.partial(jax.jit, static_argnums=2)
def rounds(params, state, count: int):
    """(state, per round: lengths, drafts, feedback, accepted)."""

    def one(state, _):
        proposal, after = specjax.draft_step(params, state, k=K)
        after, verdict = specjax.verify_step(params, after, proposal)
        return after, (state.length, proposal.tokens, state.drafter.feedback, verdict.accepted)

    return jax.lax.scan(one, state, length=count)


@jax.jit
def proposed(params, state):
    return specjax.draft_step(params, state, k=K)[0]


def begin(params, prompts=PROMPTS, **options):
    """The texts are random, since greedy ones of so small a model repeat themselves."""
    return specjax.start(params, prompts, k=K, **{"temperature": 8.0, "seed": 1, **ROOM, **options})


@functools.cache
def walk():
    return jax.tree.map(np.asarray, rounds(drafted(), begin(drafted()), ROUNDS))


def check_against_fresh(params, end, seen, every: int):
    """The state and the proposal of a round are those after a prefill of the text it began with."""
    text, (lengths, drafts, feedback, accepted) = np.asarray(end.tokens), seen
    assert {*np.asarray(accepted).ravel().tolist()} >= {0, 1}, "rejections of several kinds"
    for i in range(3, len(lengths), every):
        rows = [text[b, : n - 1].tolist() for b, n in enumerate(lengths[i])]
        anchors = [{int(text[b, n - 1]): 1e9} for b, n in enumerate(lengths[i])]
        state = begin(params, rows, logit_bias=anchors, max_new_tokens=9)
        assert np.array_equal(state.length, lengths[i])
        np.testing.assert_allclose(state.drafter.feedback, feedback[i], atol=1e-4)
        assert np.array_equal(proposed(params, state).tokens, drafts[i])


def test_rejections_leave_no_trace():
    """KVR.4, KVR.3, PFX.2."""
    check_against_fresh(drafted(), *walk(), 8)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["qwen", "qwen, experts", "deepseek"])
def test_rejections_leave_no_trace_in_native_layers(kind, tmp_path):
    """KVR.4, KVR.5: targets that carry the layer themselves, recurrent ones among them."""
    params = native(kind, tmp_path)
    check_against_fresh(params, *rounds(params, begin(params), ROUNDS), 8)


def test_prefill_chunks():
    """PFX.1: state and first proposal do not depend on how the prompt is cut (in five for the longest)."""
    _, (lengths, drafts, feedback, _) = walk()
    parts = begin(drafted(), prefill_chunk=4)
    assert np.array_equal(parts.length, lengths[0])
    np.testing.assert_allclose(parts.drafter.feedback, feedback[0], atol=1e-5)
    assert np.array_equal(proposed(drafted(), parts).tokens, drafts[0])


def test_rows_of_a_batch():
    """BAT.1, BAT.4: each row's text and accepted drafts are those of its own run."""
    state, (_, _, _, accepted) = walk()
    for b, prompt in enumerate(PROMPTS):
        alone, (_, _, _, kept) = rounds(drafted(), begin(drafted(), [prompt]), 20)
        assert np.array_equal(kept[:, 0], accepted[:20, b])
        n = int(alone.length[0])
        assert np.array_equal(alone.tokens[0, :n], state.tokens[b, :n])


# ---------------------------------------------------------------- without a target


def ready(params, length: int = 9):
    """(what the target lends, state, context) after absorbing random states; no target runs."""
    cfg, rng = params.meta.drafter_cfg, np.random.default_rng(2)
    lent = registry.target("llama").shared(params.target, params.meta.target_cfg)
    tokens = jnp.asarray(rng.integers(0, VOCAB, (3, length)), jnp.int32)
    hidden = jnp.asarray(rng.standard_normal((3, length - 1, cfg.model.hidden_size)), lent.embed.dtype)
    pos = jnp.broadcast_to(jnp.arange(length - 1, dtype=jnp.int32), (3, length - 1))
    keep = jnp.full((3,), length - 1, jnp.int32)
    block = AbsorbIn(tokens[:, :-1], tokens[:, 1:], pos, keep, hidden, {}, "extend")
    state = absorb(params.drafter, lent, cfg, mtp.init_state(cfg, 3, length + 8, 8, lent.embed.dtype), block)
    live = jnp.ones((3,), bool)
    return (
        lent,
        state,
        Ctx(tokens, jnp.full((3,), length, jnp.int32), tokens[:, -1], live, None, lambda kind: None),
    )


absorb, draft = jax.jit(mtp.absorb, static_argnums=2), jax.jit(mtp.draft, static_argnums=(2, 3))


def proposal(params, k: int = K, temperature=None):
    lent, state, ctx = ready(params)
    keys = None if temperature is None else jax.random.split(jax.random.key(0), 3)
    ctx = dataclasses.replace(ctx, temperature=temperature)
    return draft(params.drafter, lent, params.meta.drafter_cfg, k, state, ctx, keys)[0]


def test_nothing_kept_changes_nothing():
    """I4, BAT.5: a block with ``keep`` 0, NaN in it or not, leaves what a row drafts from as it is."""
    params = drafted()
    cfg, (lent, state, ctx) = params.meta.drafter_cfg, ready(params)
    pos = ctx.length[:, None] - 1 + jnp.arange(K + 1)
    zero, bad = jnp.zeros_like(pos), jnp.full((3, K + 1, 16), jnp.nan)
    for mode in ("verify", "extend"):
        block = AbsorbIn(zero, zero, pos, jnp.zeros(3, jnp.int32), bad, {}, mode)
        after = absorb(params.drafter, lent, cfg, state, block)
        assert np.array_equal(after.feedback, state.feedback)
        again = draft(params.drafter, lent, cfg, K, after, ctx, None)[0]
        assert np.array_equal(again.tokens, proposal(params).tokens)


def test_one_layer_drafts_as_far_as_wanted():
    """Depth beyond the native one: the layer again, on its own state, and one pass less than drafts."""
    params = drafted()
    assert "length=4" in str(jax.make_jaxpr(lambda p: proposal(p, k=5))(params))
    widest = proposal(params, k=5)
    for k in (1, 2):
        assert np.array_equal(proposal(params, k=k).tokens, widest.tokens[:, :k])
    assert np.array_equal(widest.count, [5, 5, 5])


def test_sampled_drafts_keep_what_they_were_drawn_from():
    """DST.2, DST.6: q is a distribution over the draft vocabulary; a row at temperature 0 is a point."""
    params = drafted(drafting="probabilistic", draft_ids=(0, 2, 3, 6))
    got = proposal(params, temperature=jnp.array([0.7, 0.0, 1.5]))
    assert got.q.shape == (3, K, 4)
    assert np.array_equal(got.q_ids, [0, 2, 3, 6])
    assert np.array_equal(got.point, [False, True, False])
    np.testing.assert_allclose(got.q.sum(-1), 1, atol=1e-5)
    assert {*np.unique(got.tokens).tolist()} <= {0, 2, 3, 6}
    assert proposal(drafted(), temperature=jnp.ones(3)).q is None  # greedy drafting


def test_low_precision():
    """NUM.2: bfloat16 weights, cache and state."""
    params = specjax.cast(drafted(drafting="probabilistic"), "bfloat16")
    _, state, _ = ready(params)
    assert {x.dtype for x in jax.tree.leaves(state)} == {jnp.bfloat16.dtype}
    got = proposal(params, temperature=jnp.ones(3))
    assert got.q.dtype == jnp.float32
    assert np.all(np.isfinite(got.q))


# ---------------------------------------------------------------- alignment

ROLL = np.roll(np.eye(VOCAB, dtype=np.float32), 3, 0)  # one-hot of x -> one-hot of x + 3


@functools.cache
def counting(half: str) -> specjax.Params:
    """A target that says x + 3 after x, by its last token alone, and a layer that knows it from one half of its input:
    the next token, or the state, which is that of the token before."""
    base = testing.tiny_params(1, vocab=VOCAB, width=VOCAB, layers=1)
    layer = base.target.layers[0]
    layer = layer.replace(o=layer.o * 0, down=layer.down * 0)
    eye = jnp.eye(VOCAB)
    target = base.target.replace(layers=(layer,), embed=eye, head=jnp.asarray(ROLL), norm=jnp.ones(VOCAB))
    params = testing.tiny_drafter(dataclasses.replace(base, target=target), "mtp", 1, drafting="greedy")
    own = params.drafter.layer
    own = own.replace(mixer=own.mixer.replace(o=own.mixer.o * 0), mlp=own.mlp.replace(down=own.mlp.down * 0))
    parts = {"token": (eye, eye * 0), "state": (eye * 0, jnp.asarray(ROLL))}[half]
    return dataclasses.replace(
        params, drafter=params.drafter.replace(layer=own, fc=jnp.concatenate(parts, 1))
    )


def kept(params) -> np.ndarray:
    """Accepted drafts of eight rounds of two rows."""
    state = specjax.start(params, [[0, 3, 6, 2], [5]], k=K, max_new_tokens=60, max_len=80, ignore_eos=True)
    return np.asarray(rounds(params, state, 8)[1][3])


OFF = {
    "the same token": ("token", lambda block: {"next_tokens": block.tokens}),
    "the token after the next": ("token", lambda block: {"next_tokens": jnp.roll(block.next_tokens, -1, 1)}),
    "the state before": ("state", lambda block: {"hidden": jnp.roll(block.hidden, 1, 1)}),
    "the state after": ("state", lambda block: {"hidden": jnp.roll(block.hidden, -1, 1)}),
}


@pytest.mark.parametrize("half", ["token", "state"])
def test_pairs_are_of_one_position(half):
    """TAP.1, MET.2: where either half of a pair tells the next token, every draft is accepted, at every depth."""
    assert (kept(counting(half)) == K).all()


DEFAULT = ("the same token", "the state before")


@pytest.mark.parametrize(
    "case", [*DEFAULT, *(pytest.param(name, marks=pytest.mark.long) for name in OFF if name not in DEFAULT)]
)
def test_a_pair_that_is_off_by_one_shows_in_accepted_counts(case, monkeypatch):
    """PEER.1."""
    half, wrong = OFF[case]
    right = mtp.absorb
    monkeypatch.setattr(
        mtp,
        "absorb",
        lambda p, s, cfg, d, block: right(p, s, cfg, d, dataclasses.replace(block, **wrong(block))),
    )
    params = counting(half)
    # compiled anew, and so is the prefill
    params = params.replace(meta=dataclasses.replace(params.meta, name=case))
    monkeypatch.setattr(programs, "_store", functools.lru_cache(lambda program, signature: {}))
    assert kept(params).mean() < 1  # out of K


# ---------------------------------------------------------------- draft vocabulary


def cut(asked, eos=(), **changes):
    target_cfg = drafted().meta.target_cfg
    model = mtp.tiny(target_cfg).model
    settings = {"family": "qwen3_5_text", "model": model, "draft_vocab": asked, "eos_ids": eos, **changes}
    return mtp.config(settings, target_cfg)


def test_which_ids_are_drafted():
    """VOC.1, VOC.2: the lowest n, or a list in any order; ids that end a turn always."""
    assert cut(3).draft_ids == (0, 1, 2)
    assert cut(3, eos=(5, 99)).draft_ids == (0, 1, 2, 5)
    assert cut([6, 1, 6, np.int64(2)], eos=[4]).draft_ids == (1, 2, 4, 6)
    assert cut(None, eos=[4]).draft_ids is None
    assert cut(VOCAB).draft_ids is None


def test_a_cut_head_is_the_head_without_the_other_rows():
    """VOC.1: the first draft is the best of the ids that are left."""
    whole, some = drafted(), drafted(draft_ids=(1, 2, 4))
    lent, state, _ = ready(whole)
    logits = np.asarray(state.feedback) @ np.asarray(lent.head).T
    best = np.array([1, 2, 4])[logits[:, [1, 2, 4]].argmax(-1)]
    assert np.array_equal(proposal(some, k=1).tokens[:, 0], best)


WRONG = {
    "unknown": ({"depth": 2}, r"no setting\(s\) \['depth'\]; known: draft_vocab, drafting, k, state"),
    "k": ({"k": 0}, "k must be a whole number of at least 1, got 0"),
    "drafting": ({"drafting": "random"}, "drafting must be one of"),
    "state": ({"state": "before"}, r"state must be one of \('normed', 'raw'\), got 'before'"),
    "no number": ({"draft_vocab": "all"}, "a number of ids or a list of ids, got 'all'"),
    "flag": ({"draft_vocab": True}, "a number of ids or a list of ids, got True"),
    "too many": ({"draft_vocab": 9}, r"ids from 0 to 8, the head's are \[0, 7\)"),
    "negative": ({"draft_vocab": [-1]}, "ids from -1 to -1"),
    "none": ({"draft_vocab": []}, "at least one id"),
    "family": ({"model": drafted().meta.target_cfg, "family": "llama"}, "of the family 'llama'; known: Qwen3.5"),
    "width": ({"model": dataclasses.replace(cut(None).model, hidden_size=24)}, "24 wide, this target 16"),
    "vocabulary": ({"model": dataclasses.replace(cut(None).model, vocab_size=90)}, "90 tokens, the target's has 7"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused(case):
    """TAP.7, VOC.2, VOC.4, TAP.8: before anything compiles, naming both sides."""
    changes, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        cut(None, **changes)


def test_settings_survive_saving():
    """CKP.7: what is written with the parameters gives the same config back, of a registered family only."""
    meta = drafted(draft_ids=(1, 2)).meta
    data = json.loads(json.dumps(meta.to_json()))
    assert Meta.from_json(data) == meta
    data["drafter_cfg"]["family"] = "os.path"
    with pytest.raises(ValueError, match=r"family .os\.path."):
        Meta.from_json(data)
