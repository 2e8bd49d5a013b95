"""The vectorised verifier against a plain loop over rows, on random ragged inputs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given, settings, strategies as st

from specjax.core import accept as accept_module, sampling as smp
from specjax.core.accept import accept
from specjax.types import LENGTH, NONFINITE, RUNNING, STOP, Counts, Proposal, Sampling, State

B, K, V, STOPS = 6, 4, 7, 2
OPTIONS = {
    "temperature": [0.0, 0.5, 0.7, 1.0, 2.0],
    "top_k": [0, 1, 2, 5, V],
    "top_p": [0.2, 0.6, 0.9, 1.0],
    "min_p": [0.0, 0.05, 0.4],
    "repetition": [1.0, 0.5, 2.5],
    "presence": [0.0, 2.0, -1.0],
    "frequency": [0.0, 1.0, -0.7],
}
INTEGERS = ("top_k",)
GREEDY, HOT = (), ("temperature",)
FILTERS = ("temperature", "top_k", "top_p", "min_p")
EVERYTHING = (*OPTIONS, "bias")


def draw_case(seed: int, options, q_kind: str, spread: float = 2.0, broken: float = 0.0):
    """A random batch: ragged drafts that are often right, budgets and stops inside the block."""
    rng = np.random.default_rng(seed)
    logits = (spread * rng.standard_normal((B, K + 1, V))).astype(np.float32)
    best = logits.argmax(-1)[:, :K]
    drafts = np.where(rng.random((B, K)) < 0.7, best, rng.integers(0, V, (B, K))).astype(np.int32)
    logits[rng.random((B, K + 1)) < broken] = rng.choice([np.nan, np.inf, -np.inf])
    values = {name: [rng.choice(OPTIONS[name]) for _ in range(B)] for name in options if name in OPTIONS}
    length = rng.integers(1, 9, B)
    rows = []
    for b in range(B):
        row = {name: column[b] for name, column in values.items()}
        row |= {"length": int(length[b]), "limit": int(length[b] + rng.integers(1, K + 3))}
        row |= {"stops": rng.choice(V, rng.integers(0, STOPS + 1), replace=False).tolist()}
        row |= {"key": rng.integers(0, 2**32, 2, np.uint32) if "temperature" in options else None}
        if set(options) & {"repetition", "presence", "frequency"}:
            row |= {"prompt": rng.integers(0, V, 2).tolist(), "history": rng.integers(0, V, 3).tolist()}
        if "bias" in options:
            row["bias"] = np.where(rng.random(V) < 0.2, -np.inf, rng.standard_normal(V)).astype(np.float32)
            row["bias"][rng.integers(0, V)] = 0.0
        rows.append(row)
    count = rng.integers(0, K + 1, B)
    count = np.minimum(count, [r["limit"] - r["length"] - 1 for r in rows])
    q = draw_q(rng, drafts, "full" if q_kind == "drawn" else q_kind)
    if q_kind == "drawn":
        drafts = (rng.random((B, K, 1)) < np.cumsum(q[0], -1)).argmax(-1).astype(np.int32)
    return logits, drafts, count, rows, q


def draw_q(rng, drafts, kind: str):
    """(q [B K Vq], ids or None, point [B] or None): random laws that hold the drafts."""
    if kind == "point":
        return None
    columns = V if kind == "full" else V - 2
    weight = rng.random((B, K, columns)) ** 3 + 1e-3
    q = (weight / weight.sum(-1, keepdims=True)).astype(np.float32)
    if kind == "full":
        return q, None, None
    ids = rng.permutation(V)[:columns].astype(np.int32)
    return q, ids, rng.random(B) < 0.4


def over_target_ids(q, row: int):
    """What the oracle wants of a row: [K V], or None for a point."""
    if q is None or (q[2] is not None and q[2][row]):
        return None
    probs, ids, _ = q
    out = np.zeros((K, V))
    out[:, np.arange(V) if ids is None else ids] = probs[row]
    return out


def state_of(rows, options) -> State:
    """The fields of a state that acceptance reads."""
    column = lambda name, dtype=np.float32: jnp.asarray([r[name] for r in rows], dtype)  # noqa: E731
    sampling = {n: column(n, np.int32 if n in INTEGERS else np.float32) for n in options if n != "bias"}
    if "bias" in options:
        sampling["bias"] = jnp.asarray([r["bias"] for r in rows])
    counts = None
    if "prompt" in rows[0]:
        prompt, output = np.zeros((B, V), bool), np.zeros((B, V), np.int32)
        for b, row in enumerate(rows):
            prompt[b, row["prompt"]] = True
            np.add.at(output[b], row["history"], 1)
        counts = Counts(jnp.asarray(prompt), jnp.asarray(output))
    stops = [r["stops"] + [-1] * (STOPS - len(r["stops"])) for r in rows]
    zeros = jnp.zeros(B, jnp.int32)
    return State(
        tokens=jnp.zeros((B, 1), jnp.int32),
        length=column("length", np.int32),
        prompt_len=zeros,
        limit=column("limit", np.int32),
        done=zeros > 0,
        reason=zeros,
        request_id=zeros,
        stop_ids=jnp.asarray(stops, jnp.int32),
        key_data=column("key", np.uint32) if "temperature" in options else None,
        sampling=Sampling(**sampling),
        counts=counts,
        target=(),
        drafter=(),
    )


def untraced():
    """The verifier, with nothing traced yet."""

    @functools.partial(jax.jit, static_argnames=("rule", "logit_bytes"))
    def verify(logits, proposal, count, active, state, rule, logit_bytes=2**28):
        identity = lambda hidden: hidden  # noqa: E731  # the hidden state is the row of logits
        return accept(logits, identity, proposal, count, active, state, rule, True, logit_bytes)

    return verify


vectorised = untraced()


def verdict_of(case, options, rule, active=None, garbage=0, **limit):
    logits, drafts, count, rows, q = case
    drafts = np.where(np.arange(K) < count[:, None], drafts, garbage).astype(np.int32)
    probs, ids, point = q or (None, None, None)
    array = lambda x: None if x is None else jnp.asarray(x)  # noqa: E731
    proposal = Proposal(array(drafts), array(count), array(probs), array(ids), array(point))
    active = np.ones(B, bool) if active is None else active
    verdict = vectorised(logits, proposal, array(count), active, state_of(rows, options), rule, **limit)
    return jax.tree.map(np.asarray, verdict)


def same_as_loop(case, options, rule, **how):
    """Compare with the oracle, row by row; returns the verdict."""
    logits, drafts, count, rows, q = case
    verdict = verdict_of(case, options, rule, **how)
    for b, row in enumerate(rows):
        valid = drafts[b, : count[b]].tolist()
        accepted, tokens, reason, scores = oracle.accept_row(
            logits[b], valid, row, rule, over_target_ids(q, b)
        )
        n = len(tokens)
        assert verdict.emitted[b] == n
        assert verdict.out_tokens[b, :n].tolist() == tokens
        assert verdict.accepted[b] == accepted
        assert verdict.reason[b] == reason
        np.testing.assert_allclose(verdict.logprobs[b, :n], scores, rtol=0, atol=1e-5)
    return verdict


VARIANTS = [
    (GREEDY, "match", "point"),
    (("bias", "repetition", "presence", "frequency"), "match", "point"),
    (HOT, "match", "point"),
    (EVERYTHING, "match", "point"),
    (HOT, "reject", "point"),
    (FILTERS, "reject", "full"),
    (EVERYTHING, "reject", "ids"),
    (("temperature", "repetition", "frequency"), "reject", "point"),
    (("temperature", "presence"), "block", "point"),
    (FILTERS, "block", "full"),
    (EVERYTHING, "block", "ids"),
    (HOT, "block", "drawn"),
]
names = [f"{'+'.join(o[:2]) or 'greedy'}-{r}-{q}" for o, r, q in VARIANTS]


@pytest.mark.parametrize(("options", "rule", "q_kind"), VARIANTS, ids=names)
@settings(max_examples=60)
@given(seed=st.integers(0, 2**31), spread=st.sampled_from([0.5, 2.0, 6.0]))
def test_equals_a_loop_over_rows(options, rule, q_kind, seed, spread):
    """PEER.4, PEER.3, OPT.4, DST.3, DST.6, LGP.1, LGP.2, STP.2: 0..K drafts per row, stops and budgets inside
    the block, options that only some rows set, greedy rows beside sampled ones."""
    same_as_loop(draw_case(seed, options, q_kind, spread), options, rule)


@pytest.mark.parametrize(("options", "rule", "q_kind"), [VARIANTS[i] for i in (0, 2, 5, 9)])
@settings(max_examples=40)
@given(seed=st.integers(0, 2**31))
def test_rows_without_finite_logits_end(options, rule, q_kind, seed):
    """NUM.1: nothing is drawn from NaN or infinite logits; what was accepted before them stays."""
    verdict = same_as_loop(draw_case(seed, options, q_kind, broken=0.15), options, rule)
    assert np.all(np.isfinite(verdict.logprobs[np.arange(K + 1) < verdict.emitted[:, None]]))


@pytest.mark.parametrize("values", [(np.nan,), (np.inf,), (-np.inf,), (np.nan, -np.inf)])
def test_one_bad_value_is_enough(values):
    """NUM.1: one NaN or +inf breaks a row; -inf in some columns (padding) does not."""
    case = draw_case(3, GREEDY, "point")
    bad = np.isnan(values[0]) or values[0] > 0
    case[0][:, 0, : len(values)] = values
    verdict = verdict_of(case, GREEDY, "match")
    assert np.all((verdict.reason == NONFINITE) == bad)
    assert np.all((verdict.emitted == 0) == bad)


def test_options_cannot_make_a_row_draw_from_nothing():
    """NUM.1: a bias that leaves only padding columns, or one that overflows, ends the row as well."""
    for rule, bias in (("match", -np.inf), ("reject", -np.inf), ("match", np.inf), ("reject", 3e38)):
        case = draw_case(0, ("temperature", "bias"), "point")
        case[0][..., :2] = -np.inf if bias < 0 else 3e38
        for row in case[3]:
            row["bias"] = np.where(np.arange(V) < 2, 0 if bias < 0 else bias, bias).astype(np.float32)
        verdict = verdict_of(case, ("temperature", "bias"), rule)
        assert np.all(verdict.reason == NONFINITE)
        assert np.all(verdict.emitted == 0)


@pytest.mark.parametrize(("options", "rule", "q_kind"), [VARIANTS[i] for i in (3, 6, 10)])
@settings(max_examples=15)
@given(seed=st.integers(0, 2**31))
def test_block_size_does_not_matter(options, rule, q_kind, seed):
    """PRF.8: positions unembedded one, two or three at a time, the last block reaching beyond the end."""
    case = draw_case(seed, options, q_kind)
    whole = verdict_of(case, options, rule)
    for positions in (1, 2, 3):
        parts = verdict_of(case, options, rule, logit_bytes=4 * B * V * positions)
        for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
            kept = np.arange(K + 1) < whole.emitted[:, None]
            np.testing.assert_array_equal(a[kept] if a.ndim == 2 else a, b[kept] if b.ndim == 2 else b)


@pytest.mark.parametrize(("options", "rule", "q_kind"), [VARIANTS[i] for i in (3, 6, 10)])
@settings(max_examples=15)
@given(seed=st.integers(0, 2**31))
def test_what_lies_beyond_count_does_not_matter(options, rule, q_kind, seed):
    """PEER.6: any padding of the drafts, also ids that do not exist."""
    case = draw_case(seed, options, q_kind)
    wanted = verdict_of(case, options, rule)
    for garbage in (-1, V, 2**31 - 1):
        found = verdict_of(case, options, rule, garbage=garbage)
        kept = np.arange(K + 1) < wanted.emitted[:, None]
        assert np.array_equal(found.emitted, wanted.emitted)
        assert np.array_equal(found.out_tokens[kept], wanted.out_tokens[kept])
        assert np.array_equal(found.logprobs[kept], wanted.logprobs[kept])


@pytest.mark.parametrize(("options", "rule", "q_kind"), [VARIANTS[i] for i in (3, 4, 8)])
@pytest.mark.parametrize("missing", [-1, V, 2**31 - 1])
def test_ids_that_do_not_exist_are_wrong_drafts(options, rule, q_kind, missing):
    """VOC.3, DST.1: a draft id outside the vocabulary is refused, and the token after it follows the
    target's own law."""
    for seed in range(5):
        logits, drafts, count, rows, q = draw_case(seed, options, q_kind)
        drafts[:, 1] = missing
        case = (logits, drafts, count, rows, q)
        verdict = verdict_of(case, options, rule, garbage=missing)
        for b, row in enumerate(rows):
            first = drafts[b, : min(count[b], 1)].tolist()
            refused = [*first, missing] if count[b] > 1 else first
            _, tokens, reason, scores = oracle.accept_row(logits[b], refused, row, rule)
            n = len(tokens)
            assert verdict.out_tokens[b, : verdict.emitted[b]].tolist() == tokens
            assert verdict.accepted[b] == min(sum(t == d for t, d in zip(tokens, first, strict=False)), n)
            assert verdict.reason[b] == reason
            np.testing.assert_allclose(verdict.logprobs[b, :n], scores, atol=1e-5)


@pytest.mark.parametrize(("options", "rule", "q_kind"), [VARIANTS[i] for i in (3, 6, 10)])
@settings(max_examples=15)
@given(seed=st.integers(0, 2**31))
def test_rows_are_independent(options, rule, q_kind, seed):
    """RNG.2, DST.6: permuted rows give permuted verdicts; inactive rows emit nothing and touch no other."""
    case = draw_case(seed, options, q_kind)
    logits, drafts, count, rows, q = case
    whole = verdict_of(case, options, rule)
    turn = np.random.default_rng(seed).permutation(B)
    pick = lambda x: None if x is None else x[turn]  # noqa: E731
    turned_q = None if q is None else (pick(q[0]), q[1], pick(q[2]))
    turned = verdict_of(
        (logits[turn], drafts[turn], count[turn], [rows[i] for i in turn], turned_q), options, rule
    )
    active = np.arange(B) % 2 == 0
    half = verdict_of(case, options, rule, active=active)
    for a, b, c in zip(*map(jax.tree.leaves, (whole, turned, half)), strict=True):
        np.testing.assert_array_equal(a[turn], b)
        np.testing.assert_array_equal(a[active], c[active])
    assert not half.emitted[~active].any()
    assert not half.accepted[~active].any()
    assert np.all(half.reason[~active] == RUNNING)


def table_case(drafts, targets, limit=99, stops=()):
    """Greedy rows whose target wants exactly ``targets``."""
    logits = np.zeros((B, K + 1, V), np.float32)
    padded, count = np.full((B, K), V - 1, np.int32), np.zeros(B, int)
    rows = [{"length": 3, "limit": 3 + limit, "stops": list(stops), "key": None} for _ in range(B)]
    for b in range(B):
        wanted = targets[b] if b < len(targets) else [0]
        for i, token in enumerate(wanted):
            logits[b, i, token] = 5.0
        row = drafts[b] if b < len(drafts) else []
        padded[b, : len(row)], count[b] = row, len(row)
    return logits, padded, count, rows, None


def test_greedy_table():
    """PEER.6, BAT.4: bonus on a full match, cut at the first mismatch (also at the first and the last draft,
    and when later drafts are right again), rows without drafts, very uneven rows."""
    drafts = [[1, 2, 3, 4], [1, 2, 3, 4], [0, 2, 3, 4], [1, 2, 3, 0], [], [5]]
    targets = [[1, 2, 3, 4, 5], [1, 0, 3, 4, 5], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [6], [5, 2]]
    verdict = verdict_of(table_case(drafts, targets), GREEDY, "match")
    assert verdict.accepted.tolist() == [4, 1, 0, 3, 0, 1]
    assert verdict.emitted.tolist() == [5, 2, 1, 4, 1, 2]
    kept = [row[:n].tolist() for row, n in zip(verdict.out_tokens, verdict.emitted, strict=True)]
    assert kept == [[1, 2, 3, 4, 5], [1, 0], [1], [1, 2, 3, 4], [6], [5, 2]]
    assert np.all(verdict.reason == RUNNING)


@pytest.mark.parametrize("rule", ["match", "reject"])
def test_stops_and_budgets_table(rule):
    """STP.1, STP.2, LGP.2: a stop at each index of an accepted block, before and beyond the budget."""
    for limit in range(1, K + 3):
        for stop in range(1, K + 2):
            drafts, targets = [[1, 2, 3, 4][: max(limit - 1, 0)]] * B, [[1, 2, 3, 4, 5]] * B
            verdict = verdict_of(table_case(drafts, targets, limit, [stop]), GREEDY, rule)
            emitted = min(stop, limit, len(drafts[0]) + 1)
            assert np.all(verdict.emitted == emitted)
            assert np.all(verdict.accepted == min(emitted, len(drafts[0])))
            reason = STOP if stop <= emitted else LENGTH if emitted == limit else RUNNING
            assert np.all(verdict.reason == reason)


def test_logprobs_are_raw():
    """LGP.1: before bias, penalties and temperature, for accepted, corrected and bonus tokens alike."""
    plain = draw_case(5, EVERYTHING, "point")
    for rule in ("match", "reject"):
        verdict = verdict_of(plain, EVERYTHING, rule)
        raw = np.asarray(jax.nn.log_softmax(plain[0], -1))
        for b in range(B):
            for i in range(verdict.emitted[b]):
                assert abs(verdict.logprobs[b, i] - raw[b, i, verdict.out_tokens[b, i]]) < 1e-5


def test_cases_are_varied():
    """The random cases reach every reason and every accepted count, under both rules."""
    for options, rule, q_kind in (VARIANTS[3], VARIANTS[6], VARIANTS[10]):
        found = [verdict_of(draw_case(seed, options, q_kind), options, rule) for seed in range(20)]
        assert {int(n) for v in found for n in v.accepted} == set(range(K + 1))
        assert {int(n) for v in found for n in v.reason} == {RUNNING, STOP, LENGTH}


WRONG = {
    "residual is the whole target": (
        VARIANTS[5],
        accept_module,
        "_draft_row",
        lambda p, i, v: jnp.zeros((B, v)),
    ),
    "drafts count as certain": (
        VARIANTS[5],
        accept_module,
        "_draft_probability",
        lambda p: p.q[..., 0] * 0 + 1,
    ),
    "keys do not depend on the position": (
        VARIANTS[2],
        smp,
        "position_keys",
        lambda keys, tag, pos: right_keys(keys, tag, pos * 0),
    ),
    "penalties miss the drafts": (
        VARIANTS[1],
        smp,
        "_counts_before",
        lambda o, d, p: right_counts(o, d * 0 - 1, p),
    ),
    "extra token forgets the drafts": (VARIANTS[7], smp, "count_tokens", lambda counts, tokens, n: counts),
    "no top-k, top-p, min-p": (VARIANTS[5], smp, "filtered", lambda logits, sampling: logits),
    "block: a prefix is kept whenever it is reached": (
        VARIANTS[11],
        accept_module,
        "_chances",
        lambda reach, surplus, count: reach,
    ),
    "block: drafts beyond count are looked at": (
        VARIANTS[11],
        accept_module,
        "_chances",
        lambda reach, surplus, count: right_chances(reach, surplus, count * 0 + K),
    ),
    "bad rows are not noticed": (
        VARIANTS[0],
        smp,
        "nonfinite",
        lambda logits: jnp.zeros(logits.shape[:2], bool),
    ),
}
right_keys, right_counts = smp.position_keys, smp._counts_before
right_chances = accept_module._chances


@pytest.mark.parametrize("wrong", WRONG)
def test_the_loop_notices(wrong, monkeypatch):
    """PEER.1: each kind of mistake, planted, makes the comparison fail."""
    (options, rule, q_kind), module, name, instead = WRONG[wrong]
    broken = 0.15 if wrong.startswith("bad rows") else 0.0
    cases = [draw_case(seed, options, q_kind, spread=1.0, broken=broken) for seed in range(20)]
    for case in cases:
        same_as_loop(case, options, rule)
    monkeypatch.setattr(module, name, instead)
    monkeypatch.setitem(globals(), "vectorised", untraced())
    failed = 0
    for case in cases:
        try:
            same_as_loop(case, options, rule)
        except AssertionError:
            failed += 1
    assert failed >= 2
