"""What holds between any two rounds: the invariants I1 to I7 of ``specjax.core.round``."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from told import MODES, PROMPTS, model, told, unused

import specjax
from specjax import registry, testing
from specjax.core import round as rnd
from specjax.core.cache import DenseKV
from specjax.testing.told import in_order
from specjax.types import LENGTH, NONFINITE, RUNNING, STOP, TapSpec

K, ROUNDS = 3, 14
BUDGETS = [17, 0, 9, 24, 24]  # row 1 is done from the start
TARGETS = {"dense": model, "rings": lambda: testing.sliding_params((5, 3), seed=1, vocab=64)}
#: Greedy with penalties, so that the state counts tokens; and sampled, so that it has keys.
OPTIONS = {
    "greedy": {"presence_penalty": 0.5, "frequency_penalty": 0.25},
    "sampled": {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.2, "rule": "match"},
}
CASES = pytest.mark.parametrize(
    ("kind", "how"), [("dense", "greedy"), ("rings", "greedy"), ("dense", "sampled")]
)


@functools.cache
def continuations(kind: str, how: str):
    return specjax.decode(TARGETS[kind](), PROMPTS, max_new_tokens=24, rows=5, **OPTIONS[how]).tokens


@functools.cache
def params(kind: str, how: str):
    """A witness that misbehaves in another way in every row."""
    tokens = continuations(kind, how)
    modes = [MODES[i] for i in (0, 1, 2, 3, 4)]
    return told(modes, tokens, base=TARGETS[kind](), stop=unused(tokens), at=1, name="WITNESS")


def stop_of(kind: str, how: str) -> int:
    """A token that ends row 3 after some rounds, and row 0 not at all."""
    tokens = continuations(kind, how)
    return next(t for t in tokens[3][5:] if tokens[3].index(t) >= 5 and t not in tokens[0])


def start(kind: str, how: str, rows=slice(None), **options):
    budgets = [min(b, 24) for b in BUDGETS][rows]
    call = {"max_new_tokens": budgets, "k": K, "stop": stop_of(kind, how)} | OPTIONS[how] | options
    return specjax.start(params(kind, how), PROMPTS[rows], **call)


@functools.cache
def jitted(rule: str):
    @jax.jit
    def step(params, state):
        proposal, state = specjax.draft_step(params, state, k=K)
        after, verdict = specjax.verify_step(params, state, proposal, rule=rule, logprobs=True)
        return proposal, after, verdict

    return step


def step(kind, how, state):
    return jitted(OPTIONS[how].get("rule", "auto"))(params(kind, how), state)


@functools.cache
def history(kind: str, how: str):
    """Every state with the proposal and verdict that led to the next one."""
    state, seen = start(kind, how), []
    for _ in range(ROUNDS):
        proposal, after, verdict = step(kind, how, state)
        seen.append(jax.tree.map(np.asarray, (state, proposal, verdict, after)))
        state = after
    return seen


@CASES
def test_the_run_shows_everything(kind, how):
    """The states below have rows that run, rows that ended in each way, and accepted counts from none to all."""
    state, verdicts = history(kind, how)[-1][3], [v for _, _, v, _ in history(kind, how)]
    assert set(state.reason.tolist()) == {LENGTH, STOP}
    assert history(kind, how)[5][0].done.any()
    assert not history(kind, how)[3][0].done.all()
    assert {int(n) for v in verdicts for n in v.accepted} >= {0, 1, K}
    for b, tokens in enumerate(continuations(kind, how)):
        n = state.length[b] - len(PROMPTS[b])
        assert state.tokens[b, len(PROMPTS[b]) : state.length[b]].tolist() == tokens[:n]


@CASES
def test_one_number_drives_everything(kind, how):
    """I7, I5, OPT.4: tokens, length, penalty counts and the drafter's notes move by ``emitted``."""
    for before, proposal, verdict, after in history(kind, how):
        count = np.where(before.done, 0, np.minimum(proposal.count, before.limit - before.length - 1))
        live = ~before.done
        assert np.all((verdict.emitted[live] >= 1) & (verdict.emitted <= count + 1)[live])
        assert np.all((verdict.accepted <= verdict.emitted) & (verdict.accepted <= count))
        assert np.array_equal(after.length - before.length, verdict.emitted)
        assert np.array_equal(after.drafter.count - before.drafter.count, verdict.emitted)
        for b, n in enumerate(verdict.emitted):
            at, fresh = before.length[b], verdict.out_tokens[b, :n]
            assert np.array_equal(after.tokens[b, at : at + n], fresh)
            assert np.array_equal(
                np.delete(after.tokens[b], slice(at, at + n)), np.delete(before.tokens[b], slice(at, at + n))
            )
            added = after.counts.output[b] - before.counts.output[b]
            assert np.array_equal(added, np.bincount(fresh, minlength=64))
        assert np.array_equal(after.counts.prompt, before.counts.prompt)


@CASES
def test_finished_rows_are_frozen(kind, how):
    """I4: they emit 0, and tokens, length, reason, counts and the drafter's notes stay as they are."""
    frozen = 0
    for before, _, verdict, after in history(kind, how):
        done = before.done
        frozen += done.sum()
        assert not verdict.emitted[done].any()
        assert not verdict.accepted[done].any()
        assert np.all(after.done[done])
        for name in (
            "tokens",
            "length",
            "prompt_len",
            "limit",
            "reason",
            "request_id",
            "stop_ids",
            "counts",
            "drafter",
        ):
            old, new = (jax.tree.leaves(getattr(s, name)) for s in (before, after))
            assert all(np.array_equal(a[done], b[done]) for a, b in zip(old, new, strict=True))
        ended = after.done & ~done
        assert np.all((after.reason != RUNNING) == after.done)
        assert np.all(after.reason[ended] == verdict.reason[ended])
    assert frozen > ROUNDS


def test_the_host_ends_the_rows_it_names():
    """I4, I6: no other row ends, and one that had ended keeps its reason."""
    state = history("dense", "greedy")[2][0]
    rows = np.arange(len(PROMPTS)) < 2
    assert (rows & state.done).any()
    assert (rows & ~state.done).any()
    assert (~rows & ~state.done).any()
    after = rnd.finish(state, jnp.asarray(rows))
    assert np.array_equal(after.done, state.done | rows)
    assert np.array_equal(after.reason, np.where(state.done, state.reason, np.where(rows, LENGTH, RUNNING)))
    assert np.array_equal(after.length, state.length)


@CASES
def test_the_drafter_has_absorbed_what_precedes_the_anchor(kind, how):
    """I3, KVR.3, KVR.4: each position once, with its token, its successor and the features that a fresh pass
    over the committed tokens gives."""
    for number, (_, _, _, after) in enumerate(history(kind, how)):
        in_place = in_order(after.drafter, jnp.asarray(after.tokens), jnp.asarray(after.length))
        assert np.all(in_place | (after.length == after.prompt_len))  # without a budget there is no anchor
        if number % 5 == 4:
            hidden, taps, _ = fresh_pass(kind, after.tokens, after.length - 1)
            kept = np.arange(after.tokens.shape[1]) < after.length[:, None] - 1
            slots = after.tokens.shape[1]
            np.testing.assert_allclose(after.drafter.feature[:, :slots][kept], hidden[kept], atol=2e-4)
            np.testing.assert_allclose(after.drafter.tap[:, :slots][kept], taps[kept], atol=1e-5)


@functools.cache
def _fresh(kind: str):
    base = TARGETS[kind]()
    target, cfg = registry.target(base.meta.family), base.meta.target_cfg

    @jax.jit
    def run(tokens, valid):
        rows, size = tokens.shape
        cache = target.init_cache(cfg, rows, size + K + 1, K + 1, jnp.float32)
        pos = jnp.broadcast_to(jnp.arange(size), tokens.shape)
        out = target.forward(base.target, cfg, tokens, pos, valid, cache, TapSpec((0,), True), "extend")
        return out.hidden.sum(-1), out.taps[0].sum(-1), out.cache

    return run


def fresh_pass(kind, tokens, valid):
    return jax.tree.map(np.asarray, _fresh(kind)(jnp.asarray(tokens), jnp.asarray(valid)))


@CASES
def test_the_cache_holds_what_precedes_the_anchor(kind, how):
    """I1, KVR.2: entries before the anchor are those of a fresh pass over the committed tokens; entries of a
    ring that a later query can see have the right positions, each once."""
    for _, _, _, after in history(kind, how)[::4]:
        _, _, cache = fresh_pass(kind, after.tokens, after.length - 1)
        windows = getattr(TARGETS[kind]().meta.target_cfg, "windows", (None,) * len(cache))
        for kept, fresh, window in zip(after.target, cache, windows, strict=True):
            for b, length in enumerate(after.length):
                first = 0 if window is None else max(0, length - 1 - window)
                for p in range(first, length - 1):
                    a, z = slot_of(kept, b, p), slot_of(fresh, b, p)
                    np.testing.assert_allclose(kept.k[b, :, a], fresh.k[b, :, z], atol=1e-4)
                    np.testing.assert_allclose(kept.v[b, :, a], fresh.v[b, :, z], atol=1e-4)


def slot_of(cache, row: int, position: int) -> int:
    if isinstance(cache, DenseKV):
        return position
    (found,) = np.flatnonzero(cache.pos[row] == position)
    return int(found)


def poison(cache, length, window):
    """NaN keys and large values (a cache never holds one that is not finite) where nobody may look."""
    if isinstance(cache, DenseKV):
        bad = np.arange(cache.k.shape[2]) >= length[:, None] - 1
    else:
        bad = (cache.pos < 0) | (cache.pos >= length[:, None] - 1) | (cache.pos < length[:, None] - window)
    spoil = lambda x, value: jnp.where(bad[:, None, :, None], value, x)  # noqa: E731
    return cache.replace(k=spoil(cache.k, jnp.nan), v=spoil(cache.v, 1e30))


@CASES
def test_garbage_is_invisible(kind, how):
    """I1, I2: NaN in every cache slot from the anchor's on, and garbage in every token slot beyond the length,
    change nothing."""
    for before, _, verdict, after in history(kind, how):
        beyond = np.arange(before.tokens.shape[1]) >= before.length[:, None]
        windows = getattr(TARGETS[kind]().meta.target_cfg, "windows", (None,) * len(before.target))
        caches = [poison(c, before.length, w) for c, w in zip(before.target, windows, strict=True)]
        spoiled = before.replace(target=tuple(caches), tokens=jnp.where(beyond, 63, before.tokens))
        _, again, found = step(kind, how, jax.tree.map(jnp.asarray, spoiled))
        assert np.array_equal(found.emitted, verdict.emitted)
        kept = np.arange(K + 1) < verdict.emitted[:, None]
        assert np.array_equal(np.asarray(found.out_tokens)[kept], verdict.out_tokens[kept])
        assert np.array_equal(np.asarray(found.logprobs)[kept], verdict.logprobs[kept])
        assert np.array_equal(again.reason, after.reason)
        committed = np.arange(before.tokens.shape[1]) < after.length[:, None]
        assert np.array_equal(np.asarray(again.tokens)[committed], after.tokens[committed])


@pytest.mark.parametrize("kind", TARGETS)
def test_a_resumed_prefill_does_not_see_garbage(kind):
    """I2, PFX.2, BAT.6: a padded chunk fed to a cache full of NaN beyond the committed positions."""
    base, length = TARGETS[kind](), np.array([6, 9])
    rows = [[*range(1, 12)], [*range(20, 31)]]
    pair, weights = base.meta.pair, (base.target, None)
    state = specjax.start(base, [r[:n] for r, n in zip(rows, length, strict=True)], max_new_tokens=20)
    tokens = jnp.asarray(state.tokens).at[:, :11].set(jnp.asarray(rows))
    windows = getattr(base.meta.target_cfg, "windows", (None,) * len(state.target))
    resumed = state.replace(tokens=tokens, length=jnp.full(2, 11), prompt_len=jnp.full(2, 11))
    feed = jax.jit(lambda s: rnd.prefill(pair, weights, s, jnp.asarray(length), 16, "match", True)[1])
    caches = [
        poison(jax.tree.map(np.asarray, c), length + 1, w) for c, w in zip(state.target, windows, strict=True)
    ]
    clean, spoiled = feed(resumed), feed(resumed.replace(target=tuple(caches)))
    whole = specjax.decode(base, rows, max_new_tokens=1, rows=2).tokens
    assert clean.out_tokens.tolist() == spoiled.out_tokens.tolist() == whole
    assert np.array_equal(clean.logprobs, spoiled.logprobs)


@CASES
def test_rows_do_not_depend_on_the_batch(kind, how):
    """I6, BAT.2, BAT.4: each row alone, and the rows in another order, emit round by round what they emit
    together. (The reduced precision of shapes aside: float32, clear gaps.)"""
    together = np.stack([v.emitted for _, _, v, _ in history(kind, how)])
    final = history(kind, how)[-1][3]
    for b in (0, 3):
        state, emitted = start(kind, how, slice(b, b + 1)), []
        for _ in range(ROUNDS):
            _, state, verdict = step(kind, how, state)
            emitted.append(int(verdict.emitted[0]))
        assert emitted == together[:, b].tolist()
        assert np.array_equal(state.tokens[0, : state.length[0]], final.tokens[b, : final.length[b]])
        assert state.reason[0] == final.reason[b]
    state = jax.tree.map(lambda x: x[::-1], start(kind, how))
    for number in range(ROUNDS):
        _, state, verdict = step(kind, how, state)
        assert np.array_equal(verdict.emitted, together[number, ::-1])


@pytest.mark.parametrize("kind", TARGETS)
def test_a_draft_that_overflows_changes_nothing(kind):
    """NUM.1, GRD.1: the target's keys and values of a wrong draft are not finite; plain decoding never sees
    that token, so speculative decoding must not suffer from it."""
    base = TARGETS[kind]()
    tokens = specjax.decode(base, PROMPTS, max_new_tokens=20, rows=5).tokens
    bad = unused([*tokens, *PROMPTS])
    for value in (np.nan, np.inf, 3e38):
        embed = base.target.embed.at[bad].set(value)
        broken = base.replace(target=base.target.replace(embed=embed))
        assert specjax.decode(broken, PROMPTS, max_new_tokens=20, rows=5).tokens == tokens
        for mode, at in (("STOP_INSIDE", 0), ("STOP_INSIDE", 2)):
            speculative = told(mode, tokens, base=broken, stop=bad, at=at)
            out = specjax.decode(speculative, PROMPTS, max_new_tokens=20, rows=5, k=K)
            assert out.tokens == tokens
            assert (out.total.accepted > 0) == (at > 0)  # adversarial at 0


def test_a_row_without_finite_logits_ends_alone():
    """NUM.1, I6: its neighbours go on; ``decode`` raises with the place."""
    bad = unused([*continuations("dense", "greedy"), *PROMPTS])
    base = model().replace(target=model().target.replace(embed=model().target.embed.at[bad].set(jnp.nan)))
    rows = [PROMPTS[0], [bad, 1], PROMPTS[2]]
    state = specjax.start(base, rows, max_new_tokens=6)
    assert np.asarray(state.reason).tolist() == [RUNNING, NONFINITE, RUNNING]
    assert np.asarray(state.length).tolist() == [2, 2, 4]
    alone = specjax.decode(base, [rows[0], rows[2]], max_new_tokens=6, rows=2).tokens
    run = jax.jit(lambda s: specjax.verify_step(base, *specjax.draft_step(base, s)[::-1])[0])
    for _ in range(5):
        state = run(state)
    found = [np.asarray(state.tokens)[b, len(rows[b]) : state.length[b]].tolist() for b in (0, 2)]
    assert found == alone
    with pytest.raises(FloatingPointError, match=r"prompt 1 at position 2 .*of 3") as raised:
        specjax.decode(base, rows, max_new_tokens=6)
    result = raised.value.result
    assert [result.tokens[0], result.tokens[2]] == alone  # nothing of the others is lost
    assert result.finish_reason == ["length", "nonfinite", "length"]


def test_states_are_ordinary_pytrees():
    """PEER.11, PEER.7: axis 0 of every leaf is the batch; a state survives flattening, jit and a copy to the
    device; sampling without a key is refused."""
    state = start("dense", "sampled")
    assert {x.shape[0] for x in jax.tree.leaves(state)} == {len(PROMPTS)}
    leaves, tree = jax.tree.flatten(state)
    copied = jax.device_put(jax.tree.unflatten(tree, [np.asarray(x) for x in leaves]))
    _, after, verdict = step("dense", "sampled", copied)
    assert np.array_equal(verdict.out_tokens, history("dense", "sampled")[0][2].out_tokens)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    with pytest.raises(ValueError, match="key"):
        specjax.start(model(), [[1]], temperature=1.0)
    keyless = dataclasses.replace(state, key_data=None)
    with pytest.raises(ValueError, match="key"):
        specjax.verify_step(params("dense", "sampled"), keyless, specjax.draft_step(model(), state)[0])
