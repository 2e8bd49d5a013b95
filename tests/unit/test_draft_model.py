"""A model of a target family as drafter: itself, another one, other vocabulary sizes, windows, short contexts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_files
from told import NEW, PROMPTS, VOCAB, model, plain, with_drafter

import specjax
from specjax import checkpoints, testing
from specjax.checkpoints import formats, hub, tokenizer
from specjax.checkpoints.formats import model as model_format
from specjax.drafters import draft_model
from specjax.testing import sliding


def itself(target, k: int, **settings):
    """The target as its own drafter."""
    meta = target.meta
    cfg = draft_model.Config(
        family=meta.family, model=meta.target_cfg, vocab_size=meta.target_cfg.vocab_size, k=k, **settings
    )
    return with_drafter(target, "draft_model", cfg, target.target)


def all_right(stats, k: int):
    for s in stats:
        assert s.accepted == s.proposed > 0
        assert s.rounds == -(-(NEW - 1) // (k + 1))


@pytest.mark.parametrize("k", [1, 4])
def test_the_target_for_itself(k):
    """GRD.5: every draft is right, k + 1 tokens per round, in ragged rows; also after a fully accepted round, whose
    last draft was never fed."""
    out = specjax.decode(itself(model(), k), PROMPTS[:3], max_new_tokens=NEW, rows=3)
    assert out.tokens == plain()[:3]
    all_right(out.stats, k)


@functools.cache
def warm():
    """A target whose draws at temperature 1 are spread out."""
    return testing.tiny_params(1, layers=1, vocab=VOCAB, max_positions=1024, sharpness=2.0)


@pytest.mark.parametrize("rule", ["reject", "block"])
def test_the_target_for_itself_sampled(rule):
    """DST.2, DST.5: what is drawn from p itself is kept, at every temperature; greedy rows beside."""
    call = {"temperature": [1.0, 0.0, 0.6], "seed": 4, "rule": rule, "max_new_tokens": NEW, "rows": 3}
    out = specjax.decode(itself(warm(), 4), PROMPTS[:3], **call)
    all_right(out.stats, 4)


def test_arg_max_drafts():
    """DST.1: no probabilities, so rule "auto" is "match" and ids are those of plain decoding."""
    call = {"temperature": 1.0, "seed": 4, "max_new_tokens": NEW, "rows": 3}
    out = specjax.decode(itself(warm(), 3, drafting="greedy"), PROMPTS[:3], **call)
    assert out.tokens == specjax.decode(warm(), PROMPTS[:3], **call).tokens
    assert 0 < out.total.accepted < out.total.proposed


def test_a_model_with_windows():
    """KVR.1, KVR.2: ring caches of the drafter take rejections and wrap; every draft stays right."""
    target = testing.sliding_params((5, 3), vocab=VOCAB)
    expected = specjax.decode(target, PROMPTS[:3], max_new_tokens=NEW, rows=3)
    known = list(zip(PROMPTS[:3], expected.tokens, strict=True))
    modes = ["EVERY_THIRD_WRONG", "ALWAYS_WRONG", "OWN"]
    out = specjax.decode(
        testing.corrupted(itself(target, 3), known, modes), PROMPTS[:3], max_new_tokens=NEW, rows=3
    )
    assert out.tokens == expected.tokens
    all_right(out.stats[2:], 3)


def test_a_model_that_cannot_go_back(monkeypatch):
    """KVR.5."""
    monkeypatch.setattr(sliding, "min_resume", lambda cfg, high_water: high_water)
    settings = {"family": "specjax.testing.sliding", "model": testing.sliding_params().meta.target_cfg}
    with pytest.raises(ValueError, match="cannot take back rejected drafts"):
        draft_model.config(settings, settings["model"])


def test_the_end_of_the_drafters_context():
    """CTX.2: it falls silent there, and decoding goes on."""
    params = itself(model(), 3)
    cfg = dataclasses.replace(
        params.meta.drafter_cfg, model=dataclasses.replace(model().meta.target_cfg, max_positions=16)
    )
    out = specjax.decode(
        with_drafter(model(), "draft_model", cfg, model().target), PROMPTS[2], max_new_tokens=NEW
    )
    assert out.tokens == plain()[2]
    assert out.stats.proposed_at == (
        3,
        3,
        3,
    )  # at lengths 4, 8 and 12; 13 is the last that leaves room for three
    assert out.stats.accepted == 9


# ---------------------------------------------------------------- vocabularies


def of_vocab(vocab: int, seed: int = 3):
    return testing.tiny_params(seed, layers=1, vocab=vocab, max_positions=1024)


@pytest.mark.parametrize("size", [VOCAB - 7, VOCAB + 9])
def test_other_padding(size):
    """VOC.3: ids that one of the two lacks are neither proposed nor looked up; q has the target's columns."""
    small = of_vocab(size)
    settings = {"family": "llama", "model": small.meta.target_cfg, "compared": True, "k": 3}
    cfg = draft_model.config(settings, model().meta.target_cfg)
    params = with_drafter(model(), "draft_model", cfg, small.target)
    assert max(PROMPTS[4]) >= VOCAB - 7
    if size < VOCAB:
        assert specjax.decode(params, PROMPTS[2:5], max_new_tokens=NEW, rows=3).tokens == plain()[2:5]
    state = specjax.start(params, PROMPTS[2:5], temperature=2.0, seed=0)
    proposal, _ = jax.jit(specjax.draft_step)(params, state)
    assert proposal.q.shape == (3, 3, VOCAB)
    np.testing.assert_allclose(proposal.q.sum(-1), 1, rtol=1e-5)
    assert not proposal.q[..., min(size, VOCAB) :].any()
    assert proposal.tokens.max() < min(size, VOCAB)


def test_sizes_that_were_not_compared():
    """VOC.4: naming both."""
    settings = {"family": "llama", "model": of_vocab(VOCAB + 1).meta.target_cfg}
    with pytest.raises(ValueError, match=f"has {VOCAB + 1} token ids, the target {VOCAB}; different sizes"):
        draft_model.config(settings, model().meta.target_cfg)
    for bad in ({"k": 0}, {"drafting": "hot"}, {"taps": 1}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            draft_model.config(settings | {"compared": True} | bad, model().meta.target_cfg)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Models of several vocabulary sizes with the same tokenizer of 265 ids, one without, and a GGUF."""
    root, tok = tmp_path_factory.mktemp("models"), tiny_files.small_tokenizer()
    for name, vocab in (("target", 272), ("padded", 288), ("small", 265), ("bare", 288)):
        hf = tiny_files.config(vocab_size=vocab, num_hidden_layers=1)
        tiny_files.folder(root / name, hf, tiny_files.tensors(hf))
        if name != "bare":
            tok.save_pretrained(root / name)
    hf = tiny_files.config(vocab_size=288, num_hidden_layers=1)
    tiny_files.gguf_file(root / "x.gguf", hf, tiny_files.tensors(hf), tokenizer=tiny_files.vocabulary())
    return root


def test_tokenizers_decide(folders, monkeypatch):
    """VOC.3, VOC.4, VOC.5: same tokens with other padding may draft; other tokens, or no way to tell, may not."""
    for name in ("padded", "small", "x.gguf"):
        cfg = specjax.load(folders / "target", drafter=folders / name).meta.drafter_cfg
        assert cfg.common == min(272, cfg.model.vocab_size)
    with pytest.raises(ValueError, match="288 token ids, the target 272; different sizes"):
        specjax.load(folders / "target", drafter=folders / "bare")
    monkeypatch.setattr(tokenizer, "conflict", lambda a, b: "id 7 is 'x' in one, 'y' in the other")
    with pytest.raises(ValueError, match=r"its tokenizer is not the target's, .*: id 7 is 'x'"):
        specjax.load(folders / "target", drafter=folders / "padded")


class Words:
    def __init__(self, *words):
        self.words = words

    def ordinary(self):
        return {i: w for i, w in enumerate(self.words) if w}


@pytest.mark.parametrize(
    ("one", "other", "why"),
    [
        (["a", "b", "c"], ["a", "b", "c"], None),
        (["a", "b", "c"], ["a", "b"], None),
        (["a", None, "c"], ["a", "b", "c", "d"], None),
        (["a", "b"], ["b", "a"], "id 0 is 'a' in one, 'b' in the other"),
        ([None, "b"], ["a", None], "no id in common"),
    ],
)
def test_ordinary_tokens_are_compared(one, other, why, monkeypatch):
    """VOC.5: special tokens (None here) and ids of only one may differ."""
    monkeypatch.setattr(tokenizer, "get", lambda name: Words(*{"one": one, "other": other}[name]))
    found = tokenizer.conflict("one", "other")
    assert found is None if why is None else why in found
    assert tokenizer.conflict("one", "one") is None


def test_real_tokenizers_have_ordinary_tokens(folders):
    words = tokenizer.get(tokenizer.in_folder(folders / "small")).ordinary()
    again = tokenizer.get(str(folders / "x.gguf")).ordinary()
    assert len(words.items() & again.items()) > 250
    assert tokenizer.conflict(tokenizer.in_folder(folders / "small"), str(folders / "x.gguf")) is None
    assert tokenizer.get("bytes").ordinary()[65] == "<0x41>"
    assert "in one" in tokenizer.conflict("bytes", str(folders / "x.gguf"))


# ---------------------------------------------------------------- files


def test_what_counts_as_a_draft_model():
    """CKP.3: a learned drafter of unknown make is none."""
    plain_model = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 3}
    assert model_format.matches(plain_model)
    assert model_format.matches({"model_type": "qwen3"})
    for marks in (
        {"model_type": "mamba"},
        {"architectures": ["LlamaForCausalLMEagle9"]},
        {"architectures": ["LlamaEagleForCausalLM"]},
        {"architectures": ["MedusaModel"]},
        {"draft_vocab_size": 3},
        {"dflash_config": {}},
        {"target_layer_ids": [1]},
        {"speculators_model_type": "new"},
    ):
        assert not model_format.matches(plain_model | marks)


def test_a_config_that_lacks_something(folders):
    files = formats.Files("here", {"model_type": "llama"}, {}, {}.get, model().meta.target_cfg)
    with pytest.raises(ValueError, match="here: the config lacks"):
        formats.detect(files)


def test_memory_before_loading(folders):
    """PRF.5: shapes of drafter weights without reading them; its cache follows its own layers and heads."""
    shapes = specjax.load(folders / "target", drafter=folders / "padded", shapes_only=True)
    assert isinstance(shapes.drafter.embed, jax.ShapeDtypeStruct)
    told = specjax.explain(shapes, [[1] * 8])
    cfg = shapes.meta.drafter_cfg
    slots = told.program.slots
    cache = (
        2
        * cfg.model.num_layers
        * cfg.model.kv_heads
        * cfg.model.head_dim
        * slots
        * jnp.dtype(told.program.dtype).itemsize
    )
    assert cache <= told.drafter_state_bytes <= cache + 4 * (cfg.k + 2)


@pytest.mark.real
@pytest.mark.long
def test_a_real_model_for_itself():
    """GRD.5."""
    params = specjax.load("smollm2-135m", drafter="smollm2-135m", dtype="float32", drafter_config={"k": 3})
    source = hub.resolve("smollm2-135m")
    assert (
        params.meta.tokenizer_id == checkpoints.load_target(source, "float32", shapes_only=True).tokenizer_id
    )
    out = specjax.decode(params, "Name three colours.", max_new_tokens=24)
    assert out.stats.acceptance_rate == 1.0
