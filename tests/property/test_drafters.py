"""What every registered drafter must hold, whatever it is: one suite over the registry.

Each runs with its own ``tiny`` config and random weights. Such a drafter is hardly ever right, so most tests
script it (``testing.corrupted``): it runs and its state evolves, but the tokens that reach the target are
right or wrong as told, and every pattern of acceptance occurs.
"""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pairwise import name as case_name, pairwise
from told import NEW, PROMPTS, ROTATING, VOCAB, expect_counts, model, plain

import specjax
from specjax import calls, registry, testing
from specjax.config import Meta
from specjax.core import programs, round as rnd
from specjax.core.loop import host_state, prefill_rows
from specjax.drafters import draft_model
from specjax.testing.corrupted import OWN
from specjax.types import AbsorbIn, ArraySpec, Ctx

NAMES = tuple(registry.DRAFTERS)
EVERY = pytest.mark.parametrize("name", NAMES)


@functools.cache
def tiny(name: str):
    """The small Llama with a tiny drafter of random weights."""
    return testing.tiny_drafter(model(), name)


def scripted(name: str, modes, prompts=PROMPTS, tokens=None):
    known = list(zip(prompts, plain() if tokens is None else tokens, strict=True))
    return testing.corrupted(tiny(name), known, modes)


# ---------------------------------------------------------------- contract, by shapes only


LENGTH = 6  # of the rows below: positions 0 to 4 are absorbed, the anchor is at 5


def fake_ctx(rows: int, params, temperature=None) -> Ctx:
    """What a drafter may read: a row that repeats itself (n-grams have a match) and the target's empty cache."""
    tokens = jnp.tile(jnp.arange(64, dtype=jnp.int32), (rows, 1)) % 3
    length = jnp.full((rows,), LENGTH, jnp.int32)
    target, cfg = registry.target("llama"), params.meta.target_cfg
    cache = target.init_cache(cfg, rows, 64, 1, params.target.embed.dtype)
    view = functools.partial(target.kv_view, params.target, cfg, cache)
    return Ctx(tokens, length, tokens[:, LENGTH - 1], length > 0, temperature, view)


def shapes(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


def block_of(
    rows: int, q: int, needs, target_cfg, dtype, keep, mode="verify", start=LENGTH - 1, seed=0
) -> AbsorbIn:
    """Random features of positions ``start`` onwards."""
    rng = np.random.default_rng(seed)
    draw = lambda: jnp.asarray(rng.standard_normal((rows, q, target_cfg.hidden_size)), dtype)  # noqa: E731
    ids = lambda: jnp.asarray(rng.integers(0, target_cfg.vocab_size, (rows, q)), jnp.int32)  # noqa: E731
    pos = jnp.broadcast_to(start + jnp.arange(q, dtype=jnp.int32), (rows, q))
    hidden = draw() if needs.hidden else None
    return AbsorbIn(
        ids(), ids(), pos, jnp.asarray(keep, jnp.int32), hidden, {j: draw() for j in needs.taps}, mode
    )


@EVERY
@pytest.mark.parametrize(("dtype", "rows"), [(jnp.float32, 3), (jnp.bfloat16, 1)])
def test_shapes_and_types(name, dtype, rows):
    """NUM.2, PEER.11, PEER.7: proposals have the stated shapes, the state keeps its own through draft and absorb,
    and axis 0 of every array is the row; without keys there is no q."""
    module, params = registry.drafter(name), specjax.cast(tiny(name), dtype)
    cfg, target_cfg = params.meta.drafter_cfg, params.meta.target_cfg
    lent = registry.target("llama").shared(params.target, target_cfg)
    needs = module.NEEDS(cfg)
    keys = jax.random.split(jax.random.key(0), rows)
    heat = jnp.ones((rows,), jnp.float32)
    for k in {1, cfg.k}:
        state = module.init_state(cfg, rows, 64 + cfg.k + 1, cfg.k + 1, dtype)
        assert all(x.shape[0] == rows for x in jax.tree.leaves(state))
        for key, temperature in ((keys, heat), (None, None)):
            run = lambda p, s, n=rows, t=temperature, key=key, k=k: module.draft(  # noqa: E731
                p, lent, cfg, k, s, fake_ctx(n, params, t), key
            )
            proposal, after = jax.eval_shape(run, params.drafter, state)
            assert shapes(after) == shapes(state)
            assert (proposal.tokens.shape, proposal.tokens.dtype) == ((rows, k), jnp.int32)
            assert (proposal.count.shape, proposal.count.dtype) == ((rows,), jnp.int32)
            if proposal.q is not None:
                columns = VOCAB if proposal.q_ids is None else proposal.q_ids.shape[0]
                assert key is not None
                assert (proposal.q.shape, proposal.q.dtype) == ((rows, k, columns), jnp.float32)
        for mode, q in (("verify", k + 1), ("extend", 16)):
            block = block_of(rows, q, needs, target_cfg, dtype, [1] * rows, mode)
            after = jax.eval_shape(
                lambda p, s, b: module.absorb(p, lent, cfg, s, b), params.drafter, state, block
            )
            assert shapes(after) == shapes(state)


@EVERY
def test_config_and_weights(name):
    """CKP.4, PEER.20: a config survives JSON and is hashable; every weight says its shape and axes."""
    meta = tiny(name).meta
    assert Meta.from_json(json.loads(json.dumps(meta.to_json()))) == meta
    assert isinstance(hash(meta), int)
    module, cfg = registry.drafter(name), meta.drafter_cfg
    assert cfg.k >= 1
    assert cfg.k <= getattr(module, "max_k", lambda cfg: cfg.k)(cfg)
    specs = jax.tree.leaves(module.abstract(cfg), is_leaf=lambda x: isinstance(x, ArraySpec))
    assert all(isinstance(spec, ArraySpec) for spec in specs)
    assert [x.shape for x in jax.tree.leaves(tiny(name).drafter)] == [spec.shape for spec in specs]
    assert 1 <= module.min_resume(cfg, 40) <= 40


def limited(cfg, most: int):
    """A config with every limit of positions in it lowered."""
    if isinstance(cfg, tuple):
        return tuple(limited(part, most) for part in cfg)
    if not dataclasses.is_dataclass(cfg):
        return cfg
    every = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg)}
    lower = {n: most if n == "max_positions" else limited(x, most) for n, x in every.items()}
    return dataclasses.replace(cfg, **lower)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("draft_model", "chain")])
def test_a_limit_of_positions_bounds_nothing(name):
    """CTX.2: drafts beyond a drafter's own limit are made like others: the limit leaves no trace in the program. (A
    draft model falls silent there, see its own tests.)"""
    module, params = registry.drafter(name), tiny(name)
    lent = registry.target("llama").shared(params.target, params.meta.target_cfg)
    seen = set()
    for cfg in (params.meta.drafter_cfg, limited(params.meta.drafter_cfg, LENGTH - 2)):
        state = module.init_state(cfg, 1, 64, cfg.k + 1, jnp.float32)
        run = lambda p, s, cfg=cfg: module.draft(p, lent, cfg, cfg.k, s, fake_ctx(1, params), None)  # noqa: E731
        seen.add(re.sub("0x[0-9a-f]+", "", str(jax.make_jaxpr(run)(params.drafter, state))))
    assert len(seen) == 1


@EVERY
def test_nothing_kept_changes_nothing(name):
    """I4, I7: a block of which a row keeps nothing has no effect on what that row is proposed, beside a row that
    keeps something; nor has a prefill chunk in which it takes no part."""
    module, params = registry.drafter(name), tiny(name)
    cfg, target_cfg = params.meta.drafter_cfg, params.meta.target_cfg
    lent, needs = registry.target("llama").shared(params.target, target_cfg), module.NEEDS(cfg)
    block = functools.partial(block_of, 3, needs=needs, target_cfg=target_cfg, dtype=jnp.float32)

    @jax.jit
    def run(p):
        absorb = lambda state, block: module.absorb(p, lent, cfg, state, block)  # noqa: E731
        draft = lambda state: module.draft(p, lent, cfg, cfg.k, state, fake_ctx(3, params), None)  # noqa: E731
        state = module.init_state(cfg, 3, 64 + cfg.k + 1, cfg.k + 1, jnp.float32)
        state = absorb(state, block(LENGTH - 1, keep=[LENGTH - 1] * 3, mode="extend", start=0))
        first, state = draft(state)
        second, state = draft(absorb(state, block(cfg.k + 1, keep=[0, 2, 0], seed=1)))
        return first, second, draft(absorb(state, block(cfg.k + 1, keep=[0, 2, 0], mode="extend", seed=2)))[0]

    first, *later = run(params.drafter)
    for proposal in later:
        assert proposal.count[::2].tolist() == first.count[::2].tolist()
        assert proposal.tokens[::2].tolist() == first.tokens[::2].tolist()
    assert first.count.min() > 0


# ---------------------------------------------------------------- exact ids, exact counts


def decoded(params, modes, count, **options):
    """Decode the first ``count`` prompts; ids equal plain ones, counts what the script gives."""
    out = specjax.decode(params, PROMPTS[:count], max_new_tokens=NEW, **options)
    assert out.tokens == plain()[:count]
    expect_counts(modes, options.get("k", params.meta.drafter_cfg.k), NEW, out.stats)
    return out


def call_of(params, count=3, **options):
    """Engine and jobs of a call, to run round by round."""
    call = calls.plan(params, PROMPTS[:count], max_new_tokens=NEW, prefill_chunk=4, **options)
    return call, call.engines()[0]


def begun(call, engine, prompts=None):
    """Prefilled state; ``prompts`` take the place of the call's."""
    jobs = call.jobs
    if prompts is not None:
        jobs = [
            dataclasses.replace(job, prompt=np.asarray(p, np.int32))
            for job, p in zip(jobs, prompts, strict=True)
        ]
    return prefill_rows(engine, host_state(call.program, jobs), call.drive.prefill_chunk)[0]


def visible(state, row: int):
    """What anybody may look at of a row."""
    n = int(state.length[row])
    return n, state.tokens[row, :n].tolist(), bool(state.done[row]), int(state.reason[row])


@EVERY
def test_greedy_ids_and_counts(name):
    """GRD.1, GRD.3, PFX.1, BAT.4, MET.2, PEER.8: ragged rows in one batch, right, wrong, half right and the
    drafter's own words; prompts prefilled four tokens at a time."""
    for turn in range(2):
        modes = ROTATING[turn:] + ROTATING[:turn]
        decoded(scripted(name, modes), modes, 3, prefill_chunk=4, rows=3)


@EVERY
def test_the_next_proposal_equals_a_fresh_one(name):
    """KVR.4, KVR.3, PFX.2, I3, I4: whatever was accepted before, the drafter proposes what it proposes after a
    fresh prefill of the committed text; a finished row stays as it is while others go on."""
    modes = ["EVERY_THIRD_WRONG", "ALWAYS_RIGHT", "ALWAYS_WRONG"]
    params, inner = scripted(name, [*modes, OWN, OWN]), tiny(name)
    call, engine = call_of(params, rows=3, verbose=False)
    propose = jax.jit(lambda p, s: rnd.draft(inner.meta.pair, p, s, inner.meta.drafter_cfg.k)[0])
    weights, state, finished, compared = (inner.target, inner.drafter), begun(call, engine), {}, 0
    for _ in range(4):
        state, _ = engine.chunk(state, 2)
        for row, seen in finished.items():
            assert visible(state, row) == seen
        finished |= {b: visible(state, b) for b in range(3) if state.done[b]}
        texts = [visible(state, b)[1] for b in range(3)]
        fresh = begun(call, engine, [text[:-1] for text in texts])
        live = [b for b in range(3) if b not in finished]
        assert [visible(fresh, b)[1] for b in live] == [texts[b] for b in live]
        cached, anew = propose(weights, state), propose(weights, fresh)
        for b in live:
            n = int(cached.count[b])
            assert n == int(anew.count[b])
            assert cached.tokens[b, :n].tolist() == anew.tokens[b, :n].tolist()
            compared += n
    assert 0 < len(finished) < 3
    assert compared > 0


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    pairwise({"name": NAMES, "k": (1, 2, 4), "loop": ("device", "host"), "batch": ((2, 1), (5, 3))}),
    ids=case_name,
)
def test_greedy_ids_and_counts_all(case):
    """GRD.1, GRD.3, BAT.3: every drafter at every width, with both loops and batches, chunks of rounds and of prompts
    (two sizes a case: each is a program of its own), finished rows refilled."""
    name, (count, rows) = case["name"], case["batch"]
    chunks = [(1, 512), (3, 2), (16, 8)]
    del chunks[(case["k"] + rows + (case["loop"] == "host")) % 3]
    for turn in range(len(ROTATING)):
        modes = ROTATING[turn:] + ROTATING[:turn]
        options = {"k": case["k"], "loop": case["loop"], "rows": rows}
        rounds, chunk = chunks[turn % 2]
        decoded(scripted(name, modes), modes, count, rounds=rounds, prefill_chunk=chunk, **options)


@pytest.mark.long
@EVERY
def test_the_drafter_itself(name):
    """GRD.1, RNG.1: its own proposals, with narrower widths where its number of drafts varies; greedy, and drawn
    with the seeds of plain decoding under the rule "match"."""
    for options in ({}, {"temperature": 1.0, "seed": [1, 2, 3, 4, 5], "rule": "match"}):
        alone = {key: value for key, value in options.items() if key != "rule"}
        call = {"max_new_tokens": NEW, "rows": 3}
        expected = specjax.decode(model(), PROMPTS, **call, **alone).tokens
        out = specjax.decode(tiny(name), PROMPTS, **call, **options)
        assert out.tokens == expected
        assert out.total.proposed > 0


# ---------------------------------------------------------------- the suite notices


def test_a_state_that_falls_behind_is_noticed(monkeypatch):
    """PEER.1: a draft model that never takes in what others drafted proposes something else than a fresh one."""
    monkeypatch.setattr(draft_model, "_strange", lambda dstate, block: block.keep < 0)
    monkeypatch.setattr(programs, "_store", functools.lru_cache(lambda program, signature: {}))
    with pytest.raises(AssertionError):
        test_the_next_proposal_equals_a_fresh_one("draft_model")
