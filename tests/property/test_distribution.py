"""The joint law of three consecutive sampled tokens, against the exact product.

The target is a table of logits by position and last token, so p and q depend on the context and the law is
known. Thousands of rows, in groups with their own sampling values, run three rounds. Every statistical test
is shown to fail on a planted mistake.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import specjax
from specjax import testing
from specjax.core import accept as accept_module, round as rnd, sampling as smp
from specjax.drafters import ngram
from specjax.types import Counts, Sampling, State

V, K, PERIOD, ANCHOR, NEW = 5, 3, 3, 2, 3
ROWS = 16_000
ENOUGH, NEVER = 1e-4, 1e-7  # p-values of a right law (some eighty are looked at) and of a wrong one

TARGET = testing.micro_params(V, PERIOD, seed=3, spread=1.2)
TABLE = np.asarray(TARGET.target.table, np.float64)
SHARP = testing.bigram(K, V, seed=11, spread=2.5)
FULL, REDUCED = testing.bigram(K, V, seed=5), testing.bigram(K, V, seed=6, ids=(4, 0, 2))

DRAFTERS = {
    "plain": (None, None),
    "sampled": ("SAMPLED", FULL),
    "sampled, own vocabulary": ("SAMPLED", REDUCED),
    "point": ("POINT", FULL),
    "mixed rows": ("MIXED", FULL),
    "mixed rows, own vocabulary": ("MIXED", REDUCED),
    "sharp": ("SAMPLED", SHARP),
    "liar": ("LIAR", FULL),
}
#: Sampling values of the groups of rows; a row of a batch belongs to group ``row % groups``.
SETTINGS = {
    "one temperature": [{"temperature": 1.0}],
    "temperature": [{"temperature": t} for t in (1.0, 0.7, 0.0, 1.6)],
    "top-k": [{"temperature": 1.0, "top_k": k} for k in (1, 2, 0, 4)],
    "top-p": [{"temperature": 1.0, "top_p": p} for p in (0.05, 0.5, 0.97, 1.0)],
    "all filters": [
        {"temperature": 1.3, "top_k": 3, "top_p": 0.9, "min_p": 0.0},
        {"temperature": 0.7, "top_k": 0, "top_p": 0.7, "min_p": 0.1},
        {"temperature": 0.0, "top_k": 2, "top_p": 0.5, "min_p": 0.0},
        {"temperature": 1.0, "top_k": 4, "top_p": 1.0, "min_p": 0.3},
    ],
    "history": [
        {"temperature": 1.0, "repetition": 2.0, "presence": 0.0, "frequency": 0.0},
        {"temperature": 1.0, "repetition": 1.0, "presence": 1.0, "frequency": 0.7},
        {"temperature": 0.7, "repetition": 0.6, "presence": 0.0, "frequency": 1.5},
    ],
    "bias": [
        {"temperature": 1.0, "bias": np.array([0, -np.inf, 1, 0, 0], np.float32)},
        {"temperature": 1.0, "bias": np.array([0, 0, 0, 2, -1], np.float32)},
    ],
}


def batch(groups, seed: int, rows: int) -> State:
    """Rows with one committed token; a budget that no draft reaches."""
    member = np.arange(rows) % len(groups)
    column = lambda name: np.stack([np.asarray(g[name]) for g in groups])[member]  # noqa: E731
    values = {n: jnp.asarray(column(n), jnp.int32 if n == "top_k" else jnp.float32) for n in groups[0]}
    counts = None
    if "presence" in values:
        prompt = jnp.zeros((rows, V), bool).at[:, ANCHOR].set(True)
        counts = Counts(prompt, jnp.zeros((rows, V), jnp.int32))
    keys = jax.random.key_data(jax.random.split(jax.random.key(seed), rows))
    full = lambda value: jnp.full((rows,), value, jnp.int32)  # noqa: E731
    return State(
        tokens=jnp.zeros((rows, 16), jnp.int32).at[:, 0].set(ANCHOR),
        length=full(1),
        prompt_len=full(1),
        limit=full(1 + NEW + K + 1),
        done=jnp.zeros((rows,), bool),
        reason=full(0),
        request_id=full(0),
        stop_ids=jnp.full((rows, 1), -1, jnp.int32),
        key_data=keys,
        sampling=Sampling(**values),
        counts=counts,
        target=(),
        drafter=(),
    )


@functools.cache
def rounds(drafter: str, rule: str):
    """Jitted: ``NEW`` rounds, every one of which emits at least a token."""
    name, cfg = DRAFTERS[drafter]
    name = name and f"specjax.testing:{name}"
    pair = dataclasses.replace(TARGET.meta, drafter=name, drafter_cfg=cfg).pair
    weights = (TARGET.target, None)

    def one(state, _):
        proposal, state = rnd.draft(pair, weights, state, K)
        state, verdict, _ = rnd.verify(pair, weights, state, proposal, rule)
        return state, verdict.accepted

    @jax.jit
    def run(state):
        state, accepted = jax.lax.scan(one, state, length=NEW)
        return state.tokens[:, 1 : 1 + NEW], accepted[0]

    return run


def sample(drafter: str, rule: str, setting: str, seed: int = 0, rows: int = ROWS):
    """(tokens [rows, 3], drafts accepted in the first round [rows])."""
    rows -= rows % len(SETTINGS[setting])  # whole groups, so that samples can be joined
    state = batch(SETTINGS[setting], seed, rows)
    tokens, accepted = jax.tree.map(np.asarray, rounds(drafter, rule)(state))
    return tokens, accepted


def exact_law(group) -> np.ndarray:
    """Law of the three tokens under the target and a group's sampling values."""

    def step(past):
        logits = TABLE[len(past) % PERIOD, past[-1] if past else ANCHOR]
        adjusted, probs = oracle.law(logits, group, past, [ANCHOR])
        return np.eye(V)[np.argmax(adjusted)] if probs is None else probs

    return testing.joint_law(step, V, NEW)


def p_values(tokens, setting: str) -> list[float]:
    """One per group of rows; a group with one possible outcome counts as 1 or 0."""
    groups, out = SETTINGS[setting], []
    for g, group in enumerate(groups):
        mine, law = tokens[g :: len(groups)], exact_law(group)
        counts = testing.histogram(mine, V)
        if law.max() == 1:
            out.append(float(counts[law == 1].sum() == len(mine)))
        else:
            out.append(testing.chisquare(counts, law))
    return out


CASES = [
    ("plain", "match", "all filters"),
    ("plain", "reject", "history"),
    ("sampled", "reject", "temperature"),
    ("sampled", "reject", "top-k"),
    ("sampled", "reject", "top-p"),
    ("sampled", "reject", "history"),
    ("sampled", "match", "temperature"),
    ("sampled, own vocabulary", "reject", "all filters"),
    ("sampled, own vocabulary", "reject", "bias"),
    ("point", "reject", "temperature"),
    ("point", "reject", "top-p"),
    ("point", "reject", "history"),
    ("point", "match", "all filters"),
    ("point", "match", "history"),
    ("mixed rows", "reject", "temperature"),
    ("mixed rows", "reject", "all filters"),
    ("mixed rows, own vocabulary", "reject", "top-k"),
    ("mixed rows", "match", "bias"),
    ("sharp", "block", "one temperature"),
    ("sampled", "block", "top-p"),
    ("sampled, own vocabulary", "block", "all filters"),
    ("mixed rows", "block", "history"),
]
RULES = ("match", "reject", "block")
#: Every drafter with every setting, under rules that take turns, so that they meet every drafter and every setting.
EVERY_CASE = [
    (drafter, RULES[(i + j) % 3], setting)
    for i, drafter in enumerate(list(DRAFTERS)[:-1])
    for j, setting in enumerate(SETTINGS)
]


def follows_the_target(drafter, rule, setting, seeds=(0,)):
    tokens, accepted = map(
        np.concatenate, zip(*(sample(drafter, rule, setting, s) for s in seeds), strict=True)
    )
    assert min(p_values(tokens, setting)) > ENOUGH
    assert (accepted.max() == K) == (drafter != "plain")


@pytest.mark.parametrize(("drafter", "rule", "setting"), CASES)
def test_joint_law(drafter, rule, setting):
    """DST.1, DST.3, DST.4, DST.6, OPT.1, PEER.1, PEER.2, PEER.3: a token outside the filtered support gives
    a p-value of 0."""
    follows_the_target(drafter, rule, setting)


@pytest.mark.long
@pytest.mark.parametrize(("drafter", "rule", "setting"), EVERY_CASE)
def test_joint_law_all(drafter, rule, setting):
    """DST.1 to DST.6: every pair of drafter, rule and setting, with more samples."""
    follows_the_target(drafter, rule, setting, (1, 2))


@pytest.mark.parametrize("drafter", ["sampled", "point", "sampled, own vocabulary"])
def test_acceptance_is_the_overlap_of_the_laws(drafter):
    """DST.5: position 1 is accepted with probability sum min(p, q), a point with p of its token."""
    _, accepted = sample(drafter, "reject", "temperature", seed=1)
    cfg = DRAFTERS[drafter][1]
    q = np.zeros(V)
    q[list(cfg.ids) or slice(None)] = cfg.table[ANCHOR]
    if drafter == "point":
        q = np.eye(V)[q.argmax()]
    for g, group in enumerate(SETTINGS["temperature"]):
        if group["temperature"] == 0:
            continue
        _, p = oracle.law(TABLE[0, ANCHOR], group)
        expected, found = np.minimum(p, q).sum(), accepted[g :: len(SETTINGS["temperature"])] > 0
        assert abs(found.mean() - expected) < 3 * np.sqrt(expected * (1 - expected) / found.size)


@pytest.mark.parametrize("drafter", ["sampled", "sharp"])
def test_a_block_keeps_no_fewer(drafter):
    """DST.5: on average the block rule keeps at least what the ratio test keeps, here clearly more."""
    _, block = sample(drafter, "block", "one temperature", seed=1)
    _, reject = sample(drafter, "reject", "one temperature", seed=1)
    error = np.sqrt((block.var() + reject.var()) / block.size)
    assert block.mean() - reject.mean() > 3 * error
    assert (
        np.mean(block >= 1) < np.mean(reject >= 1) + 3 * error
    )  # it gains on the later drafts, not on the first


def test_public_calls_follow_the_target():
    """DST.7: temperature and filters reach draft and verification through ``decode``."""
    name, cfg = "specjax.testing:SAMPLED", FULL
    params = TARGET.replace(meta=dataclasses.replace(TARGET.meta, drafter=name, drafter_cfg=cfg))
    call = {"n": 1500, "rows": 1500, "max_new_tokens": NEW + K, "temperature": 1.6, "top_k": 4, "seed": 8}
    out = specjax.decode(params, [[ANCHOR]], **call)
    law = exact_law({"temperature": 1.6, "top_k": 4})
    assert testing.chisquare(testing.histogram([t[:NEW] for t in out.tokens[0]], V), law) > ENOUGH
    assert out.total.accepted > 500


def test_a_lookup_follows_the_target():
    """DST.1, PEER.7, PEER.8: what the n-gram drafter copies has no probabilities: it counts as certain. The
    prompt repeats itself, so that there is something to copy, and more once tokens have come."""
    cfg = ngram.Config(K, 2, 1)
    params = TARGET.replace(meta=dataclasses.replace(TARGET.meta, drafter="ngram", drafter_cfg=cfg))
    call = {
        "n": 1500,
        "rows": 1500,
        "max_new_tokens": NEW + K,
        "temperature": 1.0,
        "seed": 2,
        "rule": "reject",
    }
    out = specjax.decode(params, [[ANCHOR, 0, 1, ANCHOR, 0, 1, ANCHOR]], **call)
    tokens = [t[:NEW] for t in out.tokens[0]]
    assert testing.chisquare(testing.histogram(tokens, V), exact_law({"temperature": 1.0})) > ENOUGH
    assert out.total.accepted > 500


# ---------------------------------------------------------------- planted mistakes

right_extra = accept_module._extra
right_keys, right_gumbel, right_cut = smp.position_keys, smp.gumbel, accept_module._at_cut


def draft_keys_again(keys, tag, pos):
    """The accept test draws from the very key that drew the draft."""
    if tag != smp.ACCEPT:
        return right_keys(keys, tag, pos)
    base = right_keys(keys, smp.DRAFT, pos[:, :1])[:, 0]
    return jax.vmap(lambda k: jax.vmap(lambda i: jax.random.fold_in(k, i))(jnp.arange(pos.shape[1])))(base)


def one_key_for_all_positions(keys, tag, pos):
    return right_keys(keys, tag, pos[:, :1] + 0 * pos)


def unfiltered_cut(rows, row, accepted):
    raw, adjusted, _ = right_cut(rows, row, accepted)
    return raw, adjusted, smp.temper(adjusted, rows.state.sampling.temperature)


def neighbours_temperature(logits, temperature):
    return logits / jnp.maximum(jnp.roll(temperature, 1), 0.5)[:, None, None]


PLANTED = {
    "resample from p, not from the residual": (
        "sampled", "reject", "temperature", accept_module, "_draft_row", lambda p, i, v: jnp.zeros((len(i), v)),
    ),
    "resample a point from p": (
        "point", "reject", "temperature", accept_module, "_draft_row", lambda p, i, v: jnp.zeros((len(i), v)),
    ),
    "accept with p, not with p/q": (
        "sampled", "reject", "temperature", accept_module, "_draft_probability", lambda p: jnp.ones(p.tokens.shape),
    ),
    "accept with q": (
        "sampled", "reject", "temperature", accept_module, "_draft_probability", lambda p: 0.2 / p.q.max(-1),
    ),
    "the draft's key decides the acceptance": (
        "sampled", "reject", "temperature", smp, "position_keys", draft_keys_again,
    ),
    "one key for all positions of a block": (
        "sampled", "reject", "temperature", smp, "position_keys", one_key_for_all_positions,
    ),
    "one key for all positions, match": (
        "point", "match", "temperature", smp, "position_keys", one_key_for_all_positions,
    ),
    "correction and bonus are arg-max": (
        "sampled", "reject", "temperature", smp, "gumbel", lambda keys, vocab: jnp.zeros((*keys.shape, vocab)),
    ),
    "no filter at the correction and the bonus": (
        "sampled", "reject", "top-k", accept_module, "_at_cut", unfiltered_cut,
    ),
    "no filter at all": ("sampled", "reject", "top-p", smp, "filtered", lambda logits, sampling: logits),
    "penalties forget the drafts": (
        "point", "reject", "history", smp, "_counts_before", lambda o, d, at: jnp.tile(o[:, None], (1, len(at), 1)),
    ),
    "temperature of another row": (
        "sampled", "reject", "temperature", smp, "temper", neighbours_temperature,
    ),
    "block: a prefix is kept whenever it is reached": (
        "sampled", "block", "temperature", accept_module, "_chances", lambda reach, surplus, count: reach,
    ),
    "block: the ratio test's residual": (
        "sharp", "block", "one temperature", accept_module, "_extra", lambda *a: right_extra(*a[:-1], a[-1] * 0 + 1),
    ),
    "block: keys do not tell rounds apart": (
        "sharp", "block", "one temperature", smp, "round_keys", lambda keys, length: keys,
    ),
    "an arg-max that claims to be drawn from q": ("liar", "reject", "temperature", None, "", None),
}  # fmt: skip


@pytest.mark.parametrize("mistake", PLANTED)
def test_planted_mistakes_are_found(mistake, monkeypatch):
    """PEER.1: the same test with a wrong rule fails, by far."""
    drafter, rule, setting, module, name, instead = PLANTED[mistake]
    rounds.cache_clear()
    if module is not None:
        monkeypatch.setattr(module, name, instead)
    try:
        tokens, _ = sample(drafter, rule, setting)
    finally:
        rounds.cache_clear()
    assert min(p_values(tokens, setting)) < NEVER


def test_a_pooled_marginal_would_not_find_them(monkeypatch):
    """PEER.1: why the joint law is looked at. Reused keys leave the first token's law intact."""
    monkeypatch.setattr(smp, "position_keys", one_key_for_all_positions)
    rounds.cache_clear()
    try:
        tokens, _ = sample("point", "match", "temperature")
    finally:
        rounds.cache_clear()
    law = exact_law(SETTINGS["temperature"][0])
    first = np.bincount(tokens[::4, 0], minlength=V)
    assert testing.chisquare(first, law.sum((1, 2))) > ENOUGH
    assert testing.chisquare(testing.histogram(tokens[::4], V), law) < NEVER
