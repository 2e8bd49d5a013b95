"""Filters against a sort, penalties against a count, keys against one another."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given, settings, strategies as st

from specjax.core import sampling as smp
from specjax.types import Counts, Sampling

B, Q, V = 4, 3, 12
filtered = jax.jit(smp.filtered)
adjust = jax.jit(smp.adjust)
count = jax.jit(smp.count_tokens)


def kept(logits, **values) -> np.ndarray:
    """Survivors of the filters: bool, the shape of the logits."""
    dtype = lambda name: jnp.int32 if name == "top_k" else jnp.float32  # noqa: E731
    sampling = Sampling(
        **{n: jnp.broadcast_to(jnp.asarray(v, dtype(n)), len(logits)) for n, v in values.items()}
    )
    out = np.asarray(filtered(jnp.asarray(logits, jnp.float32), sampling))
    assert np.array_equal(out[out > -np.inf], np.asarray(logits, np.float32)[out > -np.inf])
    return out > -np.inf


def random_logits(seed: int, ties: bool) -> np.ndarray:
    rng = np.random.default_rng(seed)
    logits = rng.integers(-3, 4, (B, Q, V)) / 2 if ties else 3 * rng.standard_normal((B, Q, V))
    logits[rng.random((B, Q, V)) < 0.1] = -np.inf  # padding columns
    logits[..., 0] = rng.choice([0.0, -0.0], (B, Q))
    return logits.astype(np.float32)


FILTERS = {
    "top_k": (0, 1, 2, 5, V - 1, V, V + 7, 2**31 - 1),
    "top_p": (1e-9, 0.3, 0.5, 0.9, 0.999999, 1.0),
    "min_p": (0.0, 1e-6, 0.1, 0.5, 1.0),
}


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**31), ties=st.booleans(), on=st.sets(st.sampled_from(sorted(FILTERS)), min_size=1)
)
def test_filters_equal_a_sort(seed, ties, on):
    """PEER.2, PEER.3, DST.3: per-row values, ties kept at the threshold of top-k, the smallest set that
    reaches top-p, sizes 1, small and nearly everything. (A row whose sum lies within rounding of its
    top-p may go either way.)"""
    logits, rng = random_logits(seed, ties), np.random.default_rng(seed)
    values = {name: [rng.choice(FILTERS[name]) for _ in range(B)] for name in sorted(on)}
    found = kept(logits, **values)
    for b in range(B):
        row = {name: column[b] for name, column in values.items()}
        for q in range(Q):
            edges = [row | {"top_p": row["top_p"] + d} for d in (-1e-6, 1e-6)] if "top_p" in row else [row]
            # masses are summed in float32: nearly everything may mean everything
            sets = [oracle.allowed(logits[b, q].astype(np.float64), edge) for edge in [row, *edges]]
            sets = [s & (logits[b, q] > -np.inf) for s in sets]
            assert any(np.array_equal(found[b, q], s) for s in sets)


def test_ties_at_a_threshold_stay():
    """PEER.2: equal logits share their fate, 0.0 and -0.0 included."""
    logits = np.array([[[0.0, -0.0, -1.0, 1.0]]])
    assert kept(logits, top_k=2)[0, 0].tolist() == [True, True, False, True]
    assert kept(logits, top_p=0.6)[0, 0].tolist() == [True, True, False, True]
    assert kept(-logits, top_k=2)[0, 0].tolist() == [True, True, True, False]
    assert kept(np.zeros((1, 1, 5)), top_k=1).all()
    assert kept(np.zeros((1, 1, 5)), top_p=0.01).all()


@pytest.mark.parametrize("value", FILTERS["top_k"][1:])
def test_the_best_token_always_stays(value):
    """DST.4: no filter empties a row."""
    for seed in range(20):
        logits = random_logits(seed, seed % 2 == 0)
        found = kept(logits, top_k=value, top_p=1e-9, min_p=1.0)
        best = logits == logits.max(-1, keepdims=True)
        assert np.array_equal(found, best)


def test_filters_apply_in_order():
    """DST.3: top-p counts the mass left by top-k, min-p compares with what is left by both."""
    logits = np.log([[[0.4, 0.3, 0.2, 0.1]]])
    assert kept(logits, top_p=0.75)[0, 0].tolist() == [True, True, True, False]
    assert kept(logits, top_k=2, top_p=0.75)[0, 0].tolist() == [True, True, False, False]
    assert kept(logits, top_k=3, top_p=0.75)[0, 0].tolist() == [True, True, False, False]  # 0.7 / 0.9 > 0.75
    assert kept(logits, min_p=0.6)[0, 0].tolist() == [True, True, False, False]


@pytest.mark.parametrize("temperature", [1e-37, 1e-6, 0.01, 1.0, 1e6, 1e37])
def test_any_temperature_gives_a_law(temperature):
    """NUM.1, DST.3: the smallest ones are an arg-max, the largest are uniform, none gives NaN."""
    logits = np.array([[[30.0, 40.0, 41.0, -60.0, -np.inf, 41.0]]], np.float32)
    cold = np.asarray(jax.jit(smp.temper)(logits, np.array([temperature], np.float32)))
    probs = np.asarray(jax.nn.softmax(cold[0, 0]))
    np.testing.assert_allclose(
        probs, oracle.softmax((logits[0, 0].astype(np.float64) - 41) / temperature), atol=1e-6
    )


def test_a_greedy_row_keeps_its_order():
    logits = random_logits(0, False)
    out = np.asarray(jax.jit(smp.temper)(logits, np.zeros(B, np.float32)))
    assert np.array_equal(out.argmax(-1), logits.argmax(-1))
    assert np.array_equal(np.argsort(out, -1, kind="stable"), np.argsort(logits, -1, kind="stable"))


PENALTIES = {
    "repetition": (1.0, 0.5, 1.7),
    "presence": (0.0, 1.0, -0.5),
    "frequency": (0.0, 0.3, -0.2),
}


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    on=st.sets(st.sampled_from(sorted(PENALTIES)), min_size=1),
    first=st.integers(0, 2),
)
def test_penalties_read_the_history_a_position_would_have(seed, on, first):
    """OPT.2, OPT.4: position i counts the prompt, what was emitted, and the drafts before i; also when only
    a part of the positions is given."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((B, Q, V)).astype(np.float32)
    drafts = rng.integers(0, 4, (B, 4)).astype(np.int32)  # few ids, so that drafts repeat one another
    values = {name: [float(rng.choice(PENALTIES[name])) for _ in range(B)] for name in sorted(on)}
    history = [rng.integers(0, 6, rng.integers(0, 5)).tolist() for _ in range(B)]
    prompt = [rng.integers(0, V, 2).tolist() for _ in range(B)]
    counts = Counts(
        jnp.asarray([[t in p for t in range(V)] for p in prompt]),
        jnp.asarray([[h.count(t) for t in range(V)] for h in history], jnp.int32),
    )
    sampling = Sampling(**{name: jnp.asarray(v, jnp.float32) for name, v in values.items()})
    out = np.asarray(adjust(logits, sampling, counts, drafts, first))
    for b in range(B):
        row = {name: column[b] for name, column in values.items()}
        for q in range(Q):
            past = history[b] + drafts[b, : first + q].tolist()
            np.testing.assert_allclose(
                out[b, q], oracle.adjust(logits[b, q], row, past, prompt[b]), atol=1e-5
            )


@settings(max_examples=30)
@given(seed=st.integers(0, 2**31))
def test_counting_what_was_emitted(seed):
    """OPT.4: repeated tokens count each time, those beyond ``emitted`` not at all."""
    rng = np.random.default_rng(seed)
    tokens, emitted = rng.integers(0, 4, (B, 5)).astype(np.int32), rng.integers(0, 6, B)
    before = rng.integers(0, 3, (B, V)).astype(np.int32)
    counts = Counts(jnp.zeros((B, V), bool), jnp.asarray(before))
    after = count(counts, tokens, emitted).output
    for b in range(B):
        added = np.bincount(tokens[b, : emitted[b]], minlength=V)
        assert np.array_equal(after[b], before[b] + added)


SEEDS = np.stack([np.asarray(jax.random.key_data(jax.random.key(s))) for s in range(B)])


def all_keys(lengths=range(1, 9), positions=range(1, 9)) -> dict:
    """Raw key of every row, tag, position and, where it counts, length at the start of the round."""
    keys, pos = (
        smp.row_keys(jnp.asarray(SEEDS)),
        jnp.broadcast_to(jnp.asarray([*positions]), (B, len(positions))),
    )
    out = {}

    def note(found, *name):
        for b, row in enumerate(np.asarray(jax.random.key_data(found))):
            out.update({(b, *name, p): tuple(k.tolist()) for p, k in zip(positions, row, strict=True)})

    note(smp.position_keys(keys, smp.MATCH, pos), smp.MATCH, None)
    for length in lengths:
        rounds = smp.round_keys(keys, jnp.full(B, length))
        for tag in (smp.DRAFT, smp.ACCEPT, smp.EXTRA):
            note(smp.position_keys(rounds, tag, pos), tag, length)
    return out


def test_no_key_serves_twice():
    """RNG.1: row, tag, position and round each change the key."""
    keys = all_keys()
    assert len(set(keys.values())) == len(keys) == B * 8 * (1 + 3 * 8)


def test_keys_do_not_depend_on_the_batch():
    """RNG.2: a row's keys are those it has alone, at whatever place of the batch and of the block."""
    keys = smp.row_keys(jnp.asarray(SEEDS))
    pos = jnp.arange(B)[:, None] + jnp.arange(Q)
    whole = jax.random.key_data(smp.position_keys(keys, smp.MATCH, pos))
    for b in range(B):
        for q in range(Q):
            one = smp.position_keys(keys[b : b + 1], smp.MATCH, pos[b : b + 1, q : q + 1])
            assert np.array_equal(jax.random.key_data(one)[0, 0], whole[b, q])


def test_noise_is_gumbel_and_independent():
    """DST.4: neighbouring positions, rows and rounds share nothing; an arg-max of noise is uniform."""
    n, vocab = 3000, 4
    keys = jax.vmap(jax.random.key)(jnp.arange(n))
    two = smp.gumbel(smp.position_keys(keys, smp.MATCH, jnp.tile(jnp.array([[5, 6]]), (n, 1))), vocab)
    again = smp.gumbel(
        smp.position_keys(smp.round_keys(keys, jnp.full(n, 5)), smp.EXTRA, jnp.full((n, 1), 5)), vocab
    )
    noise = np.concatenate([two, again], 1).reshape(n, -1)
    assert np.abs(np.corrcoef(noise.T) - np.eye(noise.shape[1])).max() < 0.08
    np.testing.assert_allclose(noise.mean(0), np.euler_gamma, atol=0.1)
    np.testing.assert_allclose(noise.var(0), np.pi**2 / 6, atol=0.2)
