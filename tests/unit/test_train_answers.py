"""Which tokens are trained, for templates of several kinds: exact at both ends, over turns, thoughts and tools."""

import functools

import pytest
import tiny_files

from specjax.checkpoints.tokenizer import BYTES, Wrapped, get
from specjax.train import answers
from specjax.train.answers import Given, Turn, texts

EOT, IM_END = 0, 2

#: A default system text, like small instruction models have.
SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nhello<|im_end|>\n{% endif %}"
    + tiny_files.CHATML
)
#: Thoughts of earlier turns are dropped; tools and calls are written.
THINKING = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif -%}
{%- set last = namespace(user=0) -%}
{%- for m in messages %}{% if m['role'] == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor -%}
{%- for m in messages -%}
{%- if m['role'] == 'assistant' -%}
<|im_start|>assistant
{% if m.get('reasoning_content') and loop.index0 > last.user %}<think>
{{ m['reasoning_content'] }}
</think>

{% endif %}{{ m['content'] }}{% for c in m.get('tool_calls') or [] %}
<tool_call>{{ c['function'] | tojson }}</tool_call>{% endfor %}<|im_end|>
{% elif m['role'] == 'tool' -%}
<|im_start|>user
<tool_response>{{ m['content'] }}</tool_response><|im_end|>
{% else -%}
<|im_start|>{{ m['role'] }}
{{ m['content'] }}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""
#: No line end behind a turn, no role words before an answer, another id at its end.
BRACKETS = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[1] {{ m['content'] }} [2]"
    "{% else %}{{ m['content'] | trim }}<|endoftext|>{% endif %}{% endfor %}"
)
#: The template says itself what is generated; a mark of the prompt is missing when the answer is written.
BLOCKS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ m['content'] }}{% endgeneration %}<|im_end|>\n"
    "{% else %}<|im_start|>user\n{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\nPROMPT{% endif %}"
)
NO_END = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

TALK = [
    {"role": "user", "content": "hello 12"},
    {"role": "assistant", "content": "hell!"},
    {"role": "user", "content": "and"},
    {"role": "assistant", "content": "o\n\nhello"},
    {"role": "user", "content": "bye"},
]


@functools.cache
def tokenizer() -> Wrapped:
    return Wrapped(tiny_files.small_tokenizer())


def given(template, **more) -> Given:
    return Given(tokenizer(), template, (EOT, IM_END), **more)


def spelled(ids) -> str:
    return tokenizer().decode(ids, skip_special=False)


def answer_texts(text) -> list[str]:
    return [spelled(text.ids[a:b]) for a, b in text.spans]


@pytest.mark.parametrize(
    ("template", "end"),
    [(tiny_files.CHATML, "<|im_end|>"), (SYSTEM, "<|im_end|>"), (BRACKETS, "<|endoftext|>")],
    ids=["chatml", "system", "brackets"],
)
def test_spans_are_exact_at_both_ends(template, end):
    """PEER.22, TRD.1: an answer begins where decoding begins and ends with its end-of-turn id; no more is trained."""
    turns = given(template).turns(TALK)
    (text,) = texts(turns)
    assert answer_texts(text) == ["hell!" + end, "o\n\nhello" + end]
    for i, (first, _) in zip((1, 3), text.spans, strict=True):
        assert text.ids[:first] == tokenizer().chat(TALK[:i], True, template)  # what decoding is given
    assert text.ended == (True, True)
    assert spelled(text.ids) == spelled(tokenizer().chat(TALK[:4], False, template)).rstrip("\n")


def test_pairs():
    """TRD.1: the first answer token is a label, and so is its successor; no prompt token is; the end of turn is."""
    (text,) = texts(given(tiny_files.CHATML).turns(TALK))
    pairs = answers.pairs(text.ids, text.spans)
    first, stop = text.spans[0]
    assert pairs[0] == (first - 1, text.ids[first])
    assert pairs[1] == (first, text.ids[first + 1])
    assert (stop - 2, IM_END) in pairs
    labels = {context + 1 for context, _ in pairs}
    assert labels == {at for a, b in text.spans for at in range(a, b)}
    assert all(text.ids[context + 1] == label for context, label in pairs)


def test_a_text_that_begins_with_an_answer():
    """TRD.1: nothing predicts the first token of all."""
    assert answers.pairs([5, 6, 7], [(0, 3)]) == [(0, 6), (1, 7)]


def test_thoughts_of_earlier_turns():
    """PEER.22: where later prompts drop earlier thoughts every answer stands in the context it is decoded in."""
    talk = [dict(m) for m in TALK]
    talk[1]["reasoning_content"] = "12 12"
    talk[3]["reasoning_content"] = "hell"
    first, second = texts(given(THINKING).turns(talk))
    assert answer_texts(first) == ["<think>\n12 12\n</think>\n\nhell!<|im_end|>"]
    assert answer_texts(second) == ["<think>\nhell\n</think>\n\no\n\nhello<|im_end|>"]
    assert "12 12" not in spelled(second.ids)
    assert second.ids[: second.spans[0][0]] == tokenizer().chat(talk[:3], True, THINKING)


def test_tools():
    """PEER.22: calls are answers, results are not; thoughts between calls of one turn stay, in one text."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    talk = [
        {"role": "user", "content": "1 plus 1"},
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "It is 2"},
    ]
    tools = [{"type": "function", "function": {"name": "add"}}]
    (text,) = texts(given(THINKING).turns(talk, tools))
    called, said = answer_texts(text)
    assert called.startswith("<think>\nhm\n</think>\n\n<tool_call>")
    assert called.endswith("</tool_call><|im_end|>")
    assert said == "It is 2<|im_end|>"
    assert "<tool_response>2</tool_response>" in spelled(text.ids[text.spans[0][1] : text.spans[1][0]])
    assert '"add"' in spelled(text.ids[: text.spans[0][0]])


def test_an_answer_that_would_merge_with_the_prompt():
    """PEER.22: read at once, "1" and "2" are one token; decoding has the "1" already."""
    template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }} 1"
        "{% else %}{{ m['content'] }}<|im_end|>{% endif %}{% endfor %}"
    )
    talk = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "2 b"},
        {"role": "user", "content": "c"},
    ]
    talk.append({"role": "assistant", "content": "d"})
    first, second = texts(given(template).turns(talk))
    one = tokenizer().encode("1", False)[0]
    assert first.ids[: first.spans[0][0]][-1] == one
    assert answer_texts(first) == ["2 b<|im_end|>"]
    assert second.ids[: second.spans[0][0]] == tokenizer().chat(talk[:3], True, template)
    assert answer_texts(second) == ["d<|im_end|>"]


def test_generation_blocks():
    """PEER.22: a template's own blocks are followed where the prompt is no beginning of the text; the end of turn
    behind them is trained."""
    (text,) = texts(given(BLOCKS).turns(TALK))
    assert answer_texts(text) == ["hell!<|im_end|>", "o\n\nhello<|im_end|>"]
    plain = BLOCKS.replace("PROMPT", "")
    by_difference = texts(given(plain).turns(TALK))
    by_blocks = Given(tokenizer(), plain, (EOT, IM_END))
    starts = [by_blocks._by_block(TALK[: i + 1], {}) for i in (1, 3)]
    assert starts == [first for first, _ in by_difference[0].spans]


def test_templates_that_do_not_tell():
    """TRD.2: an error that says what to do, not a guess."""
    broken = BLOCKS.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    with pytest.raises(ValueError, match=r"does not tell where answer 1 begins.*marks="):
        given(broken).turns(TALK)
    with pytest.raises(ValueError, match=r"writes no end-of-turn id behind answer 1.*\[0, 2\].*marks="):
        given(NO_END).turns(TALK)
    with pytest.raises(ValueError, match="the chat template failed: no"):
        given("{{ raise_exception('no') }}").turns(TALK)
    with pytest.raises(ValueError, match="marks are the texts before and after"):
        given(NO_END, marks=("x", ""))


def test_marks():
    """TRD.2: an explicit rule in place of the template's."""
    marks = ("assistant: ", "\n")
    talk = [*TALK[:3], {"role": "assistant", "content": "hey"}]
    (text,) = texts(given(NO_END, marks=marks).turns(talk))
    assert answer_texts(text) == ["hell!\n", "hey\n"]
    with pytest.raises(ValueError, match="'agent: ' before an answer is nowhere"):
        given(NO_END, marks=("agent: ", "\n")).turns(TALK)


def test_the_byte_tokenizer():
    (text,) = texts(Given(get(BYTES), None, (257,)).turns(TALK))
    assert [get(BYTES).decode(text.ids[a:b], False) for a, b in text.spans] == [
        "hell!<eos>",
        "o\n\nhello<eos>",
    ]


def test_texts_of_turns():
    """Turns that continue each other are one text, others several; an empty answer is none."""
    a, b = Turn([1, 2], [3, 4], True), Turn([1, 2, 3, 4, 9], [5], False)
    assert texts([a, b]) == [([1, 2, 3, 4, 9, 5], ((2, 4), (5, 6)), (True, False))]
    assert texts([a, Turn([1, 2, 3, 8], [5], True)]) == [
        ([1, 2, 3, 4], ((2, 4),), (True,)),
        ([1, 2, 3, 8, 5], ((4, 5),), (True,)),
    ]
    assert texts([Turn([1], [], True)]) == []


def test_the_debug_view():
    """TRD.1: trained tokens are marked; characters of several bytes are whole."""
    ids = tokenizer().encode("<|im_start|>hello é!<|im_end|>", False)
    shown = answers.shown(tokenizer(), ids, [(2, len(ids))])
    assert shown == "<|im_start|>hello\u27e6 ||é|!|<|im_end|>\u27e7"
    assert (
        "".join(text for text, _ in answers.marked(tokenizer(), ids, [])) == "<|im_start|>hello é!<|im_end|>"
    )
    assert answers.shown(tokenizer(), ids[:2], []) == "<|im_start|>hello"
