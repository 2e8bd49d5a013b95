"""Prompts in every accepted form -> token ids, checked against the target."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specjax import checkpoints
from specjax.config import Meta


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Token ids per prompt, and whether a single prompt (not a list) was given."""

    ids: list[np.ndarray]
    single: bool


def encode(
    meta: Meta,
    prompt: Any,
    chat_template: bool | str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Prompts:
    """Token ids of ``prompt``: a string, chat messages, token ids, or a list of any of these.

    A string is one user turn through the chat template; ``chat_template=False`` takes it raw, a string
    replaces the template. Raises ValueError for an empty prompt, ids outside the vocabulary, and a padded
    2-D array (which rows are padding is not said: pass a list of rows).
    """
    if isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes) and len(prompt) == 0:
        raise ValueError("the prompt is empty: give a string, messages or at least one token id")
    if not (chat_template is None or isinstance(chat_template, bool | str)) or chat_template == "":
        raise ValueError(f"chat_template must be a template, True or False, got {chat_template!r}")
    if chat_template_kwargs is not None and not isinstance(chat_template_kwargs, Mapping):
        raise ValueError(f"chat_template_kwargs must be a dict, got {chat_template_kwargs!r}")
    single = _is_single(prompt)
    items = [prompt] if single else list(prompt)
    as_ids = _Encoder(meta, chat_template, dict(chat_template_kwargs or {}))
    return Prompts([_check(meta, as_ids(item, i), i) for i, item in enumerate(items)], single)


def _is_single(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return True
    if hasattr(prompt, "ndim"):
        if prompt.ndim != 1:
            raise ValueError(
                f"a prompt array must have one axis, got shape {tuple(prompt.shape)}; for a batch pass a list "
                "of rows without padding"
            )
        return True
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise ValueError(
            f"a prompt is a string, messages, token ids or a list of them, got {type(prompt).__name__}"
        )
    return isinstance(prompt[0], Mapping) or _is_number(prompt[0])


def _is_number(item: Any) -> bool:
    return isinstance(item, int | float | np.number | np.bool) or (hasattr(item, "ndim") and item.ndim == 0)


class _Encoder:
    def __init__(self, meta: Meta, template: bool | str | None, kwargs: dict[str, Any]):
        self.meta, self.template, self.kwargs = meta, template, kwargs

    def __call__(self, item: Any, index: int) -> Any:
        if isinstance(item, str):
            return self._text(item, index)
        if isinstance(item, Sequence) and len(item) and isinstance(item[0], Mapping):
            return self._messages([_message(m, index) for m in item])
        return item

    def _text(self, text: str, index: int) -> list[int]:
        if not text:
            raise ValueError(f"prompt {index} is an empty string")
        if self.template is False or (self.template is None and self._template() is None):
            return self._tokenizer().encode(text, add_special=True)
        return self._messages([{"role": "user", "content": text}])

    def _messages(self, messages: list[dict[str, Any]]) -> list[int]:
        from jinja2 import TemplateError

        if self.template is False:
            raise ValueError("chat messages need a chat template, but chat_template=False was given")
        if self._template() is None:
            raise ValueError(
                "this model has no chat template; pass one as chat_template='...', or a raw string"
            )
        options = {"add_generation_prompt": True, "template": self._template()}
        reserved = sorted({"template", "messages", "tokenize", "return_dict"} & set(self.kwargs))
        if reserved:
            raise ValueError(f"chat_template_kwargs are variables of the template; {reserved} are not")
        try:
            return self._tokenizer().chat(messages, **options | self.kwargs)
        except TemplateError as error:
            raise ValueError(f"the chat template failed: {error}") from error

    def _template(self) -> str | None:
        return self.template if isinstance(self.template, str) else self.meta.chat_template

    def _tokenizer(self):
        if not self.meta.tokenizer_id:
            raise ValueError("this model was loaded without a tokenizer: pass token ids as the prompt")
        return checkpoints.tokenizer.get(self.meta.tokenizer_id)


def _message(message: Any, index: int) -> dict[str, Any]:
    whole = isinstance(message, Mapping) and "role" in message
    if not whole or (message.get("content") is None and not message.get("tool_calls")):
        raise ValueError(f"prompt {index}: a message is a dict with 'role' and 'content', got {message!r}")
    return dict(message)


def _check(meta: Meta, ids: Any, index: int) -> np.ndarray:
    if not hasattr(ids, "ndim"):
        _check_row(ids, index)
    array = np.asarray(ids)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"prompt {index} has shape {array.shape}; expected a non-empty row of token ids")
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"prompt {index} holds {array.dtype} values; token ids must be integers")
    vocab = meta.target_cfg.vocab_size
    bad = array[(array < 0) | (array >= vocab)]
    if bad.size:
        raise ValueError(f"prompt {index} holds token id {int(bad[0])}, outside the vocabulary [0, {vocab})")
    return array.astype(np.int32)


def _check_row(ids: Any, index: int) -> None:
    if not isinstance(ids, Sequence) or isinstance(ids, bytes):
        raise ValueError(
            f"prompt {index} is a {type(ids).__name__}; expected a string, messages or token ids"
        )
    if not all(map(_is_number, ids)):
        raise ValueError(f"prompt {index} must be a flat row of token ids")
    if any(isinstance(i, bool | np.bool) for i in ids):
        raise ValueError(f"prompt {index} holds bool values; token ids must be integers")
