"""``specjax.decode`` as a user meets it: prompts in every form, results, batches, budgets, interruption."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_files
from decoding import BOTH, TOLERANCE, decode, only, sound
from tiny_models import (
    CONTEXT,
    PROMPTS,
    VOCAB,
    greedy,
    ngram_params,
    target,
    told,
    with_meta,
)

import specjax
from specjax import config
from specjax.core import loop, programs

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
