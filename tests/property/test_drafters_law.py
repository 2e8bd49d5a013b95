"""The joint law of tokens that every drafter's drafts, drawn or not, leave as it is, on every kind of target."""

import dataclasses
import functools

import hosts
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import registry, testing
from specjax.core import accept as accept_module, round as rnd
from specjax.types import TapSpec

V, WIDTH, TOKENS = 5, 2, 3
PROMPT = [0, 1, 2, 0, 1, 2, 0]
ENOUGH, NEVER = 1e-4, 1e-7
#: Under the other rule, "match", ids are compared instead (``test_hosts.py``, ``test_drafters.py``).
RULES = ("reject", "block")


@functools.cache
def small(host: str):
    """A target of five tokens whose draws are spread out."""
    return hosts.target(host, V, 1.5)


@functools.cache
def start_of(kind: str, host: str):
    """(params, one prefilled row)."""
    params = hosts.drafted(small(host), kind)
    options = {"max_new_tokens": 16, "max_len": 64, "k": WIDTH, "temperature": 1.0}
    return params, specjax.start(params, [PROMPT], seed=0, **options)


@functools.cache
def exact(host: str, first: int) -> np.ndarray:
    """Law of the three tokens behind the prompt and the token that the prefill drew."""
    seqs = [[*PROMPT, first, *past] for n in range(TOKENS) for past in np.ndindex(*[V] * n)]
    size, params = max(map(len, seqs)), small(host)
    tokens = jnp.array([seq + [0] * (size - len(seq)) for seq in seqs])
    family, cfg = registry.target(params.meta.family), params.meta.target_cfg

    @jax.jit
    def every(weights, tokens):
        cache = family.init_cache(cfg, len(seqs), size, size, jnp.float32)
        pos, full = jnp.broadcast_to(jnp.arange(size), tokens.shape), jnp.full(len(seqs), size)
        out = family.forward(weights, cfg, tokens, pos, full, cache, TapSpec(), "extend")
        return family.unembed(weights, cfg, out.hidden)

    logits = np.asarray(every(params.target, tokens), np.float64)
    laws = {tuple(s[len(PROMPT) + 1 :]): np.exp(logits[i, len(s) - 1]) for i, s in enumerate(seqs)}
    return testing.joint_law(lambda past: laws[past] / laws[past].sum(), V, TOKENS)


@functools.cache
def three_rounds(kind: str, host: str, rule):
    """Jitted: ``TOKENS`` rounds, every one of which emits at least a token."""
    params = start_of(kind, host)[0]
    pair = params.meta.pair

    def step(weights, state):
        proposal, state = rnd.draft(pair, weights, state, WIDTH)
        state, verdict, _ = rnd.verify(pair, weights, state, proposal, rule)
        return state, verdict.accepted

    run = lambda p, s: jax.lax.scan(lambda s, _: step(p, s), s, length=TOKENS)  # noqa: E731
    return functools.partial(jax.jit(run), (params.target, params.drafter))


def sampled(kind: str, host: str = "dense", rule=None, rows: int = 4000, seed: int = 0):
    """p-value of three tokens of many rows that go on from one state, and the drafts accepted."""
    _, one = start_of(kind, host)
    state = jax.tree.unflatten(jax.tree.structure(one), jax.tree.leaves(one))  # PEER.11
    state = jax.tree.map(lambda x: jnp.repeat(x, rows, 0), state)
    keys = jax.random.key_data(jax.random.split(jax.random.key(seed), rows))
    state, accepted = three_rounds(kind, host, rule)(dataclasses.replace(state, key_data=keys))
    begin = int(one.length[0])
    tokens = np.asarray(state.tokens[:, begin : begin + TOKENS])
    law = exact(host, int(one.tokens[0, begin - 1]))
    return testing.chisquare(testing.histogram(tokens, V), law), int(accepted.sum())


def kinds(*without: str):
    return pytest.mark.parametrize("kind", [kind for kind in hosts.KINDS if kind not in without])


@kinds("ngram", "eagle3, latent")  # the first has a test of its own, the other differs in its network alone
def test_joint_law(kind):
    """DST.1, DST.2, PEER.1, PEER.11: three consecutive tokens under the drafter's natural rule, in a scan."""
    p_value, accepted = sampled(kind)
    assert p_value > ENOUGH
    assert accepted > 0


@pytest.mark.long
@kinds("eagle3, latent")
@pytest.mark.parametrize("rule", RULES)
def test_joint_law_all(kind, rule):
    """DST.1: every rule of laws, with many more samples."""
    assert sampled(kind, rule=rule, rows=10_000, seed=1)[0] > ENOUGH


@pytest.mark.long
@pytest.mark.parametrize(("kind", "host"), [pair for pair in hosts.OTHERS if not hosts.every_other(*pair)])
def test_joint_law_on_every_host(kind, host):
    """DST.1, KVR.2, KVR.5: rules take turns, so that each meets each host."""
    turn = hosts.KINDS.index(kind) + list(hosts.HOSTS).index(host)
    p_value, accepted = sampled(kind, host, RULES[turn // 2 % 2])
    assert p_value > ENOUGH
    assert accepted > 0


def test_joint_law_notices(monkeypatch):
    """PEER.1: a wrong residual fails by far."""
    monkeypatch.setattr(accept_module, "_draft_row", lambda p, i, v: jnp.zeros((len(i), v)))
    three_rounds.cache_clear()
    try:
        assert sampled("draft_model")[0] < NEVER
    finally:
        three_rounds.cache_clear()
