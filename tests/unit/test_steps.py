"""The public steps of a round, as a notebook uses them: jitted, scanned, taken apart; params as a pytree."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import OPTIONS, PROMPTS, greedy, ngram_params, target, told

import specjax
from specjax.core import programs
from specjax.types import tree_bytes

PAIR, NEW = PROMPTS[:2], 20
BOTH = pytest.mark.parametrize("params", [target, told], ids=["plain", "drafted"])
HOT = {"temperature": 2.0, "top_k": 50}


def start(params, **options):
    return specjax.start(params, PAIR, max_new_tokens=NEW, **options)


@functools.cache
def step(rule="auto", logprobs=False):
    """One round in one jitted call."""

    def run(params, state, key=None):
        proposal, state = specjax.draft_step(params, state, key)
        return specjax.verify_step(params, state, proposal, key, rule=rule, logprobs=logprobs)

    return jax.jit(run)


#: One program instead of many small ones.
draft = jax.jit(specjax.draft_step, static_argnames="k")


def rows(state):
    """Generated tokens of each row."""
    lengths = zip(state.tokens.tolist(), state.prompt_len.tolist(), state.length.tolist(), strict=True)
    return [tokens[a:b] for tokens, a, b in lengths]


def expected(n=NEW):
    return [greedy(p, n)[0] for p in PAIR]


@BOTH
def test_rounds_one_by_one(params):
    """GRD.1, KVR.6: a loop of jitted rounds ends where ``decode`` does; one program serves every round."""
    state, rounds = start(params()), 0
    assert rows(state) == expected(1)
    while not state.done.all():
        before = state.length
        state, verdict = step()(params(), state)
        assert np.array_equal(state.length, before + verdict.emitted)  # I7
        rounds += 1
    assert rows(state) == expected()
    assert (rounds < NEW - 1) == (params is told)
    frozen, verdict = step()(params(), state)  # I4: a finished row emits nothing and does not change
    assert not verdict.emitted.any()
    assert rows(frozen) == expected()


def test_rounds_in_a_scan():
    """PEER.11: the state is a loop carry of constant structure, greedy or not, with a key or without."""
    params = told

    @functools.partial(jax.jit, static_argnums=2)
    def run(params, state, keyed):
        def body(state, key):
            proposal, state = specjax.draft_step(params, state, key if keyed else None)
            state, verdict = specjax.verify_step(params, state, proposal, key if keyed else None)
            return state, verdict.emitted

        return jax.lax.scan(body, state, jax.random.split(jax.random.key(0), NEW - 1))

    state, emitted = run(params(), start(params()), True)
    assert rows(state) == expected()
    assert emitted.sum(0).tolist() == [NEW - 1] * 2
    sampled, _ = run(params(), start(params(), seed=1, **HOT), True)
    assert rows(sampled) != rows(run(params(), start(params(), seed=1, **HOT), False)[0])


def test_a_scan_samples_what_decode_samples():
    """RNG.1: the keys of the state are those of ``decode`` with the same seed."""
    out = specjax.decode(told(), PAIR, max_new_tokens=NEW, seed=5, rule="match", **HOT)
    state = start(told(), seed=5, **HOT)
    while not state.done.all():
        state, _ = step("match")(told(), state)
    assert rows(state) == out.tokens


def test_sampling_needs_a_key():
    """PEER.7: never a hidden one."""
    with pytest.raises(ValueError, match="sampling needs a key: pass seed="):
        start(told(), **HOT)
    state = start(told(), seed=0, **HOT)
    keyless = state.replace(key_data=None)
    with pytest.raises(ValueError, match="sampling needs a key"):
        specjax.draft_step(told(), keyless)
    proposal, _ = draft(told(), state)
    with pytest.raises(ValueError, match="sampling needs a key"):
        specjax.verify_step(told(), keyless, proposal)
    with_key, _ = step()(told(), keyless, jax.random.key(1))
    assert (with_key.length > state.length).all()


def test_a_key_takes_the_place_of_the_seed():
    """RNG.1: the same key gives the same tokens, another key others; rows draw apart from each other."""
    state = specjax.start(target(), [PROMPTS[0]] * 2, max_new_tokens=NEW, seed=0, temperature=30.0)
    draw = lambda key: rows(step()(target(), state, jax.random.key(key))[0])  # noqa: E731
    assert draw(1) == draw(1) != draw(2)
    firsts = [row[-1] for key in range(4) for row in draw(key)]
    assert len(set(firsts)) > 4


def test_log_probabilities_of_a_round():
    """LGP.1: on request."""
    state, verdict = step(logprobs=True)(told(), start(told()))
    for row, (prompt, scores) in enumerate(zip(PAIR, verdict.logprobs, strict=True)):
        n = int(verdict.emitted[row])
        assert n > 1
        np.testing.assert_allclose(scores[:n], greedy(prompt, NEW)[1][1 : n + 1], atol=1e-4)
    assert step()(told(), start(told()))[1].logprobs is None
    assert state.length.tolist() == [len(p) + 1 + int(n) for p, n in zip(PAIR, verdict.emitted, strict=True)]


def test_a_proposal_of_ones_own():
    """I5, I7: whatever is proposed, only what the target agrees with is kept."""
    right = expected()
    state = start(told())
    proposal, _ = draft(told(), state)
    tokens = np.array([right[0][1:5], right[1][1:5]])
    tokens[1, 2] = 5  # never spoken
    mine = proposal.replace(tokens=jnp.array(tokens, jnp.int32), count=jnp.array([4, 4], jnp.int32))
    after, verdict = jax.jit(specjax.verify_step)(told(), state, mine)
    assert verdict.accepted.tolist() == [4, 2]
    assert verdict.emitted.tolist() == [5, 3]
    assert rows(after) == [right[0][:6], right[1][:4]]
    none = mine.replace(count=jnp.zeros(2, jnp.int32))
    assert rows(jax.jit(specjax.verify_step)(told(), state, none)[0]) == expected(2)


def test_width_of_a_draft():
    """PEER.12: a width given explicitly is kept, an absent one is the drafter's."""
    state = start(told())
    assert draft(told(), state)[0].tokens.shape == (2, 4)
    assert draft(told(), state, k=2)[0].tokens.shape == (2, 2)
    assert draft(target(), start(target()))[0].tokens.shape == (2, 0)
    with pytest.raises(ValueError, match="k=3 was given, but params have no drafter"):
        specjax.draft_step(target(), state, k=3)
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        specjax.draft_step(told(), state, k=0)
    with pytest.raises(ValueError, match="rule must be 'auto', 'match', 'reject' or 'block', got 'maybe'"):
        specjax.verify_step(told(), state, draft(told(), state)[0], rule="maybe")


def test_a_proposal_wider_than_the_state():
    """CTX.1: it would not fit behind the last token of the buffer, so it is refused, not cut or misplaced."""
    narrow, wide = start(told(), k=2), start(told(), k=6)
    with pytest.raises(ValueError, match=r"proposal is 4 wide, .*pass k=4 to start"):
        specjax.verify_step(told(), narrow, draft(told(), narrow)[0])
    two = functools.partial(draft, told(), k=2)
    run = jax.jit(specjax.verify_step)
    assert rows(run(told(), narrow, two(narrow)[0])[0]) == rows(run(told(), wide, two(wide)[0])[0])


def test_no_budget_no_token():
    """STP.3, CTX.4: a state with nothing to do is done from the start, its neighbour is not."""
    state = specjax.start(told(), PAIR, max_new_tokens=[0, NEW])
    assert rows(state) == [[], expected(1)[1]]
    assert state.done.tolist() == [True, False]
    state, verdict = step()(told(), state)
    assert rows(state)[0] == []
    assert verdict.emitted[0] == 0


def test_steps_refuse_what_they_cannot_do():
    """OPT.3: stop strings live on the host."""
    with pytest.raises(ValueError, match="stop ids only"):
        start(target(), stop="END")
    with pytest.raises(TypeError, match="unknown option 'foo'"):
        start(target(), foo=1)


def test_a_stop_inside_a_block():
    """STP.1, I7: one number cuts tokens, length and acceptance alike."""
    stop, params = expected()[0][3], told("ALWAYS_RIGHT")
    state = start(params, stop=[stop])
    while not state.done.all():
        state, verdict = step()(params, state)
        assert (verdict.accepted <= verdict.emitted).all()
    cut = lambda row: row[: row.index(stop) + 1] if stop in row else row  # noqa: E731
    assert rows(state) == [cut(row) for row in expected()]


def roundtrips(tree):
    leaves, structure = jax.tree.flatten(tree)
    yield jax.tree.unflatten(structure, leaves)
    yield jax.device_put(tree, jax.devices()[0])
    yield jax.tree.map(lambda x: x + 0 if x.dtype != bool else x, tree)
    yield jax.jit(lambda x: x)(tree)
    yield jax.tree.map(jnp.asarray, jax.device_get(tree))


def test_params_are_a_pytree():
    """PEER.11: flatten, unflatten, jit, transfer and map; what comes out still decodes, compiling nothing."""
    for params in (ngram_params(), told()):
        tokens = specjax.decode(params, PROMPTS[0], **OPTIONS).tokens
        before = programs.compile_count()
        for again in roundtrips(params):
            assert isinstance(again, specjax.Params)
            assert again.meta == params.meta
            assert specjax.decode(again, PROMPTS[0], **OPTIONS).tokens == tokens
        assert programs.compile_count() == before
        assert hash(params.meta) == hash(again.meta)


@pytest.mark.parametrize("options", [{}, {"seed": 3, "temperature": 1.0, "repetition_penalty": 1.1}])
def test_states_are_pytrees(options):
    """PEER.11: before and after a round; axis 0 of every leaf is the row."""
    state = start(told(), **options)
    for x in jax.tree.leaves(state):
        assert x.shape[0] == 2
    after = step()(told(), state)[0]
    assert jax.tree.structure(after) == jax.tree.structure(state)
    for again in roundtrips(state):
        assert isinstance(again, specjax.State)
        assert rows(step()(told(), again)[0]) == rows(after)


def test_params_are_frozen():
    with pytest.raises(AttributeError, match="cannot assign"):
        target().drafter = 3


def test_cast_leaves_integers_alone():
    """NUM.2: floating leaves change, tables of ids do not; and the result decodes."""
    params = specjax.cast(told(), "bfloat16")
    kinds = {x.dtype for x in jax.tree.leaves(params.target)}
    assert kinds == {jnp.dtype("bfloat16")}
    assert {x.dtype for x in jax.tree.leaves(params.drafter)} == {jnp.dtype("int32")}
    assert params.meta == told().meta
    assert tree_bytes(params.target) * 2 == tree_bytes(told().target)
    out = specjax.decode(params, PROMPTS[0], max_new_tokens=3)
    assert len(out.tokens) == 3
    for bad in ("int8", "float64", "fast"):
        with pytest.raises(ValueError, match=bad):
            specjax.cast(told(), bad)


# --- explain


@pytest.mark.parametrize("params", [target, told, ngram_params], ids=["plain", "told", "ngram"])
def test_explain_tells_the_bytes_there_will_be(params):
    """PRF.5: within nothing of the real arrays, before any exists; nothing compiles."""
    params, before = params(), programs.compile_count()
    told_before = specjax.explain(params, PAIR, max_new_tokens=NEW)
    assert programs.compile_count() == before
    state = start(params)
    assert told_before.target_bytes == tree_bytes(params.target)
    assert told_before.drafter_bytes == tree_bytes(params.drafter)
    assert told_before.cache_bytes == tree_bytes(state.target)
    assert told_before.drafter_state_bytes == tree_bytes(state.drafter)
    assert told_before.total_bytes >= tree_bytes(params) + tree_bytes((state.target, state.drafter))
    assert told_before.prompt_tokens == [len(p) for p in PAIR]
    assert told_before.program.rows == len(PAIR)


def test_explain_names_what_selects_a_program():
    options = {"temperature": 0.5, "top_k": 3, "logit_bias": {1: 1.0}}
    text = str(specjax.explain(told(), PROMPTS[2], max_new_tokens=40, k=2, **options))
    for part in ("llama", "TOLD", "float32", "rows 1", "buffer 64", "k 2", "prefill width 16", "MiB"):
        assert part in text
    for option in options:
        assert option in text
    assert "none (plain decoding)" in str(specjax.explain(target(), PROMPTS[0]))
    assert "none (greedy)" in str(specjax.explain(target(), PROMPTS[0]))
    with pytest.raises(TypeError, match="unknown option 'foo'"):
        specjax.explain(target(), PROMPTS[0], foo=1)
