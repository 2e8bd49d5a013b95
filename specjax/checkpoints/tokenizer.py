"""Text to token ids and back, by tokenizer id: a folder, a GGUF file, or ``"bytes"``.

transformers and tokenizers are imported on first use; torch is not needed. Code shipped with a
checkpoint is never run.
"""

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

BYTES = "bytes"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
Messages = Sequence[dict[str, Any]]


class Tokenizer(Protocol):
    """What the rest of the package needs of a tokenizer."""

    chat_template: str | None
    vocab_size: int

    def encode(self, text: str, add_special: bool) -> list[int]:
        """Token ids; ``add_special`` adds what the tokenizer puts around a text (often a BOS)."""
        ...

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of token ids."""
        ...

    def chat(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        template: str | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation; ``kwargs`` reach the template (``enable_thinking=False``)."""
        ...

    def ordinary(self) -> dict[int, str]:
        """Id -> token of everything but special and added tokens."""
        ...

    def save(self, folder: str | Path) -> None:
        """Write files from which :func:`get` builds the same tokenizer."""
        ...


@functools.lru_cache(maxsize=16)
def get(tokenizer_id: str) -> Tokenizer:
    """The tokenizer of an id. Raises ValueError for an empty id, OSError for missing files."""
    if tokenizer_id == BYTES:
        return ByteTokenizer()
    if not tokenizer_id:
        raise ValueError("this model came without a tokenizer: pass token ids instead of text")
    path = Path(tokenizer_id)
    if path.suffix.lower() == ".gguf":
        from specjax.checkpoints import gguf_tokenizer

        return Wrapped(gguf_tokenizer.build(path))
    if not path.is_dir():
        raise FileNotFoundError(f"tokenizer folder {path} does not exist")
    return Wrapped(_from_folder(path))


def conflict(one: str, other: str) -> str | None:
    """Why two tokenizer ids do not speak of the same tokens, or None when they do.

    Every id that is an ordinary token of both must be the same token. Special and added tokens, and ids that only
    one of them has, may differ: a draft of one is merely wrong.
    """
    if one == other:
        return None
    a, b = get(one).ordinary(), get(other).ordinary()
    both = sorted(a.keys() & b.keys())
    if not both:
        return "they have no id in common"
    different = next((i for i in both if a[i] != b[i]), None)
    return (
        None
        if different is None
        else f"id {different} is {a[different]!r} in one, {b[different]!r} in the other"
    )


def in_folder(folder: str | Path) -> str:
    """Tokenizer id of a checkpoint folder: its path, or "" when it holds no tokenizer."""
    folder = Path(folder)
    return str(folder.resolve()) if any((folder / f).is_file() for f in TOKENIZER_FILES) else ""


def _from_folder(path: Path):
    if (path / "tokenizer.json").is_file():  # the class that reads it does not import torch
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(path)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, trust_remote_code=False)


class Wrapped:
    """A transformers tokenizer behind the :class:`Tokenizer` protocol."""

    def __init__(self, inner: Any):
        self.inner = inner
        self.chat_template: str | None = _default_template(inner.chat_template)
        self.vocab_size: int = len(inner)

    def encode(self, text: str, add_special: bool) -> list[int]:
        return list(self.inner.encode(text, add_special_tokens=add_special))

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return self.inner.decode(
            list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )

    def chat(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        template: str | None = None,
        **kwargs: Any,
    ) -> list[int]:
        how = {"tokenize": True, "return_dict": False}
        return list(self._write(messages, add_generation_prompt, template, **how, **kwargs))

    def chats(
        self,
        conversations: Sequence[Messages],
        add_generation_prompt: bool = True,
        template: str | None = None,
        **kwargs: Any,
    ) -> list[list[int]]:
        """:meth:`chat` of several conversations, in less time than one by one."""
        how = {"tokenize": True, "return_dict": False}
        several = [list(messages) for messages in conversations]
        written = self._write(several, add_generation_prompt, template, **how, **kwargs)
        return [list(ids) for ids in written]

    def render(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The text that :meth:`chat` gives the ids of."""
        return self._write(messages, add_generation_prompt, template, tokenize=False, **kwargs)

    def generated(
        self,
        messages: Messages,
        add_generation_prompt: bool = False,
        template: str | None = None,
        **kwargs: Any,
    ) -> list[bool]:
        """Which ids of :meth:`chat` stand in the template's ``{% generation %}`` blocks; none if it has no blocks."""
        template = template or self.chat_template
        if not re.search(r"\{%-?\s*generation\s*-?%\}", template or ""):
            return []
        how = {"tokenize": True, "return_assistant_tokens_mask": True, "return_dict": True}
        written = self._write(messages, add_generation_prompt, template, **how, **kwargs)
        return [bool(inside) for inside in written["assistant_masks"]]

    def _write(self, messages: Any, ask: bool, template: str | None, **kwargs: Any) -> Any:
        template = template or self.chat_template
        if template is None:
            raise ValueError("this model has no chat template: pass a text prompt, or a template")
        return self.inner.apply_chat_template(
            list(messages),
            chat_template=template,
            add_generation_prompt=ask,
            **kwargs,
        )

    def ordinary(self) -> dict[int, str]:
        added = self.inner.get_added_vocab()
        return {i: token for token, i in self.inner.get_vocab().items() if token not in added}

    def save(self, folder: str | Path) -> None:
        self.inner.save_pretrained(str(folder))


def _default_template(template: Any) -> str | None:
    """Some files carry several named templates."""
    return template.get("default") if isinstance(template, dict) else template


class ByteTokenizer:
    """Ids 0-255 are bytes, 256 begins a text, 257 ends a turn, higher ids stand for nothing."""

    BOS, EOS = 256, 257
    chat_template: str | None = "{role}: {content}<eos>"
    vocab_size = 258

    def encode(self, text: str, add_special: bool) -> list[int]:
        return [self.BOS] * add_special + list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        marks = {} if skip_special else {self.BOS: b"<bos>", self.EOS: b"<eos>"}
        raw = b"".join(bytes([i]) if i < 256 else marks.get(i, b"") for i in map(int, ids))
        return raw.decode("utf-8", errors="replace")

    def chat(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        template: str | None = None,
        **kwargs: Any,
    ) -> list[int]:
        del kwargs
        if template not in (None, self.chat_template):
            raise ValueError("the byte tokenizer has a fixed chat layout and takes no template")
        ids = [self.BOS]
        for message in messages:
            ids += [*self.encode(f"{message['role']}: {message['content']}", False), self.EOS]
        return ids + (self.encode("assistant: ", False) if add_generation_prompt else [])

    def ordinary(self) -> dict[int, str]:
        return {i: f"<0x{i:02X}>" for i in range(256)}

    def save(self, folder: str | Path) -> None:
        """Nothing to write: the id says it all."""
