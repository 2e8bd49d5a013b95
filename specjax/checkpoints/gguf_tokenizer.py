"""The tokenizer inside a GGUF file, rebuilt from its vocabulary, merges and special-token table."""

from pathlib import Path
from typing import Any

from specjax.checkpoints import gguf, gguf_pieces

_CONTROL, _USER = 3, 4  # kinds of vocabulary entries that are matched before anything is split

_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
#: How text is split before merges apply; None = the GPT-2 rule.
_SPLIT = {
    "llama-bpe": _LETTERS + r"\p{N}{1,3}" + _REST,
    "llama3": _LETTERS + r"\p{N}{1,3}" + _REST,
    "llama-v3": _LETTERS + r"\p{N}{1,3}" + _REST,
    "qwen2": _LETTERS + r"\p{N}" + _REST,
    "gpt-2": None,
    "smollm": None,
}
_ADDS_BOS = ("llama-bpe", "llama3", "llama-v3")  # where the file does not say


def build(path: str | Path) -> Any:
    """A transformers tokenizer for the GGUF at ``path``.

    Raises ValueError when the file has no tokenizer or one whose splitting rule is not known: guessing it
    would give other token ids without any error.
    """
    file = gguf.open_file(path)
    meta = {
        k.removeprefix("tokenizer.ggml."): v for k, v in file.metadata.items() if k.startswith("tokenizer.")
    }
    if "tokens" not in meta:
        raise ValueError(f"{path} holds no tokenizer")
    if meta.get("model") == "llama" and "scores" in meta and "merges" not in meta:
        return _wrap(_with_special(gguf_pieces.build(meta), meta, meta.get("add_bos_token", True)), meta)
    if meta.get("model") != "gpt2":
        return _by_transformers(Path(path), meta.get("model"))
    pre = meta.get("pre", "gpt-2")
    if pre not in _SPLIT:
        raise ValueError(f"{path}: text splitting rule {pre!r} is not known ({', '.join(_SPLIT)})")
    return _wrap(_byte_bpe(meta, pre), meta)


def _byte_bpe(meta: dict[str, Any], pre: str):
    import tokenizers
    from tokenizers import decoders, models, normalizers, processors

    vocab = {token: i for i, token in enumerate(meta["tokens"])}
    merges = [tuple(m.split(" ", 1)) for m in meta["merges"]]
    whole_words = pre in _ADDS_BOS
    out = tokenizers.Tokenizer(models.BPE(vocab, merges, fuse_unk=False, ignore_merges=whole_words))
    out.pre_tokenizer = _pre_tokenizer(pre)
    out.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        out.normalizer = normalizers.NFC()
    out.post_processor = processors.ByteLevel(trim_offsets=False)
    return _with_special(out, meta, meta.get("add_bos_token", whole_words))


def _with_special(out: Any, meta: dict[str, Any], bos: bool):
    """``out`` with the tokens that are matched before anything is split, and what surrounds a text."""
    import tokenizers

    kinds = meta.get("token_type", [])
    added = [
        tokenizers.AddedToken(meta["tokens"][i], special=kind == _CONTROL, normalized=False)
        for i, kind in enumerate(kinds)
        if kind in (_CONTROL, _USER)
    ]
    out.add_tokens(added)
    out.add_special_tokens([t for t in added if t.special])
    around = _surround(meta, bos)
    if around is not None:
        out.post_processor = around
    return out


def _pre_tokenizer(pre: str):
    from tokenizers import Regex, pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=_SPLIT[pre] is None)
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if _SPLIT[pre] is None:
        return byte_level
    split = pre_tokenizers.Split(Regex(_SPLIT[pre]), behavior="isolated", invert=False)
    return pre_tokenizers.Sequence([split, byte_level])


def _surround(meta: dict[str, Any], bos: bool):
    """What ``add_special`` puts around a text, or None."""
    from tokenizers import processors

    special, before, after = [], "", ""
    if bos and "bos_token_id" in meta:
        special.append((meta["tokens"][meta["bos_token_id"]], meta["bos_token_id"]))
        before = special[-1][0] + " "
    if meta.get("add_eos_token") and "eos_token_id" in meta:
        special.append((meta["tokens"][meta["eos_token_id"]], meta["eos_token_id"]))
        after = " " + special[-1][0]
    if not special:
        return None
    return processors.TemplateProcessing(single=f"{before}$A{after}", special_tokens=special)


def _wrap(inner: Any, meta: dict[str, Any]):
    from transformers import PreTrainedTokenizerFast

    names = {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token", "unknown": "unk_token"}
    special = {
        name: meta["tokens"][meta[f"{key}_token_id"]]
        for key, name in names.items()
        if meta.get(f"{key}_token_id") is not None
    }
    out = PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False, **special)
    out.chat_template = meta.get("tokenizer.chat_template")
    return out


def _by_transformers(path: Path, model: Any):
    """Other types of vocabulary: transformers may know how to turn them into a tokenizer."""
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
    except ImportError as error:
        raise ImportError(
            f"{path}: reading a {model!r} tokenizer from GGUF needs torch installed ({error})"
        ) from None
