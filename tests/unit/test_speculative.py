"""vLLM's speculative config: every key is taken or refused by name, and the page lists them all."""

import json
from pathlib import Path

import pytest

import specjax
from specjax import speculative
from specjax.speculative import Speculative, read

ROOT = Path(__file__).parents[2]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


def test_what_is_taken():
    """PEER.9: vLLM's keys in our terms; null and values that say nothing new count as not given."""
    assert read({}) == Speculative()
    given = {
        "method": "eagle3",
        "model": "owner/drafter",
        "revision": "main",
        "num_speculative_tokens": 5,
        "draft_sample_method": "probabilistic",
        "rejection_sample_method": "block",
        "quantization": None,
        "enforce_eager": False,
        "draft_tensor_parallel_size": 1,
    }
    assert read(given) == Speculative("eagle3", "owner/drafter", "main", 5, "probabilistic", "block")
    assert read({"rejection_sample_method": "standard"}).rule == "auto"
    assert read({"prompt_lookup_max": 4, "match": "recent"}).lookup == {
        "prompt_lookup_max": 4,
        "match": "recent",
    }


def test_dict_text_and_file_are_the_same(tmp_path):
    file = tmp_path / "speculative.json"
    file.write_text(json.dumps(NGRAM))
    assert read(NGRAM) == read(json.dumps(NGRAM)) == read(file) == read(str(file))


@pytest.mark.parametrize(
    ("given", "method"),
    [
        ({"method": "ngram_gpu"}, "ngram"),
        ({"model": "[ngram]"}, "ngram"),
        ({"method": "ngram", "model": "ngram"}, "ngram"),
        ({"method": "deepseek_mtp"}, "mtp"),
        ({"method": "qwen3_next_mtp"}, "mtp"),
        ({"method": "custom_class", "model": "package.module"}, "package.module"),
    ],
)
def test_other_names_of_methods(given, method):
    assert (read(given).method, read(given).model) == (method, None)


@pytest.mark.parametrize("key", speculative.REFUSED)
def test_refused_keys_say_why(key):
    """OPT.3: by name, with the reason; values that mean "as it is" pass."""
    harmless, reason = speculative.REFUSED[key]
    with pytest.raises(ValueError, match=f"{key}='x' is not supported: ") as caught:
        read(NGRAM | {key: "x"})
    assert reason in str(caught.value)
    for value in harmless:
        assert read(NGRAM | {key: value}) == read(NGRAM)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lookup": 3}, r"does not know the option\(s\) \['lookup'\]; known: .*prompt_lookup_max"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be at least 1, got 0"),
        ({"num_speculative_tokens": 2.5}, "num_speculative_tokens must be an integer, got 2.5"),
        ({"draft_sample_method": "gumbel"}, "must be one of greedy, probabilistic, got 'gumbel'"),
        ({"rejection_sample_method": "strict"}, "must be one of standard, block, got 'strict'"),
        (
            {"rejection_sample_method": "synthetic"},
            "'synthetic' is not supported: it emits drafts at a made-up rate",
        ),
        ({"rejection_sample_method": "fly"}, "'fly' is not supported: it is lossy"),
        ({"method": "suffix"}, "'suffix' is not supported: .*'ngram'"),
        ({"method": "eagle"}, "'eagle' is not supported: .*'eagle3'"),
        ({"method": "custom_class"}, "needs the module's name as 'model'"),
        ({"revision": 3}, "revision must be a text, got 3"),
    ],
)
def test_bad_values(given, message):
    with pytest.raises(ValueError, match=message):
        read(given)


def test_the_rule_belongs_to_the_params():
    """The config's rule holds where a call names none, and survives as part of the params."""
    params = specjax.load("tiny", speculative_config=NGRAM | {"rejection_sample_method": "block"})
    assert params.meta.rule == "block"
    assert "rule block" in str(specjax.explain(params, [1, 2], temperature=1.0))
    assert "rule match" in str(specjax.explain(params, [1, 2], temperature=1.0, rule="match"))
    assert "rule auto" in str(specjax.explain(params, [1, 2], rule="auto"))
    assert specjax.load("tiny", speculative_config=NGRAM).meta.rule == "auto"


def test_the_page_lists_every_key():
    """One table of what is taken, one of what is refused."""
    page = (ROOT / "docs" / "speculative-config.md").read_text("utf-8")
    assert not [key for key in (*speculative.TAKEN, *speculative.REFUSED) if f"`{key}`" not in page]
    assert not [
        name for name in (*speculative.REFUSED_METHODS, *speculative.ALIASES) if f"`{name}`" not in page
    ]
