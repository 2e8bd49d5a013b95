"""What texts were made with, as plain JSON: enough to refuse texts of another target, tokenizer or template."""

import hashlib
from collections.abc import Mapping
from typing import Any

from specjax import __version__, checkpoints, registry
from specjax.checkpoints.tokenizer import Tokenizer
from specjax.train.shards import identity
from specjax.train.store_files import FORMAT
from specjax.types import Params

#: Keys in which texts of one folder, and of folders that are joined, agree.
TEXTS = ("target", "tokenizer")
_PROBE = "Hello  world, 12345!\n\n\tnaïve 日本語 🙂 <|im_end|></s>"


def about(
    params: Params, template: bool | str | None = None, kwargs: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Facts about a target and how text reaches it. Reads a few numbers of every weight."""
    meta = params.meta
    embed = registry.target(meta.family).shared(params.target, meta.target_cfg).embed
    tokenizer = checkpoints.tokenizer.get(meta.tokenizer_id)
    written = template if isinstance(template, bool | str) else meta.chat_template
    return {
        "format": FORMAT,
        "specjax": __version__,
        "name": meta.name,
        "target": identity(params.target, meta.pair) | {"dtype": str(embed.dtype)},
        "tokenizer": {
            "vocabulary": vocabulary(tokenizer),
            "template": _hash(str(written)),
            "template_variables": dict(kwargs or {}),
        },
    }


def vocabulary(tokenizer: Tokenizer) -> str:
    """Digest of a tokenizer: its tokens, and how it cuts a text."""
    tokens = sorted(tokenizer.ordinary().items())
    return _hash(f"{tokenizer.vocab_size} {tokens} {tokenizer.encode(_PROBE, True)}")


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
