"""Out of device memory: an error that says what needed how much and what would fit, and a process that goes on."""

import os
import re
import subprocess
import sys

import jax
import pytest

import specjax
from specjax import calls, memory
from specjax.core.programs import Engine
from specjax.testing import tiny_params

SAID = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592 bytes."


@pytest.fixture
def full(monkeypatch):
    """A device whose memory ends during the call, of a size that is given: None = it does not say."""

    def set_to(size):
        def fails(self, host):
            raise jax.errors.JaxRuntimeError(SAID)

        monkeypatch.setattr(memory, "capacity", lambda weights: size)
        monkeypatch.setattr(Engine, "init", fails)

    return set_to


def test_what_would_fit(full, monkeypatch):
    """Fewer rows, a shorter buffer, both, or why neither. What is advised does fit."""
    monkeypatch.setattr(memory, "transients", lambda program, *_: program.rows << 17)  # another test traces
    params, prompts = tiny_params(), [[1, 2, 3]] * 8
    options = {"max_new_tokens": 4, "max_len": 256}
    call = calls.plan(params, prompts, **options)
    whole = memory.needs(call)
    of = lambda rows: memory.needs(call, rows, transient=whole.transient).total  # noqa: E731
    for size, advice in [
        (whole.total - 1000, r"What would fit: rows=4, or max_len=\d+ "),
        (of(2), r"What would fit: rows=2 "),
        (of(1) - 1, r"What would fit: rows=1 with max_len=\d+ "),
        (whole.weights + 1, "Not even one row of this length fits"),
        (whole.weights, "The weights alone do not fit"),
        (whole.total * 2, "something else holds memory"),
        (None, "Try rows=4 or max_len=128 "),
    ]:
        full(size)
        with pytest.raises(memory.OutOfMemoryError, match=advice) as raised:
            specjax.decode(params, prompts, **options)
        said = str(raised.value)
        assert "rows=8 of max_len=256 need about" in said
        assert "8589934592" in said
        assert raised.value.needs == whole
        assert raised.value.__context__ is None  # nothing holds the arrays of the call that failed
        if size and (found := re.search(r"fit: .*max_len=(\d+)", said)):
            rows = 1 if "rows=1 with" in said else 8
            assert memory.needs(call, rows, int(found[1]), whole.transient).total <= size


def test_a_buffer_far_longer_than_asked_for(full, monkeypatch):
    """Down to what prompt and new tokens need, with the arrays that each length takes beside the state; shorter than
    a sixteenth of what was given, too, and never a length that a program would round up."""
    monkeypatch.setattr(
        memory, "transients", lambda program, *_: program.slots * 512
    )  # scores of a prefill, about
    params, options = tiny_params(max_positions=1 << 30), {"max_new_tokens": 4, "rows": 1, "max_len": 1 << 30}
    call = calls.plan(params, [1, 2, 3], **options)
    least = memory.needs(call, tokens=64).total
    for size in (105 << 30, 1 << 30, least):
        full(size)
        with pytest.raises(memory.OutOfMemoryError, match=r"What would fit: max_len=\d+ ") as raised:
            specjax.decode(params, [1, 2, 3], **options)
        advised = int(re.findall(r"max_len=(\d+)", str(raised.value))[-1])
        assert calls.plan(params, [1, 2, 3], **options | {"max_len": advised}).program.tokens == advised
        assert size / 3 < memory.needs(call, tokens=advised).total <= size
    assert advised == 64
    full(least - 1)
    with pytest.raises(
        memory.OutOfMemoryError, match="Not even one row of this length fits, nor one of max_len=64"
    ):
        specjax.decode(params, [1, 2, 3], **options)


def test_every_call_tells_and_goes_on(full, monkeypatch):
    """stream and start as well; another error passes as it is, and the next call works."""
    params = tiny_params()
    want = specjax.decode(params, [1, 2, 3], max_new_tokens=4).tokens

    def failing(text):
        def fails(self, host):
            raise jax.errors.JaxRuntimeError(text)

        return fails

    with monkeypatch.context() as patched:
        patched.setattr(Engine, "init", failing(SAID))
        with pytest.raises(MemoryError, match="rows=1"):
            list(specjax.stream(params, [1, 2, 3], max_new_tokens=4))
        with pytest.raises(MemoryError, match="rows=1"):
            specjax.start(params, [1, 2, 3], max_new_tokens=4)
        patched.setattr(Engine, "init", failing("INTERNAL: x"))
        with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL: x"):
            specjax.decode(params, [1, 2, 3], max_new_tokens=4)
    assert specjax.decode(params, [1, 2, 3], max_new_tokens=4).tokens == want


def test_weights_that_do_not_fit(monkeypatch):
    monkeypatch.setattr(memory, "capacity", lambda weights: 2 << 30)

    def fails():
        with memory.loading("big", lambda: 16 << 30):
            raise jax.errors.JaxRuntimeError(SAID)

    with pytest.raises(
        MemoryError, match=r"loading big: its weights take 16\.0 GiB, the device has 2\.0 GiB"
    ):
        fails()


@pytest.mark.gpu
def test_on_the_device():
    """A cache of more than any device has; what is advised then fits, and the process decodes as before."""
    params = tiny_params(max_positions=1 << 30)
    ask = lambda **o: specjax.decode(params, [1, 2, 3], max_new_tokens=4, rows=1, **o).tokens  # noqa: E731
    want = ask()
    with pytest.raises(MemoryError, match="What would fit: max_len=") as raised:
        ask(max_len=1 << 30)
    advised = int(re.findall(r"max_len=(\d+)", str(raised.value))[-1])
    assert ask(max_len=advised // 2) == want
    assert ask() == want


_SCRIPT = """
import resource
import specjax
from specjax.memory import OutOfMemoryError
from specjax.testing import tiny_params
params = tiny_params(max_positions=1 << 30)
ask = lambda **o: specjax.decode(params, [1, 2, 3], max_new_tokens=4, rows=1, **o).tokens
want = ask()
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (4 << 30), -1))
for _ in range(2):
    try:
        ask(max_len=1 << 26)
        raise SystemExit("there was room")
    except OutOfMemoryError as error:
        print(error)
assert ask() == want
"""


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits address space as Linux does")
def test_a_real_limit():
    """An allocator that says no: the error is told, and afterwards the same process decodes as before."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "SPECJAX_CACHE": "off"}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, env=env, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("rows=1 of max_len=67108864 need about") == 2
    assert "GiB" in done.stdout
