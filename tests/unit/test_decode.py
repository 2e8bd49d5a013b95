"""``specjax.decode`` as a user meets it: prompts in every form, batches, budgets, stops, seeds, options."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_files
from tiny_models import (
    CONTEXT,
    EOS,
    OPTIONS,
    PROMPTS,
    VOCAB,
    greedy,
    ngram_params,
    scores_of,
    target,
    token,
    told,
    whole_pass,
    with_drafter,
    with_meta,
)

import specjax
from specjax import config, testing
from specjax.core import loop, programs

TOLERANCE = 1e-4  # of a float32 log-probability
BOTH = pytest.mark.parametrize("params", [target, told], ids=["plain", "drafted"])


def decode(params, prompt, **options):
    return specjax.decode(params, prompt, **OPTIONS | options)


def only(out):
    """The one completion of a result."""
    ((completion,),) = out.completions
    return completion


def sound(completion):
    """LGP.2: ids, flags, log-probabilities, counters and text all end at the same token."""
    stats, n = completion.stats, len(completion.tokens)
    assert len(completion.drafted) == n == stats.new_tokens
    assert completion.logprobs is None or len(completion.logprobs) == n
    assert stats.emitted == max(n - 1, 0)  # the prefill's token is no round
    assert sum(completion.drafted) == stats.accepted <= stats.proposed
    return completion


# --- prompts

FORMS = {
    "list": list,
    "tuple": tuple,
    "range": lambda ids: range(ids[0], ids[-1] + 1),
    "int64": np.array,
    "uint8": lambda ids: np.array(ids, np.uint8),
    "jax": jnp.array,
    "list of numpy scalars": lambda ids: list(np.array(ids)),
    "list of jax scalars": lambda ids: list(jnp.array(ids)),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_token_ids_in_every_form(form):
    """BAT.6: ids come as any flat sequence of integers."""
    ids = [100, 101, 102, 103]
    out = decode(target(), form(ids), max_new_tokens=9)
    assert out.tokens == greedy(ids, 9)[0]
    assert only(out).prompt_tokens == ids


def reference_chat(messages, **options):
    return tiny_files.small_tokenizer().apply_chat_template(
        messages, tokenize=True, return_dict=False, **{"add_generation_prompt": True} | options
    )


def prompt_of(prompt, **options):
    """Ids a prompt turns into, for both kinds of call."""
    plain, drafted = (
        only(specjax.decode(p, prompt, max_new_tokens=0, **options)).prompt_tokens for p in (target(), told())
    )
    assert plain == drafted
    return plain


def test_a_string_is_a_user_turn_and_messages_are_a_conversation():
    """VOC.6: through the chat template, equal with and without drafting."""
    user = {"role": "user", "content": "hello 12"}
    system = {"role": "system", "content": "be brief"}
    assert prompt_of("hello 12") == prompt_of([user]) == reference_chat([user])
    assert prompt_of([system, user]) == reference_chat([system, user])
    assert prompt_of("hello 12", chat_template=True) == reference_chat([user])


def test_a_string_can_be_taken_raw():
    """VOC.6"""
    raw = list(tiny_files.small_tokenizer().encode("hello 12"))
    assert prompt_of("hello 12", chat_template=False) == raw
    assert only(specjax.decode(with_meta(target(), chat_template=None), "hello 12")).prompt_tokens == raw


def test_a_template_of_ones_own_and_its_variables():
    """VOC.6"""
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if loud %}!{% endif %}"
    encode = lambda text: prompt_of(text, chat_template=False)  # noqa: E731
    assert prompt_of("a b", chat_template=template) == encode("a b")
    loud = {"chat_template": template, "chat_template_kwargs": {"loud": True}}
    assert prompt_of("a b", **loud) == encode("a b!")
    user = {"role": "user", "content": "a b"}
    closed = prompt_of("a b", chat_template_kwargs={"add_generation_prompt": False})
    assert closed == reference_chat([user], add_generation_prompt=False)


def test_a_list_mixes_forms_and_keeps_their_order():
    """BAT.1, BAT.6: also duplicates and very different lengths."""
    message = [{"role": "user", "content": "hi"}]
    prompts = ["hi", PROMPTS[1], np.array(PROMPTS[0]), message, "hi"]
    out = decode(told(), prompts, rows=3)
    assert out.tokens == [greedy(prompt_of(p), 40)[0] for p in prompts]


REFUSED = {
    "2-D array": (np.zeros((2, 3), int), r"one axis, got shape \(2, 3\)"),
    "2-D jax array": (jnp.zeros((1, 3), int), "without padding"),
    "2-D in a list": ([np.zeros((1, 3), int)], r"prompt 0 has shape \(1, 3\)"),
    "nested lists": ([[[1]]], "prompt 0 must be a flat row"),
    "numbers and lists": ([1, [2]], "prompt 0 must be a flat row"),
    "float ids": ([1.0, 2.0], "float64"),
    "float array": (np.ones(3), "float64"),
    "one float": ([1, 2.5], "float64"),
    "bool ids": ([True, False], "bool"),
    "bool array": (np.ones(3, bool), "bool"),
    "one bool": ([1, True], "bool"),
    "empty list": ([], "prompt is empty"),
    "empty array": (np.zeros(0, int), r"shape \(0,\)"),
    "empty string": ("", "prompt 0 is an empty string"),
    "empty row": ([[1], []], "prompt 1"),
    "empty text": (["hi", ""], "prompt 1 is an empty string"),
    "negative id": ([5, -1], r"id -1, outside the vocabulary \[0, 265\)"),
    "id too large": ([VOCAB], "265"),
    "id in a batch": ([[1], [2, 2**40]], "prompt 1 holds token id 1099511627776"),
    "None": (None, "NoneType"),
    "None in a list": ([None], "prompt 0 is a NoneType"),
    "bytes": (b"hi", "bytes"),
    "one message": ({"role": "user", "content": "hi"}, "dict"),
    "message and text": ([{"role": "user", "content": "hi"}, "there"], "got 'there'"),
    "no role": ([{"content": "hi"}], "'role' and 'content'"),
    "no content": ([{"role": "user", "content": None}], "'role' and 'content'"),
}


@pytest.mark.parametrize(("prompt", "message"), REFUSED.values(), ids=REFUSED)
def test_prompts_that_are_refused(prompt, message):
    """CTX.4, BAT.6: before anything compiles, naming what is wrong."""
    before = programs.compile_count()
    for entry in (specjax.decode, specjax.stream, specjax.explain, specjax.start):
        with pytest.raises(ValueError, match=message):
            entry(target(), prompt, max_new_tokens=3)
    assert programs.compile_count() == before


# --- results


def test_result_of_one_prompt():
    out = decode(told(), PROMPTS[0])
    tokens, scores = greedy(PROMPTS[0], 40)
    assert out.tokens == tokens
    assert out.finish_reason == "length"
    np.testing.assert_allclose(out.logprobs, scores, atol=TOLERANCE)
    assert out.text == tiny_files.small_tokenizer().decode(tokens, skip_special_tokens=True)
    assert out.stats == sound(only(out)).stats
    assert out.text in str(out)


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS[:3]], ids=["list of one", "list"])
def test_results_of_a_list_are_lists(prompts):
    out = decode(target(), prompts)
    assert out.tokens == [greedy(p, 40)[0] for p in prompts]
    for name in ("text", "tokens", "finish_reason", "logprobs", "stats"):
        assert len(getattr(out, name)) == len(prompts)
    assert all(isinstance(text, str) for text in out.text)
    assert out.total.new_tokens == 40 * len(prompts)


def test_several_samples_add_a_level():
    one = decode(target(), PROMPTS[0], n=3)
    assert one.tokens == [greedy(PROMPTS[0], 40)[0]] * 3
    two = decode(target(), PROMPTS[:2], n=3, rows=3)
    assert two.tokens == [[greedy(p, 40)[0]] * 3 for p in PROMPTS[:2]]
    assert np.array(two.stats, object).shape == (2, 3)


def test_log_probabilities_only_on_request():
    out = specjax.decode(target(), PROMPTS[0], max_new_tokens=1)
    assert out.logprobs is None


# --- batches


@pytest.mark.parametrize("n", [2, 3, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 4, 5))])
def test_every_row_of_a_batch_equals_its_solo_run(n):
    """BAT.1, BAT.4, BAT.6: ragged prompts, rows that accept different counts."""
    out = decode(told(), PROMPTS[:n])
    for prompt, (completion,) in zip(PROMPTS, out.completions, strict=False):
        tokens, scores = greedy(prompt, 40)
        assert sound(completion).tokens == tokens
        np.testing.assert_allclose(completion.logprobs, scores, atol=TOLERANCE)
        assert completion.stats.accepted > 0


def test_rows_permute():
    """BAT.2: ids and counters follow their rows."""
    modes = told("RANDOM_COUNT")
    prompts = [PROMPTS[0], PROMPTS[0], PROMPTS[2]]
    straight, turned = decode(modes, prompts), decode(modes, [prompts[i] for i in (2, 0, 1)])
    assert turned.tokens == [straight.tokens[i] for i in (2, 0, 1)]
    counters = lambda s: (s.rounds, s.proposed, s.accepted_at)  # noqa: E731
    assert [counters(s) for s in turned.stats] == [counters(straight.stats[i]) for i in (2, 0, 1)]
    assert len({counters(s) for s in straight.stats}) == 2


@BOTH
def test_calls_do_not_see_earlier_calls(params):
    """BAT.3: longer, shorter and equal prompts, after errors and after early stops."""
    params = params()
    tokens = greedy(PROMPTS[2], 40)[0]
    for _ in range(2):
        assert decode(params, PROMPTS[2]).tokens == tokens
        assert decode(params, PROMPTS[1]).tokens == greedy(PROMPTS[1], 40)[0]
        assert decode(params, PROMPTS[2], stop=tokens[5]).tokens == tokens[: tokens.index(tokens[5]) + 1]
        with pytest.raises(ValueError, match="temperature"):
            decode(params, PROMPTS[2], temperature=-1)
        assert decode(params, PROMPTS[2], max_new_tokens=3).tokens == tokens[:3]


def test_more_prompts_than_rows():
    """BAT.1, KVR.6: finished rows are refilled, results keep the order of the prompts, and other prompts,
    budgets and lengths compile nothing."""
    prompts = [*PROMPTS, PROMPTS[0], PROMPTS[3]]
    budgets = [7, 1, 40, 0, 12, 3, 25]
    out = decode(told(), prompts, rows=3, max_new_tokens=budgets)
    assert out.tokens == [greedy(p, n)[0] for p, n in zip(prompts, budgets, strict=True)]
    for (completion,) in out.completions:
        sound(completion)
    before = programs.compile_count()
    again = decode(told(), prompts[::-1], rows=3, max_new_tokens=budgets)
    assert again.tokens == [greedy(p, n)[0] for p, n in zip(prompts[::-1], budgets, strict=True)]
    assert programs.compile_count() == before


def test_the_device_is_told_of_a_stop_string(monkeypatch):
    """STP.1, BAT.4: a row that the host ended drafts no more beside the rows that go on, and gets no more."""
    stop, ended = decode(target(), PROMPTS[2]).text[4:7], []

    def finish(engine, state, rows, real=programs.Engine.finish):
        ended.append(rows.tolist())
        return real(engine, state, rows)

    monkeypatch.setattr(programs.Engine, "finish", finish)
    out = decode(told(), PROMPTS[:3], stop=stop, rounds=2)
    hit = [reason == "stop" for reason in out.finish_reason]
    assert hit[2]
    assert not all(hit)
    assert np.any(ended, axis=0).tolist() == hit
    assert out.tokens == [decode(told(), p, stop=stop).tokens for p in PROMPTS[:3]]


def test_rows_ended_by_a_stop_string_are_refilled():
    """BAT.3, STP.1: what the device computes beyond the string reaches no other prompt."""
    prompts = PROMPTS * 2
    texts = decode(target(), PROMPTS).text
    stops = [texts[0][3:5], texts[2][8:12]]
    out = decode(told(), prompts, rows=3, stop=stops)
    alone = [decode(told(), p, stop=stops) for p in PROMPTS]
    assert out.text == [a.text for a in alone] * 2
    assert out.tokens == [a.tokens for a in alone] * 2
    assert [a.finish_reason for a in alone].count("stop") >= 2


# --- budgets and the end of the context


@pytest.mark.parametrize("k", [None, 1, 4, 8])
def test_small_budgets(k):
    """CTX.4, STP.3: budgets 0..6 and a prompt of one token; the width exceeds what is left."""
    params = target() if k is None else told("ALWAYS_RIGHT")
    for prompt, budget in itertools.product(([90], PROMPTS[0]), range(7)):
        completion = sound(only(decode(params, prompt, max_new_tokens=budget, k=k)))
        assert completion.tokens == greedy(prompt, budget)[0]
        assert completion.finish_reason == "length"


def fills_the_context(k):
    for prompt in (PROMPTS[0], PROMPTS[1]):
        room = CONTEXT - len(prompt)
        completion = sound(only(decode(told("ALWAYS_RIGHT"), prompt, k=k, max_new_tokens=room)))
        assert completion.tokens == greedy(prompt, room)[0]
        assert completion.finish_reason == "length"
        assert completion.stats.rounds == -(-(room - 1) // (k + 1))
        assert decode(told("ALWAYS_RIGHT"), prompt, k=k, max_new_tokens=None).tokens == completion.tokens


@pytest.mark.parametrize("k", [1, 4, 8])
def test_fills_the_context_exactly(k):
    """CTX.1: prompt + budget = the limit; the default budget ends there too."""
    fills_the_context(k)


@pytest.mark.long
@pytest.mark.parametrize("k", [2, 3, 5, 6, 7, 16])
def test_fills_the_context_exactly_for_every_width(k):
    """CTX.1"""
    fills_the_context(k)


def test_a_prompt_as_long_as_the_context():
    """CTX.1: there is room for nothing, which is said by the reason."""
    out = decode(target(), [70] * CONTEXT, max_new_tokens=None)
    assert (out.tokens, out.text, out.finish_reason) == ([], "", "length")


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


# --- log-probabilities


def test_log_probabilities_are_the_targets_own():
    """LGP.1: accepted, corrected and bonus tokens, against one pass over the whole text."""
    for prompt in PROMPTS[:3]:
        completion = only(decode(told(), prompt))
        assert 0 < sum(completion.drafted) < len(completion.tokens)
        expected = scores_of(target(), prompt, completion.tokens)
        np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE)


# --- seeds, samples, options per prompt

HOT = {"temperature": 2.5, "top_k": 40, "top_p": 0.95, "min_p": 0.01}


@BOTH
def test_seeds(params):
    """RNG.1: the same seed gives the same ids, another one others, however large it is; log-probabilities are
    raw (LGP.1), and the seed is in the result."""
    params = params()
    seeds = [0, 1, 2**31, 2**32, 2**32 + 1, 2**63, 2**64 + 1]
    outs = [decode(params, PROMPTS[0], seed=s, rule="match", **HOT) for s in seeds]
    assert len({tuple(out.tokens) for out in outs}) == len(seeds)
    again = decode(params, PROMPTS[0], seed=2**32, rule="match", **HOT)
    assert again.tokens == outs[3].tokens
    assert [out.stats.seed for out in outs] == seeds
    np.testing.assert_allclose(
        outs[0].logprobs, scores_of(target(), PROMPTS[0], outs[0].tokens), atol=TOLERANCE
    )


def test_the_drafter_does_not_change_a_sample():
    """RNG.1, DST.1: with rule "match" and the same seed."""
    plain = decode(target(), PROMPTS[3], seed=4, **HOT)
    drafted = decode(ngram_params(), PROMPTS[3], seed=4, rule="match", **HOT)
    assert drafted.tokens == plain.tokens
    assert drafted.stats.proposed > 0


def test_a_sample_depends_on_its_own_row_only():
    """RNG.2, DST.6: neither on the neighbours, their seeds and options, nor on the place in the batch."""
    prompts, seeds = PROMPTS[:3], [7, 8, 9]
    options = {
        "temperature": [1.0, 2.0, 3.0],
        "top_k": [0, 30, 5],
        "top_p": [0.9, 1.0, 0.8],
        "min_p": [0, 0.02, 0],
    }
    alone = []
    for i in range(3):
        own = {name: [values[i], *HOT_TWICE[name]] for name, values in options.items()}
        alone.append(decode(told(), [prompts[i], [71], [72]], seed=[seeds[i], 1, 2], **own).tokens[0])
    assert decode(told(), prompts, seed=seeds, **options).tokens == alone
    order = (2, 0, 1)
    turned = {name: [values[i] for i in order] for name, values in options.items()}
    out = decode(told(), [prompts[i] for i in order], seed=[seeds[i] for i in order], **turned)
    assert out.tokens == [alone[i] for i in order]


HOT_TWICE = {name: [value, value] for name, value in HOT.items()}


@pytest.mark.parametrize("sampled", [False, True], ids=["point mass", "drawn drafts"])
def test_the_rejection_rule_keeps_scores_seeds_and_greedy_rows(sampled):
    """LGP.1, RNG.1, DST.6: accepted, corrected and bonus tokens carry the target's own log-probability; the
    same seed gives the same ids; a greedy row between sampled ones stays greedy."""
    drawn = with_drafter(target(), "specjax.testing:SAMPLED", testing.bigram(4, VOCAB))
    params = drawn if sampled else told("ALWAYS_RIGHT")
    options = {"temperature": [2.5, 0.0, 2.5], "seed": 3, "rule": "reject"}
    out = decode(params, PROMPTS[:3], **options)
    for prompt, (completion,) in zip(PROMPTS, out.completions, strict=False):
        expected = scores_of(target(), prompt, sound(completion).tokens)
        np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE)
    assert out.tokens[1] == greedy(PROMPTS[1], 40)[0]
    assert out.tokens[0] != greedy(PROMPTS[0], 40)[0]
    assert out.total.accepted > 0
    assert decode(params, PROMPTS[:3], **options).tokens == out.tokens
    assert decode(params, PROMPTS[:3], **options | {"seed": 4}).tokens[0] != out.tokens[0]


def test_samples_differ_from_one_another():
    """RNG.1: also for the same prompt and seed."""
    out = decode(target(), PROMPTS[0], n=3, seed=3, **HOT)
    assert len({tuple(tokens) for tokens in out.tokens}) == 3
    assert out.tokens == decode(target(), PROMPTS[0], n=3, seed=3, **HOT).tokens
    many = decode(target(), PROMPTS[0], n=5, seed=3, rows=3, **HOT)
    assert many.tokens[:3] == out.tokens


def test_options_reach_the_row_they_were_given_for():
    """DST.6, PEER.3: one row each is made greedy by top-k 1, a tiny top-p and min-p 1; None is the default."""
    prompts = [PROMPTS[0]] * 3
    expected = greedy(PROMPTS[0], 40)[0]
    for name, (on, off) in {"top_k": (1, 0), "top_p": (1e-6, 1.0), "min_p": (1.0, 0.0)}.items():
        for row in range(3):
            values = {"top_k": [0] * 3, "top_p": [1.0] * 3, "min_p": [0.0, 0.0, 1e-9]}
            values |= {"top_k": [VOCAB, 0, 0], "top_p": [1.0, 0.9999999, None]}
            values[name] = [on if i == row else off for i in range(3)]
            out = decode(told(), prompts, temperature=3.0, seed=[1, 2, 3], **values)
            assert [tokens == expected for tokens in out.tokens] == [i == row for i in range(3)]
    mixed = decode(
        told(), prompts, temperature=[3.0, None, 3.0], seed=[1, 2, 3], top_k=50, top_p=0.99, min_p=1e-3
    )
    assert [tokens == expected for tokens in mixed.tokens] == [False, True, False]


def test_numpy_values_are_values():
    """DST.7: numpy and jax scalars and arrays mean what Python numbers mean."""
    plain = decode(target(), PROMPTS[:3], seed=[1, 2, 3], temperature=[0.5, 2.5, 1.5], top_k=40)
    options = {"seed": np.array([1, 2, 3]), "temperature": jnp.array([0.5, 2.5, 1.5]), "top_k": np.int32(40)}
    out = decode(target(), PROMPTS[:3], **options | {"max_new_tokens": np.int64(40)})
    assert out.tokens == plain.tokens


# --- the model's own defaults


def test_temperature_model_takes_the_files_defaults():
    """DST.7: every sampling default of the file; an option given beside it wins."""
    file = tuple(sorted({"do_sample": True, **HOT}.items()))
    params = with_meta(target(), generation=file)
    expected = decode(target(), PROMPTS[0], seed=5, **HOT).tokens
    assert decode(params, PROMPTS[0], seed=5, temperature="model").tokens == expected
    assert decode(params, PROMPTS[0], seed=5).tokens == greedy(PROMPTS[0], 40)[0]
    given = decode(params, PROMPTS[0], seed=5, temperature="model", top_k=3).tokens
    assert given == decode(target(), PROMPTS[0], seed=5, **HOT | {"top_k": 3}).tokens


@pytest.mark.parametrize("file", [{}, {"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"top_k": 50}])
def test_temperature_model_is_greedy_when_the_file_says_so(file):
    params = with_meta(target(), generation=tuple(sorted(file.items())))
    assert decode(params, PROMPTS[0], temperature="model").tokens == greedy(PROMPTS[0], 40)[0]


# --- penalties and bias


def penalised(prompt, n, bias, repetition, presence, frequency, in_prompt=True):
    """The definition, token by token; ``in_prompt=False`` forgets that the prompt counts as a repetition."""
    tokens, out = list(prompt), []
    for _ in range(n):
        logits = whole_pass(target(), tokens)[-1].astype(np.float64)
        for i, value in bias.items():
            logits[i] += value
        for i in set(tokens if in_prompt else out):
            logits[i] = logits[i] / repetition if logits[i] > 0 else logits[i] * repetition
        for i in set(out):
            logits[i] -= presence + frequency * out.count(i)
        out.append(int(np.argmax(logits)))
        tokens.append(out[-1])
    return out


PENALTIES = {
    "repetition": (1.3, 0.0, 0.0),
    "presence": (1.0, 4.0, 0.0),
    "frequency": (1.0, 0.0, 2.5),
    "all": (1.2, 1.5, 0.5),
    "rewards": (0.9, -1.0, -0.5),
}


@pytest.mark.parametrize("values", PENALTIES.values(), ids=PENALTIES)
def test_penalties(values):
    """OPT.2, OPT.4: greedy output follows the definition with and without a drafter, and differs from
    the unpenalised one. Log-probabilities stay raw (LGP.1). The prompt's tokens are ones that the target says."""
    prompt, bias = [token(w) for w in ("ll", "hello", "12", "e", "c")], {75: 3.0, 263: -1.0}
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    # values that change nothing keep every option compiled in, so that all cases share their programs
    inert = dict(zip(names, (1.0000001, 1e-9, 1e-9), strict=True))
    options = {name: v if v not in (0.0, 1.0) else inert[name] for name, v in zip(names, values, strict=True)}
    expected = penalised(prompt, 40, bias, *values)
    assert expected != greedy(prompt, 40)[0]
    assert values[0] == 1.0 or expected != penalised(prompt, 40, bias, *values, in_prompt=False)
    right = testing.telling([(prompt, expected)], "ALWAYS_RIGHT", size=CONTEXT, texts=8)
    for params in (target(), ngram_params(), told().replace(drafter=right)):
        out = decode(params, prompt, logit_bias=bias, **options)
        assert out.tokens == expected
        np.testing.assert_allclose(out.logprobs, scores_of(target(), prompt, out.tokens), atol=TOLERANCE)
        assert params is target() or out.stats.proposed > 0
    assert out.stats.accepted == out.stats.proposed > 0


def test_forbidden_tokens_never_come():
    """OPT.1, PEER.2: neither accepted, corrected nor bonus; greedy and sampled, one bias per row."""
    tokens = greedy(PROMPTS[0], 40)[0]
    banned = {t: float("-inf") for t in set(tokens[:10])}
    only_two = {t: float("-inf") for t in range(VOCAB) if t not in (75, 79)}
    biases = [banned, None, only_two]
    for options in ({}, {"temperature": 4.0, "seed": 3}):
        out = decode(told("ALWAYS_RIGHT"), [PROMPTS[0]] * 3, logit_bias=biases, **options)
        assert not set(out.tokens[0]) & set(banned)
        assert set(out.tokens[2]) <= {75, 79}
        assert options or out.tokens[1] == tokens
    assert set(out.tokens[2]) == {75, 79}


# --- being interrupted, and being seen at work


def test_an_active_drafter_shows():
    """MET.6, MET.2: counters show what was drafted and how much of it was kept."""
    out = decode(ngram_params(), PROMPTS[:3])
    for (completion,) in out.completions:
        stats = sound(completion).stats
        assert stats.rounds > 0
        assert stats.proposed > 0
        assert stats.emitted == stats.accepted + stats.rounds
    assert out.total.accepted > 0
    assert "acceptance" in str(out)
    plain = decode(target(), PROMPTS[0])
    assert (plain.stats.proposed, plain.stats.rounds, plain.stats.tau) == (0, 39, 1.0)
    assert "acceptance" not in str(plain)


@BOTH
def test_ctrl_c_keeps_what_was_generated(params, monkeypatch):
    """An interrupt between chunks ends every row with its tokens so far; a second call is not affected."""
    reads = itertools.count()

    def read(records, real=loop.read):
        if next(reads) == 4:
            raise KeyboardInterrupt
        return real(records)

    monkeypatch.setattr(loop, "read", read)
    out = decode(params(), PROMPTS, rows=3, rounds=2)
    assert set(out.finish_reason) == {"interrupted"}
    for prompt, (completion,) in zip(PROMPTS, out.completions, strict=True):
        assert sound(completion).tokens == greedy(prompt, 40)[0][: len(completion.tokens)]
        assert completion.stats.prefill_seconds >= 0
        assert completion.stats.decode_seconds >= 0
    assert [bool(tokens) for tokens in out.tokens] == [True, True, True, False, False]
    assert all(len(tokens) < 40 for tokens in out.tokens)
    monkeypatch.undo()
    assert decode(params(), PROMPTS, rows=3).tokens == [greedy(p, 40)[0] for p in PROMPTS]


def test_ctrl_c_before_the_first_token_is_raised(monkeypatch):
    def read(records):
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "read", read)
    with pytest.raises(KeyboardInterrupt):
        decode(target(), PROMPTS[0])


def test_the_host_loop_gives_the_same():
    """GRD.1: one round per call."""
    out = decode(told(), PROMPTS[0], loop="host", rounds=3)
    assert out.tokens == greedy(PROMPTS[0], 40)[0]
    assert dataclasses.replace(out.stats, **NO_TIMES) == dataclasses.replace(
        decode(told(), PROMPTS[0]).stats, **NO_TIMES
    )


NO_TIMES = {"prefill_seconds": 0.0, "decode_seconds": 0.0, "compile_seconds": 0.0}


def test_rows_of_a_batch_on_accelerators(monkeypatch):
    """PRF.3, DST.6: batch sizes share programs where an idle row costs nothing; idle rows change no row's tokens,
    each of which is drawn with its own values."""
    own = {
        "temperature": [2.5, 0.0, 1.5],
        "top_k": [40, 0, 5],
        "top_p": 0.95,
        "min_p": 0.01,
        "seed": [4, 5, 6],
    }
    full = decode(target(), PROMPTS[:3], **own)
    monkeypatch.setattr(config, "backend", lambda: "gpu")
    assert [config.row_bucket(n, 8) for n in (1, 2, 3, 5, 8, 9)] == [1, 2, 4, 8, 8, 8]
    assert config.row_bucket(5, 6) == 6
    out = decode(told(), PROMPTS[:3])
    assert out.tokens == [greedy(p, 40)[0] for p in PROMPTS[:3]]
    assert decode(target(), PROMPTS[:3], **own).tokens == full.tokens
