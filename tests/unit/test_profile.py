"""Where the time of a round goes: the parts, the trace, the picture, and that nothing else changes by looking."""

import json
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from tiny_models import PROMPTS, told
from typer.testing import CliRunner

import specjax
from specjax import cli, profiling, profiling_kernels, profiling_trace, profiling_view
from specjax.core import programs
from specjax.metrics import Stats
from specjax.profiling_parts import PARTS, Parts

OPTIONS = {"max_new_tokens": 40, "logprobs": True, "verbose": False}


def known(**changes) -> profiling.Profile:
    """A profile with figures that can be checked by hand."""
    fields = {
        "target": "<small>", "drafter": "eagle3", "device": "cpu", "dtype": "float32", "rows": 1, "k": 4, "rounds": 10,
        "widths": {1: 2, 5: 8},
        "parts": {"draft": 0.002, "verify": 0.004, "accept": 0.001, "commit": 0.0, "inject": 0.0},
        "round": 0.008, "host": 0.002, "plain": 0.004, "plain_host": 0.001, "compile_seconds": 1.0,
        "stats": Stats.from_rounds([(4, 2, 3)] * 10), "scopes": {"draft": 0.0021, "verify": 0.0045, "other": 0.0009},
    }  # fmt: skip
    return profiling.Profile(**fields | changes)


def test_figures():
    """PRF.7: draft, verify and the rest of a round beside a plain step explain the speed that tau alone does not."""
    one = known()
    assert one.rest == pytest.approx(0.001)
    assert one.cost == pytest.approx(2.0)
    assert one.expected == pytest.approx(3.0 / 2.0)
    assert one.measured == pytest.approx(3.0 * 0.005 / 0.010)
    alone = known(plain=None, plain_host=None)
    assert (alone.cost, alone.expected, alone.measured) == (None, None, None)
    assert json.loads(json.dumps(one.as_dict()))["rest"] == pytest.approx(0.001)
    told_ = str(one)
    for figure in (
        "2 of 1, 8 of 5",
        "draft           2 ms   20%       2.1",
        "R = 2.00 plain steps of 4 ms",
        "= 1.50",
    ):
        assert figure in told_, told_
    assert "accept" in told_
    assert "commit" not in told_  # parts that a drafter does not have are not told
    assert "&lt;small&gt;" in one._repr_html_()
    assert "tau 3.00" in str(alone)


def test_picture(tmp_path):
    known().plot(tmp_path / "round.png")
    assert (tmp_path / "round.png").read_bytes()[:4] == b"\x89PNG"
    known(plain=None, plain_host=None, stats=Stats()).plot(tmp_path / "plain.svg")
    with pytest.raises(ValueError, match=r"suffix must be .*png"):
        profiling_view.drawable("round.txt")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        profiling_view.drawable(tmp_path / "nowhere" / "round.png")


HLO = """HloModule jit_chunk, is_scheduled=true
%body {
  %fusion.1 = f32[4]{0} fusion(%a, %q), kind=kLoop, metadata={op_name="jit(chunk)/while/body/draft/mul" stack_frame_id=1}
  %dot-2 = f32[4,4]{1,0} dot(%a, %b), metadata={op_name="jit(chunk)/while/body/verify/draft/dot_general"}
  %a = bf16[8,4]{1,0} parameter(0)
  %q = f32[8]{0} parameter(1)
  %pair = (f32[4]{0}, s8[2]{0}) sort(%a, %q), metadata={op_name="jit(chunk)/while/body/inject/sort"}
  %custom-call.5 = f32[4]{0} custom-call(%a), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(chunk)/while/body/verify/skinny/pallas_call"}
  %custom-call.6 = f32[4]{0} custom-call(%a), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(chunk)/while/body/draft/skinny/pallas_call"}
  ROOT %copy.3 = f32[4]{0} copy(%a)
}
  %while.4 = (s32[], f32[4]{0}) while(%t), condition=%c, body=%body, metadata={op_name="jit(chunk)/while"}
"""  # noqa: E501


def test_operations_of_a_program():
    """Their bytes and scopes; what holds others or moves nothing is none."""
    found = profiling_kernels.Operations(HLO).by_name
    scopes = {name: profiling_trace.scope(one.path) for name, one in found.items()}
    assert scopes == {
        "fusion.1": "draft", "dot-2": "verify", "pair": "inject", "copy.3": "other", "custom-call.5": "verify",
        "custom-call.6": "draft",
    }  # fmt: skip
    assert found["pair"].bytes == 18 + 64 + 32
    assert found["custom-call.5"].kernel == "skinny"


def planes(**lines):
    """A trace: by line of the device, or of the host for "host", events (name, operation or None, seconds)."""

    def event(name, operation, seconds, module="jit_chunk"):
        stats = {"other": 1, "hlo_op": operation, "hlo_module": module}
        stats = [(key, value) for key, value in stats.items() if value is not None]
        return SimpleNamespace(name=name, stats=stats, duration_ns=1e9 * seconds)

    line = lambda name: SimpleNamespace(name=name, events=[event(*x) for x in lines[name]])  # noqa: E731
    place = lambda name: "/host:CPU" if name == "host" else "/device:GPU:0"  # noqa: E731
    return [SimpleNamespace(name=place(name), lines=[line(name)]) for name in lines]


def test_kernels_are_told_by_any_name():
    """By what XLA notes; in command buffers by the kernel's own name, also where "_" stands for "." and "-", or a
    number follows; libraries' kernels are others. Derived lines, other programs and holders do not count."""
    operations = profiling_kernels.Operations(HLO)
    scoped = lambda trace: profiling_kernels.by_scope(  # noqa: E731
        profiling_kernels.events(trace), operations, profiling_trace.scope, profiling_trace.OTHER
    )
    host = [("x", "fusion.1", 1.0), ("x", "while.4", 9.0), ("x", "elsewhere", 9.0), ("x", None, 9.0)]
    assert scoped(planes(host=host)) == {"draft": 1.0}
    noted = [("fusion_7", "fusion.1", 1.0), ("nvjet", "dot-2", 2.0), ("skinny", "custom-call.5", 0.5)]
    device = {"Stream #1(Compute)": noted, "XLA Ops": noted, "host": host}
    assert scoped(planes(**device)) == {"draft": 1.0, "verify": 2.5}
    buffered = [
        ("fusion_1", "command_buffer_3", 1.0), ("dot_2", None, 2.0), ("skinny_1", "command_buffer_3", 0.5),
        ("nvjet", "command_buffer_3", 4.0), ("MemcpyD2D", None, 8.0, None), ("fusion_1", None, 16.0, "jit_else"),
    ]  # fmt: skip
    trace = planes(**{"Stream #1": buffered})
    assert scoped(trace) == {"draft": 1.25, "verify": 2.25, "other": 12.0}
    rows = profiling_kernels.rows(profiling_kernels.events(trace), operations, profiling_trace.scope, 2)
    assert [(x["kernel"], x["scope"], x["calls"]) for x in rows] == [
        ("MemcpyD2D", None, 0.5), ("nvjet", None, 0.5), ("dot", "verify", 0.5), ("fusion", "draft", 0.5),
        ("skinny", None, 0.5),
    ]  # fmt: skip
    assert rows[2]["bytes_per_second"] == (64 + 64) / 2
    assert "fusion" in profiling_kernels.table(rows, 1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repeats": 0}, "repeats must be"),
        ({"stop": "hell"}, "stop ids only"),
        ({"max_new_tokens": 1}, "max_new_tokens of 2 or more"),
        ({"k": "auto"}, "pass a number as k"),
        ({"k": 0}, "k must be at least 1"),
        ({"rows": 1, "n": 2}, "do not fit into rows=1"),
    ],
    ids=str,
)
def test_refused(options, message):
    """Before anything compiles."""
    before = programs.compile_count()
    with pytest.raises(ValueError, match=message):
        specjax.profile(told(), PROMPTS[0], **options)
    assert programs.compile_count() == before


@pytest.mark.long
def test_profile(tmp_path):
    """PRF.2, PRF.4, PRF.7: every part is there and takes time, programs name them for traces, and decoding is none the
    wiser: the same ids, and not one program more."""
    params, prompt = told(), PROMPTS[0]
    before = specjax.decode(params, prompt, **OPTIONS)
    specjax.decode(params, [prompt], **OPTIONS)
    found = specjax.profile(params, prompt, trace=tmp_path / "trace", repeats=1, **OPTIONS)
    assert found.rounds == before.stats.rounds == sum(found.widths.values())
    assert found.stats.tau == before.stats.tau
    assert set(found.parts) == set(PARTS)
    assert all(seconds >= 0 for seconds in found.parts.values())
    assert found.parts["verify"] > 0
    assert found.round > 0
    assert found.plain
    assert len(profiling_trace.files(tmp_path / "trace")) == 1
    assert set(found.scopes) <= {*PARTS, "other"}
    call = profiling._checked(params, prompt, 1, OPTIONS)
    engine = call.engines()[0]
    state = jax.eval_shape(lambda: profiling.host_state(call.program, call.jobs))
    state = jax.eval_shape(lambda h: programs.fill_caches(call.program, h), state)
    named = profiling_kernels.Operations(engine.compile_traced(state).as_text()).by_name.values()
    assert {"draft", "verify", "accept", "commit"} <= {profiling_trace.scope(one.path) for one in named}
    compiled = programs.compile_count()
    again = specjax.decode(params, prompt, **OPTIONS)
    assert (again.tokens, again.logprobs) == (before.tokens, before.logprobs)
    specjax.profile(params, prompt, repeats=1, plain=False, **OPTIONS)
    assert programs.compile_count() == compiled


@pytest.mark.long
@pytest.mark.parametrize("method", ["eagle3", "dspark"])
def test_parts_of_a_method(method):
    """Parts that are run again and again leave what they work on alone: the same drafts, the same verdict."""
    from specjax import testing

    params = testing.tiny_drafter(testing.tiny_params(layers=2), method)
    prompt, options = [5, 6, 7, 5, 6, 7], {"max_new_tokens": 8}
    whole = profiling._Whole(params, prompt, options, profiling._checked(params, prompt, 1, options), 1)
    width = max(whole.widths) - 1
    parts = Parts(whole.engine.program, whole.engine.weights, whole.state(), width)
    verdict = jax.device_get(parts.verdict)
    timers = parts.timers()
    assert all(timer() >= 0 for timer in timers.values())
    assert set(timers) == set(PARTS)
    assert (verdict.emitted == jax.device_get(parts.verdict).emitted).all()


@pytest.mark.long
def test_command(tmp_path, monkeypatch):
    monkeypatch.setitem(specjax.__dict__, "load", lambda *args, **options: told())
    picture = tmp_path / "round.png"
    result = CliRunner().invoke(
        cli.app,
        ["profile", "small", "hello", "--max-new-tokens", "40", "--chat-template", "false",
         "--repeats", "1", "--no-plain", "--trace", str(tmp_path / "trace"), "--plot", str(picture), "--json"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["k"] == 4
    assert picture.is_file()
    assert profiling_trace.files(Path(tmp_path / "trace"))
    wrong = CliRunner().invoke(cli.app, ["profile", "small", "a", "--plot", "round.txt"])
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    assert "its suffix must be" in wrong.stderr
