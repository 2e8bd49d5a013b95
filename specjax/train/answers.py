"""Which tokens are trained: the answers, exact at both ends.

Decoding feeds a prompt (the template's ids up to where an answer begins) and appends what the target says, up to and
with the id that ends its turn. A training text is just that: the prompt's ids, then the answer's. A further turn
continues the text where the template's next prompt begins with it, id for id; where it does not (templates that drop
earlier thoughts, text that is cut into other tokens when read again) another text begins, so that every answer is
trained in the very context in which it is decoded.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from specjax import checkpoints
from specjax.checkpoints.tokenizer import Tokenizer
from specjax.text import StreamDecoder

Messages = Sequence[Mapping[str, Any]]
Spans = Sequence[tuple[int, int]]


class Turn(NamedTuple):
    """One answer. ``prompt``: the ids it was, or would be, decoded after. ``ended``: with its end-of-turn id."""

    prompt: Sequence[int]
    answer: Sequence[int]
    ended: bool


class Text(NamedTuple):
    """Ids, and (first, one past the last) of each answer."""

    ids: list[int]
    spans: tuple[tuple[int, int], ...]
    ended: tuple[bool, ...]


def texts(turns: Iterable[Turn]) -> list[Text]:
    """Training texts of a conversation, given its answered turns in order. Empty answers are left out."""
    found: list[Text] = []
    for turn in turns:
        if not len(turn.answer):
            continue
        prompt = [int(i) for i in turn.prompt]
        ids = prompt + [int(i) for i in turn.answer]
        span = (len(prompt), len(ids))
        before = found[-1] if found else None
        if before is not None and prompt[: len(before.ids)] == before.ids:
            found[-1] = Text(ids, (*before.spans, span), (*before.ended, turn.ended))
        else:
            found.append(Text(ids, (span,), (turn.ended,)))
    return found


class Given:
    """Answered turns of given conversations, as a template and a tokenizer write them.

    ``marks``: texts (before, after) every answer, instead of what the template tells: for templates that do not say
    where answers begin. The text after an answer is part of it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None,
        stop_ids: Iterable[int],
        marks: tuple[str, str] | None = None,
        **kwargs: Any,
    ):
        if marks is not None and (len(marks) != 2 or not all(marks)):
            raise ValueError(f"marks are the texts before and after an answer, got {marks!r}")
        self._tokenizer, self._template, self._kwargs = tokenizer, template, kwargs
        self._stops, self._marks = frozenset(stop_ids), marks

    def turns(self, messages: Messages, tools: Any = None) -> list[Turn]:
        """Turns of a conversation with answers (messages of role assistant).

        ValueError when the template does not tell where an answer begins or ends.
        """
        more = self._kwargs | ({"tools": list(tools)} if tools else {})
        if self._marks is not None:
            return self._marked(messages, more)
        at = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        return [self._turn(messages, i, more) for i in at]

    def _turn(self, messages: Messages, i: int, more: dict[str, Any]) -> Turn:
        """By difference: what the template adds for an answer behind the prompt that asks for it."""
        prompt = self._chat(messages[:i], True, more)
        whole = self._chat(messages[: i + 1], False, more)
        if whole[: len(prompt)] == prompt:
            return Turn(prompt, self._ended(whole[len(prompt) :], i), True)
        answer = self._by_text(messages, i, whole, more)
        if answer is not None:
            return Turn(prompt, self._ended(answer, i), True)
        blocked = self._by_block(messages[: i + 1], more)
        if blocked is not None:
            return Turn(whole[:blocked], self._ended(whole[blocked:], i), True)
        raise ValueError(
            f"the chat template does not tell where answer {i} begins: what it writes for a conversation with the "
            "answer does not begin with the prompt that asks for it. Give the texts before and after an answer as "
            "marks=(before, after), or a template without what it adds to the prompt (a thinking mark, for instance)"
        )

    def _by_text(
        self, messages: Messages, i: int, whole: list[int], more: dict[str, Any]
    ) -> list[int] | None:
        """Ids of an answer that would merge with the prompt's last ones if both were read at once."""
        if not isinstance(self._tokenizer, checkpoints.tokenizer.Wrapped):
            return None
        before = self._render(messages[:i], True, more)
        text = self._render(messages[: i + 1], False, more)
        if not text.startswith(before):
            return None
        answer = self._tokenizer.encode(text[len(before) :], False)
        same = self._spelled([*self._tokenizer.encode(before, False), *answer]) == self._spelled(whole)
        return answer if same else None

    def _by_block(self, messages: Messages, more: dict[str, Any]) -> int | None:
        """Where the last answer begins according to the template's own ``{% generation %}`` blocks."""
        if not isinstance(self._tokenizer, checkpoints.tokenizer.Wrapped):
            return None
        mask = self._written(self._tokenizer.generated, messages, False, more)
        if not any(mask):
            return None
        last = max(i for i, inside in enumerate(mask) if inside)
        return max((i + 1 for i in range(last) if not mask[i]), default=0)

    def _spelled(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=False)

    def _ended(self, answer: Sequence[int], i: int) -> list[int]:
        """An answer up to its end-of-turn id; the template may write more (a line end) that is never decoded."""
        ends = [at for at, token in enumerate(answer) if token in self._stops]
        if not ends:
            raise ValueError(
                f"the chat template writes no end-of-turn id behind answer {i}: none of {sorted(self._stops)}, at "
                "which decoding stops, follows it. Give the texts before and after an answer as marks=(before, after)"
            )
        return list(answer[: ends[-1] + 1])

    def _marked(self, messages: Messages, more: dict[str, Any]) -> list[Turn]:
        before, after = self._marks or ("", "")
        if not isinstance(self._tokenizer, checkpoints.tokenizer.Wrapped):
            raise ValueError("marks need a template that writes text, which the byte tokenizer has not")
        text, found, at = self._render(messages, False, more), [], 0
        while (start := text.find(before, at)) >= 0:
            start += len(before)
            stop = text.find(after, start)
            ended = stop >= 0
            at = stop + len(after) if ended else len(text)
            prompt = self._tokenizer.encode(text[:start], False)
            found.append(Turn(prompt, self._tokenizer.encode(text[start:at], False), ended))
        if not found:
            raise ValueError(
                f"the mark {before!r} before an answer is nowhere in the text: {text[:200]!r}..."
            )
        return found

    def _chat(self, messages: Messages, ask: bool, more: dict[str, Any]) -> list[int]:
        return self._written(self._tokenizer.chat, messages, ask, more)

    def _render(self, messages: Messages, ask: bool, more: dict[str, Any]) -> str:
        return self._written(self._tokenizer.render, messages, ask, more)  # type: ignore[attr-defined]

    def _written(self, write: Callable[..., Any], messages: Messages, ask: bool, more: dict[str, Any]) -> Any:
        from jinja2 import TemplateError

        try:
            options = {"add_generation_prompt": ask, "template": self._template} | more
            return write([dict(m) for m in messages], **options)
        except TemplateError as error:
            raise ValueError(f"the chat template failed: {error}") from error


def pairs(ids: Sequence[int], spans: Spans) -> list[tuple[int, int]]:
    """(index of the last token of the context, label) of everything that is trained."""
    return [(at - 1, int(ids[at])) for first, stop in spans for at in range(max(first, 1), stop)]


def marked(tokenizer: Tokenizer, ids: Sequence[int], spans: Spans) -> list[tuple[str, bool]]:
    """(text, trained) of every token. A character of several tokens is shown at its last one."""
    trained = {at for first, stop in spans for at in range(max(first, 1), stop)}
    decoder = StreamDecoder(_Whole(tokenizer))
    told = [(decoder.push([token]), at in trained) for at, token in enumerate(ids)]
    return [*told, (decoder.flush(), False)]


class _Whole:
    """Decodes special tokens too."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return self._tokenizer.decode(ids, skip_special=False)


def shown(tokenizer: Tokenizer, ids: Sequence[int], spans: Spans) -> str:
    """A text with every run of trained tokens in brackets (:func:`bracketed`)."""
    return bracketed(marked(tokenizer, ids, spans))


def bracketed(tokens: Iterable[tuple[str, bool]]) -> str:
    """What :func:`marked` gives as one text: trained tokens in \u27e6 \u27e7, with a ``|`` between them."""
    out, inside = [], False
    for text, trained in tokens:
        out.append(("|" if inside else "\u27e6") if trained else "\u27e7" * inside)
        out.append(text)
        inside = trained
    return "".join(out) + "\u27e7" * inside
