"""Stop ids and stop strings of ``specjax.decode``."""

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_files
from decoding import BOTH, TOLERANCE, decode, only, sound
from tiny_models import (
    EOS,
    PROMPTS,
    greedy,
    target,
    told,
    with_meta,
)

# --- stop ids


def cut(tokens, stops):
    hits = np.flatnonzero(np.isin(tokens, list(stops)))
    return tokens[: hits[0] + 1] if hits.size else tokens


STOP_FORMS = {
    "int": int,
    "numpy int": np.int64,
    "list": lambda i: [i],
    "tuple": lambda i: (i, EOS),
    "set": lambda i: {i},
    "array": lambda i: np.array([EOS, i]),
    "0-d array": lambda i: np.array(i),
    "jax array": lambda i: jnp.array([i]),
    "many": lambda i: [i, *range(8)],  # more than one bucket of the table
}


@pytest.mark.parametrize("form", STOP_FORMS.values(), ids=STOP_FORMS)
def test_stop_ids_in_every_form(form):
    """STP.6: one id or several."""
    tokens = greedy(PROMPTS[4], 40)[0]
    for params in (target(), told("ALWAYS_RIGHT")):
        completion = sound(only(decode(params, PROMPTS[4], stop=form(tokens[4]))))
        assert completion.tokens == cut(tokens, [tokens[4]])
        assert completion.finish_reason == "stop"


def test_a_stop_id_at_every_place_of_a_block():
    """STP.1, STP.2, STP.5, LGP.2: everything ends at the stop, whatever the width; a stop beyond the
    budget is none."""
    prompt, n = PROMPTS[2], 40
    tokens, scores = greedy(prompt, n)
    for stop in dict.fromkeys(tokens):
        expected = cut(tokens, [stop])
        for params, options in ((target(), {}), (told("ALWAYS_RIGHT"), {}), (told("ALWAYS_RIGHT"), {"k": 1})):
            completion = sound(only(decode(params, prompt, stop=[stop], **options)))
            assert completion.tokens == expected
            assert completion.finish_reason == "stop"
            assert completion.text == tiny_files.small_tokenizer().decode(expected[:-1])
            np.testing.assert_allclose(completion.logprobs, scores[: len(expected)], atol=TOLERANCE)
            short = decode(params, prompt, stop=[stop], max_new_tokens=len(expected) - 1, **options)
            assert (short.tokens, short.finish_reason) == (expected[:-1], "length")


@BOTH
def test_eos_of_the_model(params):
    """STP.6: the model's own ids stop unless ignored; ``stop`` still counts then. No ids at all run on."""
    params, tokens = params(), greedy(PROMPTS[2], 40)[0]
    eos, stop = (tokens[9], tokens[6]), next(t for t in tokens if t not in (tokens[9], tokens[6]))
    params = with_meta(params, eos_ids=eos)
    assert decode(params, PROMPTS[2]).tokens == cut(tokens, eos)
    assert decode(params, PROMPTS[2], stop=[stop]).tokens == cut(tokens, [*eos, stop])
    assert decode(params, PROMPTS[2], ignore_eos=True).tokens == tokens
    assert decode(params, PROMPTS[2], ignore_eos=True, stop=stop).tokens == cut(tokens, [stop])
    assert decode(with_meta(params, eos_ids=()), PROMPTS[2], stop=[]).tokens == tokens


def test_a_stop_as_the_very_first_token():
    """STP.1: the prefill's token ends the row; there is no round and no text."""
    tokens = greedy(PROMPTS[2], 1)[0]
    completion = sound(only(decode(told(), PROMPTS[2], stop=tokens)))
    assert (completion.tokens, completion.text, completion.stats.rounds) == (tokens, "", 0)


# --- stop strings


def all_stop_strings(prompt, sizes, step):
    text = decode(target(), prompt).text
    cuts = [text[at : at + n] for n in sizes for at in range(0, len(text) - n, step)]
    return text, [s for s in dict.fromkeys(cuts) if "\ufffd" not in s]


@pytest.mark.parametrize("prompt", PROMPTS[2:4], ids=["words", "more words"])
def test_stop_strings_anywhere(prompt):
    """STP.1, STP.5, LGP.2: inside a token, across tokens, in the middle of an accepted block. Text ends before
    the string; ids keep the tokens it occurs in, and no more than those."""
    tokenizer, tokens = tiny_files.small_tokenizer(), greedy(prompt, 40)[0]
    text, strings = all_stop_strings(prompt, sizes=(1, 2, 5), step=4)
    inside = 0
    for string in strings:
        plain, drafted = (
            sound(only(decode(p, prompt, stop=string))) for p in (target(), told("ALWAYS_RIGHT"))
        )
        assert plain.text == drafted.text == text[: text.index(string)]
        assert plain.finish_reason == drafted.finish_reason == "stop"
        assert plain.tokens == drafted.tokens == tokens[: len(plain.tokens)]
        whole = tokenizer.decode(plain.tokens)
        assert string in whole
        assert string not in tokenizer.decode(plain.tokens[:-1])
        inside += not whole.endswith(string)
        assert drafted.logprobs == pytest.approx(plain.logprobs, abs=TOLERANCE)
    assert inside > 0


def test_stop_strings_and_ids_together():
    """STP.6: whichever comes first."""
    prompt, (tokens, _) = PROMPTS[3], greedy(PROMPTS[3], 40)
    text = decode(target(), prompt).text
    early, late = text[1:4], text[20:24]
    stop_id = next(t for t in tokens[4:] if t not in tokens[:4])
    for params in (target(), told("ALWAYS_RIGHT")):
        by_text = decode(params, prompt, stop=[stop_id, early, late])
        assert by_text.text == text[: text.index(early)]
        by_id = decode(params, prompt, stop=[stop_id, late])
        assert by_id.tokens == cut(tokens, [stop_id])


def test_a_stop_string_beyond_the_budget():
    """STP.2: the reason is the length."""
    prompt = PROMPTS[3]
    text = decode(target(), prompt).text
    short = decode(told("ALWAYS_RIGHT"), prompt, max_new_tokens=5, stop=text[-6:])
    assert (short.finish_reason, len(short.tokens)) == ("length", 5)
