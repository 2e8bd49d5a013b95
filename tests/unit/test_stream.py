"""``specjax.stream``: the pieces of each prompt joined are what ``decode`` returns."""

import dataclasses
import gc
import itertools

import clock
import numpy as np
import pytest
import tiny_files
from tiny_models import EOS, OPTIONS, PROMPTS, greedy, ngram_params, target, told, uncompiled, with_meta

import specjax
from specjax.core import programs

BOTH = pytest.mark.parametrize("params", [target, told, ngram_params], ids=["plain", "told", "ngram"])


def stream(params, prompt, **options):
    return specjax.stream(params, prompt, **OPTIONS | options)


def decode(params, prompt, **options):
    return specjax.decode(params, prompt, **OPTIONS | options)


def ids(pieces):
    return [token for piece in pieces for token in piece.tokens]


def joined(pieces):
    """Fields of the pieces of one prompt put together, and the last finish reason."""
    pieces = list(pieces)
    assert [p.finish_reason for p in pieces[:-1]] == [None] * (len(pieces) - 1)
    lists = [[x for p in pieces for x in getattr(p, name)] for name in ("tokens", "drafted", "logprobs")]
    return ("".join(p.text for p in pieces), *lists, pieces[-1].finish_reason)


def whole(completion):
    """The same fields of a completion."""
    names = ("text", "tokens", "drafted", "logprobs", "finish_reason")
    return tuple(getattr(completion, name) for name in names)


def timeless(stats):
    return dataclasses.replace(stats, prefill_seconds=0.0, decode_seconds=0.0, compile_seconds=0.0)


@BOTH
@pytest.mark.parametrize("rounds", [1, 3, 16])
def test_pieces_join_to_what_decode_returns(params, rounds):
    """I7, LGP.2, MET.2: text, ids, drafted flags, log-probabilities, reason and counters."""
    for prompt in PROMPTS[:4]:
        ((completion,),) = decode(params(), prompt).completions
        pieces = list(stream(params(), prompt, rounds=rounds))
        assert joined(pieces) == whole(completion)
        assert timeless(pieces[-1].stats) == timeless(completion.stats)
        assert completion.tokens == greedy(prompt, 40)[0]


def test_one_piece_per_round():
    """The first piece is the prefill's token; counters grow with every piece."""
    pieces = list(stream(told("ALWAYS_RIGHT"), PROMPTS[0], k=4))
    assert [len(p.tokens) for p in pieces] == [1, 5, 5, 5, 5, 5, 5, 5, 4]
    assert [p.stats.rounds for p in pieces] == list(range(9))
    assert [p.stats.new_tokens for p in pieces] == np.cumsum([len(p.tokens) for p in pieces]).tolist()
    assert pieces[1].drafted == [True] * 4 + [False]
    assert len(list(stream(target(), PROMPTS[0], max_new_tokens=1))) == 1


def test_characters_come_whole():
    """A character of two bytes is held back until both are there; broken ones are shown at the end."""
    for prompt in PROMPTS:
        pieces = [p.text for p in stream(target(), prompt)]
        text = decode(target(), prompt).text
        assert "".join(pieces) == text == tiny_files.small_tokenizer().decode(greedy(prompt, 40)[0])
    assert "è" in text
    assert any("è" in piece for piece in pieces)


@pytest.mark.parametrize("params", [target, told], ids=["plain", "drafted"])
def test_stop_strings_are_held_back(params):
    """STP.1, LGP.2: no piece ever shows a part of what is cut off later."""
    prompt = PROMPTS[3]
    text = decode(target(), prompt).text
    strings = [text[at : at + 6] for at in range(0, 40, 3)]
    for string in (s for s in strings if "\ufffd" not in s):
        ((completion,),) = decode(params(), prompt, stop=string).completions
        pieces = list(stream(params(), prompt, stop=[string, "never said"]))
        assert joined(pieces) == whole(completion)
        assert completion.finish_reason == "stop"
        assert text.startswith("".join(p.text for p in pieces) + string)


def test_a_stop_id_shows_no_text():
    """STP.1: it is among the ids, the last of them."""
    tokens = greedy(PROMPTS[2], 40)[0]
    pieces = list(stream(with_meta(told("ALWAYS_RIGHT"), eos_ids=(EOS, tokens[8])), PROMPTS[2]))
    assert ids(pieces) == tokens[: tokens.index(tokens[8]) + 1]
    assert pieces[-1].finish_reason == "stop"
    assert "".join(p.text for p in pieces) == tiny_files.small_tokenizer().decode(
        tokens[: tokens.index(tokens[8])]
    )


@pytest.mark.parametrize("rounds", [1, 16])
def test_a_batch_streams_each_row_in_order(rounds):
    """BAT.1, BAT.4: pieces of the rows alternate, also while rows are refilled; each says whose it is."""
    budgets = [30, 5, 40, 0, 17]
    pieces = list(stream(told(), PROMPTS, rows=3, max_new_tokens=budgets, rounds=rounds))
    completions = decode(told(), PROMPTS, rows=3, max_new_tokens=budgets).completions
    for index, (completion,) in enumerate(completions):
        assert joined(p for p in pieces if p.index == index) == whole(completion)
    if rounds == 1:
        order = [p.index for p in pieces if p.index in (0, 2)]
        assert order != sorted(order)


def test_samples_of_a_prompt_have_their_own_index():
    """DST.7: temperature and seed reach a stream as they reach ``decode``."""
    pieces = list(stream(target(), PROMPTS[:2], n=2, rows=3, temperature=2.5, seed=4))
    out = decode(target(), PROMPTS[:2], n=2, rows=3, temperature=2.5, seed=4)
    by_index = [ids(p for p in pieces if p.index == i) for i in range(4)]
    assert by_index == [tokens for group in out.tokens for tokens in group]


def test_nothing_to_say():
    """STP.3: a budget of 0 still ends the stream with a reason."""
    (piece,) = stream(target(), PROMPTS[0], max_new_tokens=0)
    assert (piece.text, piece.tokens, piece.finish_reason) == ("", [], "length")


def test_bad_input_is_refused_at_once():
    """Not only when the first piece is asked for."""
    before = programs.compile_count()
    with pytest.raises(ValueError, match="top_p"):
        specjax.stream(target(), PROMPTS[0], top_p=2.0)
    with pytest.raises(TypeError, match="unknown option 'tempreature'; did you mean 'temperature'"):
        specjax.stream(target(), PROMPTS[0], tempreature=2.0)
    assert programs.compile_count() == before


def test_a_dropped_stream_harms_nothing():
    """BAT.3: whether closed, forgotten or left open while others run."""
    expected = greedy(PROMPTS[0], 40)[0]
    closed = stream(told(), PROMPTS[0])
    next(closed)
    next(closed)
    closed.close()
    forgotten = stream(told(), PROMPTS[1])
    next(forgotten)
    del forgotten
    gc.collect()
    never_started = stream(told(), PROMPTS[0])
    still_open = stream(told(), PROMPTS[0])
    first = next(still_open)
    assert decode(told(), PROMPTS[0]).tokens == expected
    assert ids(stream(told(), PROMPTS[0])) == expected
    assert [*first.tokens, *ids(still_open)] == expected
    assert ids(never_started) == expected


def test_two_streams_side_by_side():
    """BAT.3: each has its own state, though they share compiled programs."""
    both = [stream(told(), PROMPTS[0]), stream(told(), PROMPTS[3], seed=3)]
    tokens = [[], []]
    for pair in itertools.zip_longest(*both):
        for row, piece in zip(tokens, pair, strict=True):
            row += piece.tokens if piece else []
    assert tokens == [greedy(PROMPTS[0], 40)[0], greedy(PROMPTS[3], 40)[0]]


def test_stats_of_a_stream_tell_compilation_apart(monkeypatch):
    """PRF.4: compiling is in its own figure, not in the times of prefill and decode."""
    new = uncompiled(told(), 1)
    clock.slow_compiler(monkeypatch)
    last, again = (list(stream(new, PROMPTS[0]))[-1].stats for _ in range(2))
    assert last.compile_seconds > 2 * clock.HOUR
    assert again.compile_seconds == 0
    assert last.prefill_seconds + last.decode_seconds < clock.HOUR
