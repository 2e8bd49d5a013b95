"""Speculative ids equal plain ids, whatever the drafter does (float32, clear logit gaps).

Drafters that misbehave on purpose run over every draft width, both loops, several chunk sizes and ragged
batches with refill. A selection in which every pair of these options occurs runs by default.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pairwise import name, pairwise
from told import (
    MODES,
    NEW,
    PROMPTS,
    TEXTS,
    VOCAB,
    expect_acceptance,
    model,
    plain,
    told,
    unused,
    with_drafter,
)

import specjax
from specjax import registry, testing
from specjax.core import programs
from specjax.drafters import ngram
from specjax.types import TapSpec

LONG = pytest.mark.long
#: prompts taken, rows decoded at once: rows=3 with 5 prompts and rows=1 with 2 refill finished rows
BATCHES = {"one": (1, 1), "queue": (2, 1), "ragged": (3, 3), "refill": (5, 3)}
DRIVING = {"loop": ("device", "host"), "rounds": (1, 3, 16), "batch": tuple(BATCHES)}
SCRIPTED = {"mode": (*MODES, "MIXED"), "k": range(1, 9), **DRIVING, "at": (0, 1, 3, 7)}


def one_place_unless_stop_inside(case):
    return case["mode"] == "STOP_INSIDE" or case["at"] == 0


def run(params, case, expected=None, **options):
    """Decode a case and compare ids; returns the stats of each prompt."""
    count, rows = BATCHES[case["batch"]]
    driving = {"loop": case["loop"], "rounds": case["rounds"], "rows": rows, "k": case["k"]}
    out = specjax.decode(params, PROMPTS[:count], max_new_tokens=NEW, **driving, **options)
    assert out.tokens == (plain() if expected is None else expected)[:count]
    assert all(s.new_tokens == NEW for s in out.stats)
    assert all(s.emitted == NEW - 1 == s.accepted + s.rounds for s in out.stats)
    return out.stats


def scripted(case, drafter="TOLD"):
    """One case of a scripted drafter, with the acceptance that belongs to it."""
    rotating = [MODES[i % 4] for i in range(len(PROMPTS))]
    at = case["at"] % case["k"]
    modes = rotating if case["mode"] == "MIXED" else [case["mode"]] * len(PROMPTS)
    params = told(modes, stop=unused(), at=at, name=drafter)
    for mode, stats in zip(modes, run(params, case, stop=[unused()]), strict=False):
        expect_acceptance(mode, case["k"], at, stats)


@pytest.mark.parametrize(
    "case", pairwise(SCRIPTED | {"k": (1, 3, 5, 8)}, one_place_unless_stop_inside), ids=name
)
def test_scripted_drafters(case):
    """GRD.1, GRD.3, BAT.4, PEER.8."""
    scripted(case)


@pytest.mark.long
@pytest.mark.parametrize("k", SCRIPTED["k"])
def test_scripted_drafters_all(k):
    """GRD.1: at every width every mode and every place, with each loop, chunk and batch."""
    for case in pairwise(SCRIPTED | {"k": (k,), "at": range(k)}, one_place_unless_stop_inside):
        scripted(case)


VARIABLE = {"mode": MODES, "k": (1, 4, 8), **DRIVING, "at": (0,)}


@pytest.mark.parametrize("case", pairwise(VARIABLE | {"k": (4,)}), ids=name)
def test_narrow_widths(case):
    """GRD.1: rounds that verify fewer positions than k + 1, because no row proposes more."""
    scripted(case, "TOLD_VARIABLE")


@pytest.mark.long
@pytest.mark.parametrize("k", VARIABLE["k"])
def test_narrow_widths_all(k):
    """GRD.1."""
    for case in pairwise(VARIABLE | {"k": (k,)}):
        scripted(case, "TOLD_VARIABLE")


@functools.cache
def self_drafter():
    cfg = testing.SelfConfig(8, "llama", model().meta.target_cfg)
    return with_drafter(model(), "specjax.testing:SELF", cfg, model().target)


def accepts_everything(case):
    for s in run(self_drafter(), case):
        assert s.accepted == s.proposed > 0
        assert s.rounds == -(-(NEW - 1) // (case["k"] + 1))
        assert set(s.accepted_per_position) == {1.0}


SELF = {"k": range(1, 9), **DRIVING}


@pytest.mark.parametrize("case", pairwise(SELF | {"k": (1, 4)}), ids=name)
def test_the_target_as_its_own_drafter(case):
    """GRD.5: every draft is accepted, k + 1 tokens per round but for the last."""
    accepts_everything(case)


@pytest.mark.long
@pytest.mark.parametrize("case", pairwise(SELF | {"rounds": (1, 16), "batch": ("queue", "refill")}), ids=name)
def test_the_target_as_its_own_drafter_all(case):
    """GRD.5: every width with each loop and with one row and several."""
    accepts_everything(case)


NGRAM = {"k": (1, 2, 4, 7), "lengths": ((1, 1), (3, 1), (4, 2)), "match": ("recent", "earliest"), **DRIVING}


def looks_up(case, costs=None):
    high, low = case["lengths"]
    cfg = ngram.Config(8, high, low, case["match"], costs)
    stats = run(with_drafter(model(), "ngram", cfg), case)
    assert sum(s.accepted for s in stats) > 0


@pytest.mark.parametrize("k", [1, 5])
def test_ngram(k):
    """GRD.1, GRD.3, NGR.1, NGR.3: lengths 3 to 1, most recent match, every pair of ways of driving."""
    for case in pairwise(DRIVING | {"k": (k,), "lengths": ((3, 1),), "match": ("recent",)}):
        looks_up(case)


def test_ngram_settings():
    """NGR.3: settings change speed, never ids. Also with drafts cut to what they are worth."""
    case = {"k": 4, "batch": "refill", "loop": "device", "rounds": 3}
    looks_up(case | {"match": "earliest", "lengths": (4, 2)})
    looks_up(case | {"match": "recent", "lengths": (2, 1)}, costs=((2, 1.1), (4, 1.3)))


@pytest.mark.long
@pytest.mark.parametrize("case", pairwise(NGRAM), ids=name)
def test_ngram_all(case):
    """NGR.3: every pair of widths and of the other options."""
    looks_up(case)


CROWD = [*PROMPTS[:4], [*range(40)], PROMPTS[1], [61, 60, 61], [3, 3], PROMPTS[0]]


@functools.cache
def alone() -> list[list[int]]:
    """Greedy continuations of ``CROWD``, each decoded by itself."""
    return [specjax.decode(model(), [p], max_new_tokens=12, max_len=64).tokens[0] for p in CROWD]


@pytest.mark.parametrize(
    "rows", [pytest.param(n, marks=LONG if n in (2, 5, 6, 7) else ()) for n in range(1, 10)]
)
def test_any_number_of_rows(rows):
    """BAT.1, BAT.4, BAT.6: 1 to 9 rows, with duplicates and prompts of 1 to 40 tokens that accept different
    counts: each row equals its solo run, its drafter's state included."""
    assert len({tuple(p) for p in CROWD}) == 7 <= TEXTS
    known = dict(zip(map(tuple, CROWD), alone(), strict=True))
    prompts, tokens = [list(p) for p in known], list(known.values())
    modes = [MODES[i % 4] for i in range(len(prompts))]
    params = told(modes, tokens, prompts=prompts, name="WITNESS")
    out = specjax.decode(params, CROWD[-rows:], max_new_tokens=12, max_len=64, k=2, rows=rows)
    assert out.tokens == alone()[-rows:]
    assert out.total.accepted > 0


def test_logit_gaps_are_clear():
    """The suite compares ids exactly; that is fair only while the two best logits are far apart."""
    target, cfg = registry.target("llama"), model().meta.target_cfg
    rows = [p + t for p, t in zip(PROMPTS, plain(), strict=True)]
    size = max(map(len, rows))
    tokens = jnp.array([row + [0] * (size - len(row)) for row in rows])

    @jax.jit
    def logits(tokens):
        cache = target.init_cache(cfg, len(rows), size, size, jnp.float32)
        pos = jnp.broadcast_to(jnp.arange(size), tokens.shape)
        valid = jnp.full(len(rows), size)
        out = target.forward(model().target, cfg, tokens, pos, valid, cache, TapSpec(), "extend")
        return target.unembed(model().target, cfg, out.hidden)

    for row, values in zip(rows, np.asarray(logits(tokens)), strict=True):
        best = np.sort(values[len(row) - NEW - 1 : len(row) - 1])
        assert np.all(best[:, -1] - best[:, -2] > 1e-3)
        assert np.array_equal(values[len(row) - NEW - 1 : len(row) - 1].argmax(-1), row[-NEW:])
        assert len(set(row[-NEW:])) > 5


def test_programs_do_not_depend_on_acceptance():
    """KVR.6: one set of compiled programs and one set of shapes for every accepted count."""
    case = {"mode": "ALWAYS_RIGHT", "k": 5, "loop": "device", "rounds": 16, "batch": "refill", "at": 2}
    scripted(case)
    before = programs.compile_count()
    for mode in SCRIPTED["mode"]:
        scripted(case | {"mode": mode})
    assert programs.compile_count() == before
    state = specjax.start(told("ALWAYS_WRONG"), PROMPTS, max_new_tokens=NEW, k=5)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), state)
    step = jax.jit(lambda p, s: specjax.verify_step(p, *specjax.draft_step(p, s, k=5)[::-1]))
    for modes in ("ALWAYS_WRONG", "ALWAYS_RIGHT", [*MODES]):
        state, _ = step(told(modes, stop=unused(), at=1), state)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == shapes
    assert step._cache_size() == 1


@pytest.mark.parametrize("mode", ["EVERY_THIRD_WRONG", "ALWAYS_RIGHT"])
def test_a_drafter_with_state_stays_as_good_as_it_was(mode):
    """KVR.3: over 200 rounds of rejections the drafter absorbs exactly the committed tokens, so that it
    accepts in rounds 150-200 what it accepted in rounds 1-50."""
    size, new = 768, 700
    prompt = PROMPTS[1]
    tokens = specjax.decode(model(), [prompt], max_new_tokens=new).tokens
    params = told(mode, tokens, prompts=[prompt], name="WITNESS", size=size)
    seen = [p.stats for p in specjax.stream(params, prompt, max_new_tokens=new, k=3)]
    accepted = np.diff([s.accepted for s in seen])
    assert specjax.decode(params, [prompt], max_new_tokens=new, k=3).tokens == tokens
    assert sum(accepted) > 0
    if mode == "ALWAYS_RIGHT":
        assert set(accepted[:-1]) == {3}
    else:
        assert len(accepted) > 200
        assert np.array_equal(accepted[1:49], accepted[150:198])


@pytest.mark.parametrize("chunk", [1, 2, 4, 8])
def test_prefill_in_chunks(chunk):
    """PFX.1, GRD.4: the drafter absorbs the prompt in order whatever the chunks, and ids do not change."""
    case = {"k": 3, "loop": "device", "rounds": 16, "batch": "refill"}
    params = told("ALWAYS_RIGHT", name="WITNESS")
    for s in run(params, case, prefill_chunk=chunk):
        assert s.accepted == s.proposed > 0


SAMPLED = {
    "plain": {"temperature": 1.0},
    "filters": {"temperature": 0.7, "top_k": [0, 5, 1, 20, 3], "top_p": [0.9, 1.0, 0.5, 0.3, 0.999], "min_p": 0.02},
    "penalties": {
        "temperature": [0.7, 1.0, 0.0, 0.7, 1.0],
        "repetition_penalty": [1.3, 1.0, 1.7, 1.0, 0.9],
        "presence_penalty": [0.0, 1.5, 0.0, 0.5, -0.5],
        "frequency_penalty": [0.5, 0.0, -0.3, 1.0, 0.0],
        "logit_bias": {5: 2.0, 9: float("-inf")},
        "top_p": 0.95,
    },
}  # fmt: skip


@functools.cache
def flat_model():
    """A target whose draws at temperature 1 are spread out."""
    return testing.tiny_params(1, layers=1, vocab=VOCAB, max_positions=1024, sharpness=2.0)


@pytest.mark.parametrize(
    ("options", "loop"), [("plain", "device"), ("filters", "host"), ("penalties", "device")]
)
def test_sampled_ids_equal_plain(options, loop):
    """DST.1, OPT.1, OPT.2, OPT.4, RNG.1, PEER.8: with rule "match" and the same seeds, at temperatures 0.7
    and 1.0, with filters and penalties, one set of values per row."""
    call = SAMPLED[options] | {"seed": [11, 12, 13, 14, 15], "rows": 3, "max_new_tokens": NEW, "loop": loop}
    expected = specjax.decode(flat_model(), PROMPTS, **call).tokens
    assert expected == specjax.decode(flat_model(), PROMPTS, **call).tokens
    other = specjax.decode(flat_model(), PROMPTS, **call | {"seed": 99}).tokens
    assert sum(a != b for a, b in zip(expected, other, strict=True)) >= 3  # rows may be greedy or nearly
    for modes in (["ALWAYS_RIGHT"] * 5, ["ALWAYS_WRONG"] * 5, MODES):
        params = told(modes, expected, base=flat_model(), stop=unused(expected), at=1)
        out = specjax.decode(params, PROMPTS, rule="match", k=3, **call)
        assert out.tokens == expected
        assert all(s.accepted == 0 for s, m in zip(out.stats, modes, strict=True) if m == "ALWAYS_WRONG")
        assert all(
            s.accepted == s.proposed > 0 for s, m in zip(out.stats, modes, strict=True) if m == MODES[0]
        )


def test_sampled_ids_equal_plain_with_ngram_and_several_samples():
    """RNG.1, RNG.2: also several samples of a prompt, which differ from one another."""
    call = {"temperature": 1.0, "seed": 5, "n": 3, "rows": 3, "max_new_tokens": NEW}
    expected = specjax.decode(flat_model(), PROMPTS[:2], **call).tokens
    params = with_drafter(flat_model(), "ngram", ngram.Config(3, 2, 1))
    out = specjax.decode(params, PROMPTS[:2], rule="match", **call)
    assert out.tokens == expected
    assert out.total.accepted > 0
    assert specjax.decode(params, PROMPTS[:2], rule="match", **call).tokens == expected
    assert len({tuple(row) for samples in expected for row in samples}) == 6


@pytest.mark.parametrize("modes", [["ALWAYS_RIGHT"] * 5, MODES])
def test_penalised_greedy_ids_equal_plain(modes):
    """OPT.2, OPT.4: penalties see the prompt, what was emitted and the drafts before the position."""
    call = {
        "repetition_penalty": [1.0, 1.5, 2.0, 1.2, 1.0],
        "presence_penalty": [2.0, 0.0, 1.0, 0.0, 0.0],
        "frequency_penalty": [0.0, 1.0, 3.0, 0.0, 8.0],
        "rows": 3,
        "max_new_tokens": NEW,
    }
    expected = specjax.decode(model(), PROMPTS, **call).tokens
    assert sum(a != b for a, b in zip(expected, plain(), strict=True)) >= 4
    params = told(modes, expected, stop=unused(expected), at=1)
    out = specjax.decode(params, PROMPTS, k=3, **call)
    assert out.tokens == expected
    assert out.stats[0].accepted == out.stats[0].proposed > 0


def test_texts_fit_the_script():
    assert len(PROMPTS) <= TEXTS
    assert model().meta.target_cfg.vocab_size == VOCAB
