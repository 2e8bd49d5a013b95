"""Conversations: every turn equals a fresh run over the whole conversation, and computes only what is new."""

import dataclasses
import functools
import itertools

import pytest
from tiny_models import (
    CONTEXT,
    VOCAB,
    greedy,
    ngram_params,
    scores_of,
    target,
    with_drafter,
    with_meta,
)

import specjax
from specjax import testing
from specjax.core import loop, programs
from specjax.drafters import ngram

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
SAID = ["hello", "12 c", "a", "cab"]
OPTIONS = {"max_new_tokens": 12, "logprobs": True}


def model(params=None):
    return with_meta(params or target(), chat_template=TEMPLATE)


def chat(params, **options):
    return specjax.chat(params, **OPTIONS | options)


def fresh(params, messages, **options):
    """A run over the whole conversation up to its last user turn."""
    last = max(i for i, m in enumerate(messages) if m["role"] == "user")
    return specjax.decode(params, messages[: last + 1], **OPTIONS | options)


def completion(out):
    return out.completions[0][0]


def same(out, expected):
    """Ids, text, reason, flags and counters; log-probabilities up to rounding."""
    a, b = completion(out), completion(expected)
    quiet = {"prefill_seconds": 0.0, "decode_seconds": 0.0, "compile_seconds": 0.0}
    assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
    a, b = (
        dataclasses.replace(c, logprobs=None, stats=dataclasses.replace(c.stats, **quiet)) for c in (a, b)
    )
    assert a == b


def common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@functools.cache
def conversation():
    """Prompt ids and greedy answers of the turns ``SAID``."""
    messages, known = [], []
    for text in SAID:
        messages.append({"role": "user", "content": text})
        out = specjax.decode(model(), messages, **OPTIONS)
        prompt = completion(out).prompt_tokens
        assert out.tokens == greedy(prompt, 12)[0]
        known.append((prompt, greedy(prompt, 12)[0]))
        messages.append({"role": "assistant", "content": out.text})
    return known


@functools.cache
def witness():
    """A drafter with a state of its own, which it trusts only while it has absorbed every position in order."""
    weights = testing.telling(conversation(), "EVERY_THIRD_WRONG", size=CONTEXT, texts=8)
    cfg = testing.ToldConfig(4, VOCAB, texts=8, size=CONTEXT)
    return with_drafter(model(), "specjax.testing:WITNESS", cfg, weights)


DRAFTERS = {"plain": model, "ngram": lambda: model(ngram_params()), "stateful": witness}
EACH = pytest.mark.parametrize("params", DRAFTERS.values(), ids=DRAFTERS)


@EACH
def test_every_turn_equals_a_fresh_run(params):
    """PFX.2: ids, acceptance and proposals, over turns that outgrow the first token buffer."""
    params, talk = params(), chat(params())
    held, buckets, kept = [], set(), 0
    for text, (prompt, answer) in zip(SAID, conversation(), strict=True):
        out = talk.send(text)
        assert (completion(out).prompt_tokens, out.tokens) == (prompt, answer)
        same(out, fresh(params, talk.messages))
        assert talk.reused == max(common(held, prompt) - 2, 0)
        held, kept = prompt + answer, kept + out.stats.accepted
        buckets.add(specjax.explain(params, talk.messages[:-1], **OPTIONS).program.tokens)
    assert talk.reused > 40
    assert buckets == {64, 128}
    assert (kept > 0) == (params.meta.drafter is not None)
    assert [m["role"] for m in talk.messages] == ["user", "assistant"] * len(SAID)


@EACH
def test_edits_fall_back_to_the_common_prefix(params):
    """PFX.2: a changed turn costs what follows it, no more and no less."""
    params, talk = params(), chat(params())
    for text in SAID[:3]:
        talk.send(text)
    before = completion(fresh(params, talk.messages))
    held = before.prompt_tokens + before.tokens
    talk.messages[2]["content"] = "12 b"
    out = talk.send("o")
    same(out, fresh(params, talk.messages))
    assert 0 < talk.reused == common(held, completion(out).prompt_tokens) - 2
    del talk.messages[1:]
    out = talk.send("he")
    same(out, fresh(params, talk.messages))
    talk.messages[:] = []
    out = talk.send("b")  # nothing in common but the mark at the very beginning
    same(out, fresh(params, talk.messages))
    assert talk.reused == 0


def test_a_conversation_may_shrink_and_grow_again():
    """PFX.2: a state in a large buffer serves a short conversation."""
    talk = chat(witness())
    for text in SAID:
        talk.send(text)
    talk.messages[:] = []
    for text, (prompt, answer) in zip(SAID, conversation(), strict=True):
        out = talk.send(text)
        assert (completion(out).prompt_tokens, out.tokens) == (prompt, answer)
        assert out.stats.accepted > 0


@EACH
def test_regenerate(params):
    """PFX.2: the same answer with the same seed, another one with another; only the last token is computed."""
    params, talk = params(), chat(params())
    talk.send(SAID[0])
    first = talk.send(SAID[1])
    again = talk.regenerate()
    same(again, first)
    assert talk.reused == len(completion(again).prompt_tokens) - 2
    other = talk.regenerate(temperature=2.5, seed=3)
    same(other, fresh(params, talk.messages, temperature=2.5, seed=3))
    assert other.tokens != first.tokens
    assert [m["role"] for m in talk.messages] == ["user", "assistant"] * 2
    assert talk.messages[-1]["content"] == other.text
    same(talk.send(SAID[2]), fresh(params, talk.messages))


@EACH
def test_sampling_in_a_conversation(params):
    """RNG.1, PFX.2, DST.7: a turn draws what a fresh run with the same seed and options draws."""
    params = params()
    hot = {"temperature": 2.5, "seed": 7, "rule": "match"}
    talk, texts = chat(params, **hot), []
    for text in SAID[:3]:
        out = talk.send(text)
        same(out, fresh(params, talk.messages, **hot))
        texts.append(out.text)
    assert len(set(texts)) == 3
    assert talk.reused > 0


def test_options_of_one_turn():
    """PFX.2: an option switched on for a turn, or another width, keeps or rebuilds the state as it must."""
    params, talk = witness(), chat(witness())
    for text, options in zip(SAID, ({}, {"temperature": 1.5, "seed": 2}, {"k": 2}, {}), strict=True):
        same(talk.send(text, **options), fresh(params, talk.messages, **options))
        assert (talk.reused > 0) == (text not in (SAID[0], SAID[2], SAID[3]))  # k changes twice


@EACH
def test_a_stop_string_in_mid_answer(params):
    """PFX.2: the device has run on beyond it; nothing of that is left in the next turn."""
    params, talk = params(), chat(params())
    text = fresh(params, [{"role": "user", "content": SAID[0]}]).text
    stop = text[4:6]
    out = talk.send(SAID[0], stop=stop)
    assert out.text == talk.messages[-1]["content"] == text[: text.index(stop)]
    assert out.finish_reason == "stop"
    for said in SAID[1:3]:
        same(talk.send(said, stop=stop), fresh(params, talk.messages, stop=stop))
    same(talk.send(SAID[3]), fresh(params, talk.messages))
    assert talk.reused > 0


@EACH
def test_streams(params):
    """The pieces joined are the answer; a stream and a call may alternate."""
    params, talk = params(), chat(params())
    for text in SAID[:2]:
        pieces = list(talk.stream(text))
        expected = fresh(params, talk.messages)
        assert "".join(p.text for p in pieces) == expected.text == talk.messages[-1]["content"]
        assert [t for p in pieces for t in p.tokens] == expected.tokens
        assert pieces[-1].finish_reason == expected.finish_reason
    same(talk.send(SAID[2]), fresh(params, talk.messages))
    assert talk.reused > 0


def test_a_dropped_stream_keeps_what_was_said():
    """PFX.2: the next turn goes on from there."""
    params, talk = witness(), chat(witness())
    talk.send(SAID[0])
    said = "".join(p.text for p in itertools.islice(talk.stream(SAID[1]), 2))
    assert talk.messages[2:] == [
        {"role": "user", "content": SAID[1]},
        {"role": "assistant", "content": said},
    ]
    for text in SAID[2:]:
        same(talk.send(text), fresh(params, talk.messages))
    assert talk.reused > 0


def test_a_stream_that_never_started_says_nothing():
    talk = chat(model())
    talk.stream(SAID[0])
    assert talk.messages == []
    same(talk.send(SAID[0]), fresh(model(), talk.messages))


def test_a_stream_left_open_loses_no_turn():
    talk = chat(model())
    left_open = talk.stream(SAID[0])
    next(left_open)
    talk.send(SAID[1])
    left_open.close()
    assert [m["content"] for m in talk.messages[::2]] == [SAID[1], SAID[0]]
    same(talk.send(SAID[2]), fresh(model(), talk.messages))


def test_a_system_message_comes_first():
    """VOC.6: and the conversation can be edited freely, a system message included."""
    talk = chat(model(), system="c")
    out = talk.send(SAID[0])
    messages = [{"role": "system", "content": "c"}, {"role": "user", "content": SAID[0]}]
    assert talk.messages[:2] == messages
    same(out, fresh(model(), messages))
    talk.messages[0]["content"] = "b"
    same(talk.send(SAID[1]), fresh(model(), talk.messages))


FAILURES = {
    "option": ({"temperature": -1}, ValueError, "temperature"),
    "unknown option": ({"temprature": 1}, TypeError, "unknown option 'temprature'"),
    "budget": ({"max_new_tokens": CONTEXT}, ValueError, f"context of {CONTEXT}"),
    "samples": ({"n": 2}, ValueError, "n must be 1"),
}


@pytest.mark.parametrize(("options", "kind", "message"), FAILURES.values(), ids=FAILURES)
def test_a_turn_that_fails_leaves_the_conversation_alone(options, kind, message):
    """BAT.3: also one that could not be answered because it was too long."""
    talk = chat(model())
    talk.send(SAID[0])
    before = [dict(m) for m in talk.messages]
    for fail in (talk.send, lambda *a, **k: list(talk.stream(*a, **k))):
        with pytest.raises(kind, match=message):
            fail(SAID[1], **options)
    with pytest.raises(kind, match=message):
        talk.regenerate(**options)
    with pytest.raises(ValueError, match=f"context is {CONTEXT}"):
        talk.send("a" * CONTEXT)
    assert talk.messages == before
    same(talk.send(SAID[1]), fresh(model(), talk.messages))
    assert talk.reused > 0


def test_bad_turns_are_refused():
    """OPT.3: by name; nothing compiles."""
    before = programs.compile_count()
    with pytest.raises(TypeError, match="unknown option 'tempreature'; did you mean 'temperature'"):
        specjax.chat(model(), tempreature=1)
    with pytest.raises(ValueError, match="a user message must be a string, got list"):
        chat(model()).send([1, 2])
    with pytest.raises(ValueError, match="a system message must be a string, got dict"):
        chat(model(), system={"role": "system"})
    with pytest.raises(ValueError, match="no user turn"):
        chat(model(), system="c").regenerate()
    with pytest.raises(ValueError, match="no chat template"):
        chat(with_meta(target(), chat_template=None)).send("a")
    assert programs.compile_count() == before


def test_no_room_for_an_answer():
    """CTX.1, STP.3: an empty answer that says "length", and no turn added."""
    talk = chat(model())
    talk.send(SAID[0])
    before = list(talk.messages)
    out = talk.send(SAID[1], max_new_tokens=0)
    assert (out.text, out.tokens, out.finish_reason) == ("", [], "length")
    (piece,) = talk.stream(SAID[1], max_new_tokens=0)
    assert (piece.text, piece.finish_reason) == ("", "length")
    used = len(completion(fresh(model(), [*before, {"role": "user", "content": ""}])).prompt_tokens)
    full = "b" * (CONTEXT - used)
    assert talk.send(full, max_new_tokens=None).tokens == []
    assert talk.messages == before
    assert len(talk.send(full[:-3], max_new_tokens=None).tokens) == 3
    assert talk.reused > 0


@pytest.mark.parametrize("reads", [0, 3])
def test_ctrl_c(reads, monkeypatch):
    """An interrupted answer counts as far as it got; before the first token the turn never was."""
    talk, count = chat(model(), rounds=1), itertools.count()
    talk.send(SAID[0])
    before = list(talk.messages)

    def read(records, real=loop.read):
        if next(count) == reads:
            raise KeyboardInterrupt
        return real(records)

    for module in ("specjax.core.loop", "specjax.conversation"):
        monkeypatch.setattr(f"{module}.read", read)
    if reads == 0:
        with pytest.raises(KeyboardInterrupt):
            talk.send(SAID[1])
        assert talk.messages == before
    else:
        out = talk.send(SAID[1])
        assert out.finish_reason == "interrupted"
        assert 0 < len(out.tokens) < 12
        assert talk.messages[-1]["content"] == out.text
    monkeypatch.undo()
    same(talk.send(SAID[2]), fresh(model(), talk.messages))


def test_rings_cannot_go_back_and_are_filled_again():
    """KVR.2, PFX.2: nothing of a state that cannot be cut back is reused, and nobody notices."""
    base = testing.sliding_params((5, 0), vocab=VOCAB, eos_ids=(2,))
    base = model(with_meta(base, tokenizer_id=target().meta.tokenizer_id))
    params = with_drafter(base, "ngram", ngram.Config(3, 3, 1))
    talk = chat(params, max_len=CONTEXT)
    for text in SAID[:2]:
        same(talk.send(text), fresh(params, talk.messages, max_len=CONTEXT))
        assert talk.reused == 0


def test_log_probabilities_of_a_later_turn():
    """LGP.1: computed on a reused prefix, they are those of a pass over everything."""
    talk = chat(witness())
    for text in SAID[:3]:
        out = talk.send(text)
        expected = scores_of(target(), completion(out).prompt_tokens, out.tokens)
        assert out.logprobs == pytest.approx(expected, abs=1e-4)
