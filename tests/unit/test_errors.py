"""Bad input: refused before anything compiles, in words that name what was given and what would do."""

import json

import numpy as np
import pytest
from tiny_models import CONTEXT, OPTIONS, PROMPTS, target, told, with_meta

import specjax
from specjax.core import programs

NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def compiles_nothing():
    """Every refusal comes before the compiler."""
    before = programs.compile_count()
    yield
    assert programs.compile_count() == before


def refuses(message, call, kind=ValueError):
    with pytest.raises(kind, match=message):
        call()


# --- options

BAD_OPTIONS = [
    ("max_new_tokens", -1, "max_new_tokens must be at least 0, got -1"),
    ("max_new_tokens", 2.0, "max_new_tokens must be an integer, got 2.0"),
    ("max_new_tokens", True, "max_new_tokens must be an integer, got True"),
    (
        "max_new_tokens",
        CONTEXT,
        rf"prompt \(6 tokens\) \+ max_new_tokens \({CONTEXT}\) exceeds .* at most 122",
    ),
    ("max_new_tokens", 10**12, "10{12}.* at most 122"),
    ("max_new_tokens", [1, 2], r"max_new_tokens has 2 values for 1 prompt\(s\)"),
    ("temperature", NAN, "temperature must be a finite number, got nan"),
    ("temperature", -0.1, r"temperature must be in \[0.0, inf\], got -0.1"),
    ("temperature", INF, "temperature .*inf"),
    ("temperature", 1e39, r"temperature .*1e\+39"),
    ("temperature", np.float32(NAN), "temperature .*nan"),
    ("temperature", "warm", "temperature must be a number or 'model', got 'warm'"),
    ("temperature", ["model"], "temperature .*'model'"),
    ("top_k", -1, "top_k must be at least 0, got -1"),
    ("top_k", 2.5, "top_k must be an integer, got 2.5"),
    ("top_k", 2**31, "top_k must be at most 2147483647, got 2147483648"),
    ("top_p", 0.0, r"top_p must be in \(0.0, 1.0\], got 0.0"),
    ("top_p", 1.1, "top_p .*got 1.1"),
    ("top_p", NAN, "top_p .*got nan"),
    ("top_p", 1e-50, "top_p .*got 1e-50"),
    ("min_p", -0.5, "min_p .*got -0.5"),
    ("min_p", 1.5, "min_p .*got 1.5"),
    ("repetition_penalty", 0, r"repetition_penalty must be in \(0.0, inf\], got 0"),
    ("repetition_penalty", INF, "repetition_penalty .*inf"),
    ("presence_penalty", NAN, "presence_penalty .*nan"),
    ("presence_penalty", -1e39, r"presence_penalty .*-1e\+39"),
    ("frequency_penalty", "high", "frequency_penalty .*'high'"),
    ("logit_bias", {265: 1.0}, r"logit_bias names token 265, outside the vocabulary \[0, 265\)"),
    ("logit_bias", {"a": 1.0}, "logit_bias names token 'a'"),
    ("logit_bias", {True: 1.0}, "logit_bias names token True"),
    ("logit_bias", {5: NAN}, "logit_bias of token 5 .*got nan"),
    ("logit_bias", {5: INF}, "logit_bias of token 5 .*got inf"),
    ("logit_bias", {5: "x"}, "logit_bias of token 5 .*got 'x'"),
    ("logit_bias", 7, "logit_bias must map token ids to numbers, got 7"),
    ("logit_bias", dict.fromkeys(range(265), -INF), "logit_bias forbids every token"),
    ("seed", -1, "seed must be at least 0, got -1"),
    ("seed", 0.5, "seed must be an integer, got 0.5"),
    ("seed", None, "seed must be an integer, got None"),
    ("n", 0, "n must be at least 1, got 0"),
    ("n", 1.5, "n must be an integer, got 1.5"),
    ("rows", 0, "rows must be at least 1, got 0"),
    ("max_len", 10, r"max_len=10 is less than the longest prompt \+ max_new_tokens \(46\)"),
    ("stop", 265, r"stop id 265 is outside the vocabulary \[0, 265\)"),
    ("stop", [5, -1], "stop id -1"),
    ("stop", np.array([300]), "stop id 300"),
    ("stop", 5.0, "stop takes token ids and strings, got 5.0"),
    ("stop", [True], "stop takes token ids and strings, got True"),
    ("stop", b"END", "stop takes token ids and strings, got b'END'"),
    ("stop", ["END", ""], "a stop string must be a non-empty string, got ''"),
    ("ignore_eos", "yes", "ignore_eos must be True or False, got 'yes'"),
    ("logprobs", 5, "logprobs must be True or False, got 5"),
    ("rule", "greedy", "rule must be 'auto', 'match', 'reject' or 'block', got 'greedy'"),
    ("loop", "gpu", "loop must be 'device' or 'host', got 'gpu'"),
    ("prefill_chunk", 24, "prefill_chunk must be a power of two, got 24"),
    ("rounds", 0, "rounds must be at least 1, got 0"),
    ("rounds", 17, "rounds=17 is more than one device call records; at most 16"),
    ("k", 0, "k must be at least 1, got 0"),
    ("k", -3, "k must be at least 1, got -3"),
    ("k", 2.0, "k must be an integer, got 2.0"),
    ("k", 500, f"k=500 drafts do not fit the model's context of {CONTEXT}"),
    ("chat_template", 3, "chat_template must be a template, True or False, got 3"),
    ("chat_template", "", "chat_template .*got ''"),
    ("chat_template_kwargs", [1], r"chat_template_kwargs must be a dict, got \[1\]"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD_OPTIONS, ids=lambda v: str(v)[:24])
def test_bad_options(name, value, message):
    """CTX.1, STP.6, OPT.3: through every entry point."""
    options = OPTIONS | {name: value}
    for entry in (specjax.decode, specjax.stream, specjax.explain, specjax.audit):
        refuses(message, lambda entry=entry: entry(told(), PROMPTS[0], **options))
    if (name, value) != ("seed", None):  # start reads it as "no key"
        refuses(message, lambda: specjax.start(told(), PROMPTS[0], **{"seed": 0} | options))


@pytest.mark.parametrize("entry", ["decode", "stream", "audit", "explain", "start"])
def test_unknown_options(entry):
    """OPT.3, OPT.5, PEER.9: an option that does not exist is never ignored (logits processors of one's own are
    refused); the message names it and the known ones."""
    call = getattr(specjax, entry)
    wanted = "unknown option 'temprature'; did you mean 'temperature'.*max_new_tokens.*verbose"
    refuses(wanted, lambda: call(told(), PROMPTS[0], temprature=0.5), TypeError)
    wanted = "unknown option 'logits_processor'; .*known: "
    refuses(wanted, lambda: call(told(), "a", logits_processor=print), TypeError)


def test_k_without_a_drafter():
    """MET.6: a width for nothing is an error, not a silent plain run."""
    refuses("k=3 was given, but params have no drafter", lambda: specjax.decode(target(), [1], k=3))
    refuses("no drafter", lambda: specjax.audit(target(), [1]))


def test_things_that_are_no_params():
    refuses("params must come from specjax.load, got list", lambda: specjax.decode([1, 2], target()))
    refuses("params must come from specjax.load, got str", lambda: specjax.decode("hello", "there"))


def test_text_without_a_tokenizer():
    """The messages say what to pass instead."""
    bare = with_meta(target(), tokenizer_id="", chat_template=None)
    refuses("without a tokenizer: pass token ids", lambda: specjax.decode(bare, "hello"))
    refuses("no chat template", lambda: specjax.decode(bare, [{"role": "user", "content": "hello"}]))
    refuses("stop strings need a tokenizer", lambda: specjax.decode(bare, [1], stop="END"))


def test_templates_that_fail():
    user = [{"role": "user", "content": "hello"}]
    refuses("chat messages need a chat template", lambda: specjax.decode(target(), user, chat_template=False))
    refuses("chat template failed: unexpected", lambda: specjax.decode(target(), "a", chat_template="{% for"))
    strict = "{{ raise_exception('roles must alternate') }}"
    refuses(
        "chat template failed: roles must alt", lambda: specjax.decode(target(), user, chat_template=strict)
    )
    for name in ("template", "tokenize"):
        kwargs = {name: 1}
        refuses(name, lambda kwargs=kwargs: specjax.decode(target(), "a", chat_template_kwargs=kwargs))


def test_prompts_longer_than_the_context():
    """CTX.1: alone and in a batch."""
    refuses(
        f"prompt has {CONTEXT + 1} tokens; .*{CONTEXT}", lambda: specjax.decode(target(), [5] * (CONTEXT + 1))
    )
    refuses("at most 0", lambda: specjax.decode(target(), [[5], [5] * CONTEXT], max_new_tokens=1))


# --- loading

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
BAD_CONFIGS = [
    (
        "unknown key",
        NGRAM | {"lookup": 3},
        r"does not know the option\(s\) \['lookup'\]; known: .*prompt_lookup_max",
    ),
    ("wrong JSON", '{"method": "ngram"', "speculative_config is not valid JSON"),
    ("no object", "[1]", "neither a JSON object nor a readable file"),
    ("no file", "/no/such/file.json", "no/such/file.json"),
    ("no method", {"num_speculative_tokens": 3}, "names no method"),
    ("nothing", {}, "names no method"),
    ("unknown method", {"method": "medusa"}, "unknown drafter 'medusa'; known: .*ngram"),
    ("method of a wrong type", {"method": 5}, "method must be a name, got int"),
    ("no width", {"method": "ngram"}, "needs num_speculative_tokens"),
    ("width 0", NGRAM | {"num_speculative_tokens": 0}, "num_speculative_tokens .*got 0"),
    (
        "lengths",
        NGRAM | {"prompt_lookup_max": 2, "prompt_lookup_min": 3},
        r"prompt_lookup_min \(3\) is above",
    ),
    ("match", NGRAM | {"match": "best"}, "match must be one of .*got 'best'"),
]


@pytest.mark.parametrize(("given", "message"), [c[1:] for c in BAD_CONFIGS], ids=[c[0] for c in BAD_CONFIGS])
def test_bad_speculative_configs(given, message):
    """PEER.9: as a dict and as JSON text."""
    refuses(message, lambda: specjax.load("tiny", speculative_config=given))
    if isinstance(given, dict):
        refuses(message, lambda: specjax.load("tiny", speculative_config=json.dumps(given)))


BAD_DRAFTERS = {
    "medusa": "unknown drafter 'medusa'; known: .*ngram",
    5: "must be a method name or a module, .*got int",
    "no.such.module": "drafter 'no.such.module' cannot be imported: No module named 'no'",
    "specjax.testing:NOTHING": "'specjax.testing:NOTHING' cannot be imported: .*NOTHING",
    "specjax.testing:ALWAYS_RIGHT": "no default settings: pass them as drafter_config",
}


@pytest.mark.parametrize(("drafter", "message"), BAD_DRAFTERS.items(), ids=map(str, BAD_DRAFTERS))
def test_bad_drafters(drafter, message):
    """MET.6: a drafter that cannot be used is an error."""
    refuses(message, lambda: specjax.load("tiny", drafter=drafter))


def test_conflicting_drafters():
    both = {"drafter": "ngram", "speculative_config": {"method": "eagle3", "num_speculative_tokens": 3}}
    refuses("drafter='ngram' and .*'eagle3' disagree", lambda: specjax.load("tiny", **both))
    same = specjax.load("tiny", drafter="ngram", speculative_config={"num_speculative_tokens": 3})
    assert same.meta.drafter_cfg.k == 3


def test_a_width_too_large_in_the_file():
    """CTX.1: a width from a config is checked like one given."""
    wide = specjax.load("tiny", speculative_config=NGRAM | {"num_speculative_tokens": 600})
    refuses("k=600 drafts do not fit the model's context of 512", lambda: specjax.decode(wide, [1, 2]))


def test_unknown_targets_and_types():
    refuses("unknown model 'tinny'.*smollm2-135m", lambda: specjax.load("tinny"))
    refuses("dtype must be .*got int8", lambda: specjax.load("tiny", dtype="int8"))
    refuses("dtype must be .*got 'fast'", lambda: specjax.load("tiny", dtype="fast"))
