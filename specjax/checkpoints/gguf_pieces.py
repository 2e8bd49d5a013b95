"""Tokenizers of SentencePiece type inside a GGUF file: pieces with scores, no merges.

SentencePiece joins the two neighbours whose joint piece has the highest score; that is byte-pair encoding with
every way to split a piece as a merge, ranked by the score of the piece.
"""

from typing import Any

_NORMAL, _BYTE = 1, 6  # kinds of vocabulary entries
_SPACE = "\u2581"


def build(meta: dict[str, Any]):
    """A ``tokenizers.Tokenizer`` without special tokens, from the ``tokenizer.ggml.`` fields of a file."""
    import tokenizers
    from tokenizers import decoders, models, normalizers

    tokens, kinds = meta["tokens"], meta.get("token_type", [])
    unknown = meta.get("unknown_token_id")
    out = tokenizers.Tokenizer(
        models.BPE(
            {token: i for i, token in enumerate(tokens)},
            merges(tokens, meta["scores"], kinds),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=_BYTE in kinds,
        )
    )
    prefix = meta.get("add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    out.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    out.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if prefix else []))
    return out


def merges(tokens: list[str], scores: list[float], kinds: list[int]) -> list[tuple[str, str]]:
    """Every pair of pieces that makes a piece, best score first; of one piece the longest left part first.

    Entries that are no ordinary pieces (control tokens, bytes, what users define) neither join nor are joined.
    """
    plain = {t: s for t, s, kind in zip(tokens, scores, kinds, strict=True) if kind == _NORMAL}
    found = []
    for piece in sorted(plain, key=plain.__getitem__, reverse=True):
        for i in range(len(piece) - 1, 0, -1):
            left, right = piece[:i], piece[i:]
            if left in plain and right in plain:
                found.append((left, right))
    return found
