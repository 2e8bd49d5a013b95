"""What compiles, when, and how often the host reads: counted."""

import contextlib
import itertools

import clock
import jax
import numpy as np
import pytest
from jax import monitoring
from tiny_models import OPTIONS, PROMPTS, greedy, ngram_params, target, told, uncompiled, with_meta

import specjax
from specjax.core import loop, programs

#: The class of every jax array.
ARRAY = type(jax.numpy.zeros(()))

HOT = {"temperature": 1.5, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "logit_bias": {75: 1.0}}


@contextlib.contextmanager
def compilations():
    """Everything XLA compiles meanwhile, the small programs of single operations included."""
    seen = []

    def note(event, seconds, **more):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(more.get("fun_name", event))

    monitoring.register_event_duration_secs_listener(note)
    try:
        yield seen
    finally:
        monitoring.unregister_event_duration_listener(note)


def test_the_counter_counts():
    with compilations() as seen:
        jax.jit(lambda x: x * 3 + 2)(np.arange(7.0))
    assert seen


SAME_PROGRAM = {
    "the same call": {},
    "shorter prompt": {"prompt": PROMPTS[1]},
    "longest prompt of the bucket": {"prompt": list(range(40, 56))},
    "seed": {"seed": 2**40},
    "temperature": {"temperature": 0.3},
    "filters": {"top_k": 5, "top_p": 0.5, "min_p": 0.2},
    "bias": {"logit_bias": {75: -2.0, 79: 1.0, 21: float("-inf")}},
    "stop ids": {"stop": [1, 2, 3, 4, 5, 6, 7]},
    "a stop that is hit": {"stop": list(range(60, 67))},
    "no stop at all": {"ignore_eos": True},
    "budget": {"max_new_tokens": 7},
    "largest budget of the bucket": {"max_new_tokens": 64 - len(PROMPTS[2])},
    "budget 1": {"max_new_tokens": 1},
    "rounds per chunk": {"rounds": 3},
    "max_len": {"max_len": 55},
    "stop string": {"stop": "hell"},
    "text": {"prompt": "a", "chat_template": False},
}


@pytest.fixture(scope="module")
def warm():
    """One row and several, with and without a stop string: nothing more may compile after."""
    for params in (target(), told()):
        for prompt in (PROMPTS[0], PROMPTS[:3]):
            text = specjax.decode(params, prompt, **OPTIONS, **HOT).text
            stop = text[5:7] if isinstance(text, str) else text[0][5:7]
            specjax.decode(params, prompt, stop=stop, **OPTIONS, **HOT)


@pytest.mark.parametrize("change", SAME_PROGRAM.values(), ids=SAME_PROGRAM)
@pytest.mark.parametrize("params", [target, told], ids=["plain", "drafted"])
def test_values_compile_nothing(warm, params, change):
    """PRF.3, PRF.4, KVR.6: nothing at all compiles for values, lengths and acceptance within a bucket."""
    options = OPTIONS | HOT | change
    prompt = options.pop("prompt", PROMPTS[0])
    with compilations() as seen:
        one = specjax.decode(params(), prompt, **options)
        list(specjax.stream(params(), prompt, **options))
        many = specjax.decode(params(), [prompt, *PROMPTS[1:3]], **options)
    assert not seen
    assert one.stats.compile_seconds == many.total.compile_seconds == 0.0


def test_acceptance_compiles_nothing(warm):
    """PRF.3: drafts that are all right, all wrong, or of any number."""
    with compilations() as seen:
        for mode in ("ALWAYS_RIGHT", "ALWAYS_WRONG", "RANDOM_COUNT"):
            specjax.decode(told(mode), PROMPTS[0], **OPTIONS, **HOT)
    assert not [name for name in seen if name not in ("zeros", "broadcast_in_dim")]


def test_the_first_call_compiles_everything(monkeypatch):
    """PRF.4: prefill, rounds and all; the second call nothing, and the figures keep compilation apart."""
    params = uncompiled(told(), 2)
    clock.slow_compiler(monkeypatch)
    before = programs.compile_count()
    first = specjax.decode(params, PROMPTS[0], **OPTIONS)
    compiled = programs.compile_count() - before
    assert compiled == 3  # the empty state, the prefill, the chunk of rounds
    second = specjax.decode(params, PROMPTS[0], **OPTIONS)
    assert programs.compile_count() == before + compiled
    assert first.tokens == second.tokens
    a, b = first.stats, second.stats
    assert a.compile_seconds > 3 * clock.HOUR
    assert b.compile_seconds == 0
    assert a.prefill_seconds + a.decode_seconds < clock.HOUR
    assert a.tokens_per_second == 40 / (a.prefill_seconds + a.decode_seconds)


def test_a_session_of_typical_calls_needs_few_programs():
    """At most twelve: prompts of several lengths, budgets, seeds, streams, stops and a conversation."""
    params = uncompiled(with_meta(ngram_params(), eos_ids=(2,)), 3)
    before = programs.compile_count()
    for prompt in (PROMPTS[0], PROMPTS[2], "hello", list(range(40, 60))):
        specjax.decode(params, prompt, max_new_tokens=30)
        list(specjax.stream(params, prompt, max_new_tokens=12, stop="hello"))
    for seed in range(3):
        specjax.decode(params, PROMPTS[0], max_new_tokens=30, temperature=0.7 + seed, seed=seed)
    talk = specjax.chat(params, max_new_tokens=8)
    for text in ("a", "b", "c"):
        talk.send(text)
    used = programs.compile_count() - before
    assert used <= 12, used


@pytest.mark.parametrize("params", [target, told], ids=["plain", "drafted"])
@pytest.mark.parametrize("rounds", [1, 4, 16])
def test_at_most_one_read_per_chunk(params, rounds, monkeypatch):
    """Every device-to-host transfer is the read of a chunk, and none waits for the newest one."""
    params, log = params(), []
    specjax.decode(params, PROMPTS[:3], **OPTIONS)
    # a chunk runs in another thread; what is asked of this one just before is to have it compiled
    for name, method in (("prefill", "prefill"), ("chunk", "compile_rounds")):
        real = getattr(programs.Engine, method)

        def counted(self, *args, name=name, real=real):
            log.append(name)
            return real(self, *args)

        monkeypatch.setattr(programs.Engine, method, counted)

    real_value, reading = ARRAY._value, []

    def device_get(tree, real=jax.device_get):
        log.append("read")
        reading.append(1)
        out = real(tree)
        reading.pop()
        return out

    def value(array):  # int(), bool(), item() and the like
        if not reading:
            log.append("hidden read" if log else "before the first prefill")
        return real_value.fget(array)

    monkeypatch.setattr(ARRAY, "_value", property(value))
    monkeypatch.setattr(loop.jax, "device_get", device_get)
    out = specjax.decode(params, PROMPTS[:3], rounds=rounds, **OPTIONS)
    monkeypatch.undo()
    assert out.tokens == [greedy(p, 40)[0] for p in PROMPTS[:3]]
    log = [event for event in log if event != "before the first prefill"]
    assert log[:4] == ["prefill", "read", "chunk", "chunk"]
    assert "hidden read" not in log
    assert log.count("prefill") == 1
    assert log.count("read") <= 1 + log.count("chunk")
    # the device is a chunk ahead: the next chunk is under way before one is read
    assert all(after == "chunk" for event, after in itertools.pairwise(log) if event == "read")


def test_refill_reads_no_more(monkeypatch):
    """Rows that are refilled are read with the next chunk."""
    reads, chunks = [], []
    real_chunk, real_get = programs.Engine.chunk, jax.device_get
    specjax.decode(told(), PROMPTS, rows=2, **OPTIONS)
    monkeypatch.setattr(programs.Engine, "chunk", lambda *a: chunks.append(1) or real_chunk(*a))
    monkeypatch.setattr(loop.jax, "device_get", lambda tree: reads.append(1) or real_get(tree))
    specjax.decode(told(), PROMPTS, rows=2, rounds=2, **OPTIONS)
    assert len(reads) <= 1 + len(chunks)
