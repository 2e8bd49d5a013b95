"""Stop ids, token budgets and finish reasons: what is returned is the plain continuation, cut."""

import dataclasses

import numpy as np
import pytest
from told import MODES, NEW, PROMPTS, cut, model, plain, told, unused, with_drafter

import specjax
from specjax import testing
from specjax.core import programs
from specjax.drafters import ngram

WIDTHS = (1, 4, 7)


def check(params, stops, budget, *, prompts=PROMPTS, expected=None, given="stops", **options):
    """Every row ends where the plain continuation is cut, with the right reason; returns the result."""
    rows = plain() if expected is None else expected
    budgets = budget if isinstance(budget, list) else [budget] * len(rows)
    given = stops if isinstance(given, str) else given
    out = specjax.decode(params, prompts, max_new_tokens=budget, stop=given, rows=3, **options)
    wanted = [cut(row, n, stops) for row, n in zip(rows, budgets, strict=True)]
    assert out.tokens == [tokens for tokens, _ in wanted]
    assert out.finish_reason == [reason for _, reason in wanted]
    for s, (tokens, _), group in zip(out.stats, wanted, out.completions, strict=True):
        assert s.new_tokens == len(tokens) == len(group[0].drafted)
        assert s.emitted == max(len(tokens) - 1, 0)  # LGP.2, MET.1: counters end where the tokens end
        assert s.accepted == sum(group[0].drafted) <= s.proposed
        assert s.rounds >= -(-s.emitted // (options.get("k", 0) + 1))
    return out


@pytest.mark.parametrize("k", WIDTHS)
@pytest.mark.parametrize("mode", ["ALWAYS_RIGHT", "MIXED"])
def test_stop_at_every_index_of_a_block(mode, k):
    """STP.1, STP.5: each token of each row as the stop id, so that it falls on every index of a block and
    on drafts, corrections and the prefill's token alike."""
    params = told("ALWAYS_RIGHT" if mode == "ALWAYS_RIGHT" else MODES, stop=unused(), at=1)
    accepted = 0
    for token in sorted({t for row in plain() for t in row}):
        accepted += check(params, [token], NEW, k=k).total.accepted
    assert accepted > 0


@pytest.mark.parametrize("k", WIDTHS)
def test_stop_and_budget_in_one_block(k):
    """STP.2, STP.3, CTX.4: every budget from 0 with a stop inside it, at its edge and beyond it."""
    params = told("ALWAYS_RIGHT")
    for budget in range(10):
        for place in range(10):
            out = check(params, [plain()[1][place]], budget, k=k)
            stopped = place < budget and plain()[1][place] not in plain()[1][:place]
            assert out.finish_reason[1] == "stop" or not stopped
    check(params, [plain()[0][4], plain()[2][2], plain()[4][7]], [0, 1, 9, 3, 8], k=k)


def test_budgets_and_stops_do_not_recompile():
    """PRF.3: after the first call nothing is compiled, whatever the values."""
    params = told("ALWAYS_RIGHT")
    check(params, [5], NEW, k=4)
    before = programs.compile_count()
    for budget, stops in ((3, []), (NEW, [1, 2, 3]), (1, [0]), ([1, 2, 3, 4, 5], [7] * 8)):
        check(params, stops, budget, k=4)
    assert programs.compile_count() == before


@pytest.mark.parametrize("loop", ["device", "host"])
@pytest.mark.parametrize("rounds", [1, 2, 16])
def test_stop_late_in_a_chunk(loop, rounds):
    """STP.5: rounds that ran after a row's end leave no trace, and a refilled row starts afresh."""
    params = told(MODES, stop=unused(), at=0)
    for place in (0, 3, 9):
        check(params, [row[place] for row in plain()], NEW, k=4, loop=loop, rounds=rounds)


def test_kinds_of_stop_ids():
    """STP.6: one id, a list, a tuple, arrays; EOS of the model; ignore_eos runs to the budget."""
    params, stop = told("ALWAYS_RIGHT"), plain()[1][5]
    for given in (stop, np.int64(stop), [stop], (stop, unused()), np.array([stop]), np.array(stop)):
        check(params, [stop], NEW, given=given, k=4)
    eos = params.replace(meta=dataclasses.replace(params.meta, eos_ids=(stop, unused())))
    check(eos, [stop, 9], NEW, given=9, k=4)
    for none in ([], (), None, np.zeros(0, int)):
        check(eos, [stop], NEW, given=none, k=4)
        check(eos, [], NEW, given=none, ignore_eos=True, k=4)
    for bad in (-1, 64, [3, 64], np.array([-2]), 1.5, True, [None]):
        with pytest.raises(ValueError, match="stop"):
            specjax.decode(params, [1], stop=bad)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("token", [0, 63])
def test_placeholder_ids_stay_in_the_output(mode, token):
    """STP.4: a target that says nothing but 0 (what buffers and lookups are filled with) or the last id."""
    table = np.zeros((1, 64, 64), np.float32)
    table[..., token] = 9.0
    base = testing.micro_params(64, table=table)
    prompts, rows = [[token], [1, 2, token], [token] * 9], [[token] * NEW] * 3
    params = told(mode, rows, base=base, prompts=prompts, stop=5, at=2)
    out = check(params, [], NEW, prompts=prompts, expected=rows, k=4)
    assert (out.total.accepted > 0) == (mode != "ALWAYS_WRONG")
    assert check(params, [token], NEW, prompts=prompts, expected=rows, k=4).tokens == [[token]] * 3


def test_zero_budget_draws_nothing():
    """STP.3: no token, reason length, no rounds; also next to rows that have a budget."""
    out = check(told("ALWAYS_RIGHT"), [], [0, 2, 0, 0, 5], k=4)
    assert out.stats[0].rounds == 0
    assert specjax.decode(model(), [[1], [2]], max_new_tokens=0).tokens == [[], []]
    state = specjax.start(model(), [[1, 2], [3]], max_new_tokens=0)
    assert state.done.all()
    assert np.array_equal(state.length, [2, 1])


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 6, 7, 8])
def test_the_context_is_filled_exactly(k):
    """CTX.1: prompt + budget equal to the context limit, for every draft width; one more is refused."""
    rng = np.random.default_rng(0)
    base = testing.micro_params(64, table=rng.standard_normal((1, 64, 64)), max_positions=16)
    prompt = [1, 2, 3]
    tokens = specjax.decode(base, [prompt], max_new_tokens=13).tokens
    params = told("ALWAYS_RIGHT", tokens, base=base, prompts=[prompt])
    out = specjax.decode(params, [prompt], max_new_tokens=13, k=k)
    assert out.tokens == tokens
    assert out.finish_reason == ["length"]
    assert specjax.decode(params, [prompt], k=k).tokens == tokens
    with pytest.raises(ValueError, match="context"):
        specjax.decode(params, [prompt], max_new_tokens=14, k=k)


def counting(period: int, **config):
    """A target that says the next number, from 0 again after ``period``; it looks tokens up."""
    table = np.zeros((1, 64, 64), np.float32)
    table[0, np.arange(64), (np.arange(64) + 1) % period] = 9.0
    return with_drafter(testing.micro_params(64, table=table, **config), "ngram", ngram.Config(8, 3, 1))


@pytest.mark.parametrize("k", [1, 3, 8])
def test_copied_drafts_end_where_the_budget_does(k):
    """STP.1, STP.2, STP.3, STP.4, CTX.1, CTX.4, NGR.1: the n-gram drafter with budgets of 0 and more, prompts
    of one token, a full context and a stop in a copied block; the target says 0, with which proposals are
    padded, every third time."""
    base = counting(3, max_positions=16)
    for prompt in ([2], [0, 1, 2, 0]):
        endless = [(prompt[-1] + 1 + i) % 3 for i in range(16)]
        for budget in (0, 1, 2, 3, 4, 5, 6, 16 - len(prompt)):
            out = specjax.decode(base, prompt, max_new_tokens=budget, k=k)
            assert (out.tokens, out.finish_reason) == (endless[:budget], "length")
            for stop in range(3):
                ended = specjax.decode(base, prompt, max_new_tokens=budget, k=k, stop=stop)
                assert (ended.tokens, ended.finish_reason) == cut(endless, budget, [stop])
        assert out.stats.accepted == out.stats.proposed > 0
        with pytest.raises(ValueError, match="context"):
            specjax.decode(base, prompt, max_new_tokens=17 - len(prompt), k=k)
