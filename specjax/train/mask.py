"""A token id for "not known yet": block drafters read its embedding where their drafts will be."""

import re
from collections.abc import Iterable
from typing import Any

#: What such tokens are called, best first.
NAMES = ("mask", "unused", "reserved", "extra", "empty", "placeholder")


def reserved(tokenizer: Any, rows: int, taken: Iterable[int] = ()) -> int:
    """An id that is in no text: the first row of the embedding that is no token, if it has ``rows`` enough; else a
    special token that nothing needs, by preference one named for it, else the highest.

    ``tokenizer``: see :class:`specjax.checkpoints.tokenizer.Tokenizer`. ``taken``: ids that are needed (stop ids).
    Those that the chat template names are, too, and the tokenizer's own (begin, end, padding, unknown). ValueError
    when there is none left.
    """
    inner = getattr(tokenizer, "inner", None)
    used = 1 + max(inner.get_vocab().values()) if inner is not None else tokenizer.vocab_size
    if used < rows:
        return used
    special = (
        {} if inner is None else {i: t.content for i, t in inner.added_tokens_decoder.items() if t.special}
    )
    template = tokenizer.chat_template or ""
    needed = set(taken) | _own(inner) | {i for i, text in special.items() if text in template}
    left = {i: text for i, text in special.items() if i not in needed and i < rows}
    if not left:
        raise ValueError(
            f"the embedding's {rows} rows are all tokens, and every special one is in use: name a token that is in no "
            "text as mask_id, or train a vector of its own with mask_embedding=True"
        )
    return min(left, key=lambda i: (_rank(left[i]), -i))


def _rank(text: str) -> int:
    words = re.findall("[a-z]+", text.lower())
    return next(
        (n for n, name in enumerate(NAMES) if any(word.startswith(name) for word in words)), len(NAMES)
    )


def _own(inner: Any) -> set[int]:
    """Begin, end, padding and unknown token of a transformers tokenizer."""
    if inner is None:
        return set()
    named = (inner.bos_token_id, inner.eos_token_id, inner.pad_token_id, inner.unk_token_id)
    return {int(i) for i in named if i is not None}
