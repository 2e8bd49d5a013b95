"""Command line against a stand-in for the library, then for real on the toy model."""

import dataclasses
import inspect
import json
import os
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import specjax
from specjax import cli, cli_options, demo as demo_module


@dataclasses.dataclass
class FakeStats:
    rounds: int = 2
    proposed: int = 4
    accepted: int = 3
    emitted: int = 5
    new_tokens: int = 6
    tau: float = 2.5
    accepted_per_position: tuple = (1.0, 0.5)
    prefill_seconds: float = 0.1
    decode_seconds: float = 0.2
    compile_seconds: float = 1.0
    tokens_per_second: float = 25.0
    acceptance_rate: float = float("nan")

    @property
    def mean_acceptance_length(self):
        return 2.5


@dataclasses.dataclass
class FakePiece:
    text: str
    tokens: list
    finish_reason: str | None = None
    stats: FakeStats = dataclasses.field(default_factory=FakeStats)


@dataclasses.dataclass
class FakeResult:
    text: object = "blue sky"
    tokens: object = (1, 2)
    finish_reason: object = "stop"
    logprobs: object = None
    stats: object = dataclasses.field(default_factory=FakeStats)


class FakeApi:
    """Records calls; ``fail`` is raised after ``fail_after`` pieces."""

    def __init__(self):
        self.calls = []
        self.fail, self.fail_after = None, 0

    def load(self, target, **keywords):
        self.calls.append(("load", target, keywords))
        if self.fail and self.fail_after < 0:
            raise self.fail
        return "params"

    def decode(self, params, prompt, **options):
        self.calls.append(("decode", prompt, options))
        if self.fail:
            return FakeResult(text="blue ", finish_reason="interrupted")
        return FakeResult(text=["one", "two"]) if options.get("n") == 2 else FakeResult(logprobs=[-0.5])

    def stream(self, params, prompt, **options):
        self.calls.append(("stream", prompt, options))
        for i, piece in enumerate([FakePiece("blue ", [1]), FakePiece("sky", [2], "stop")]):
            if self.fail and i == self.fail_after:
                raise self.fail
            yield piece

    def chat(self, params, system=None, **options):
        self.calls.append(("chat", system, options))
        api = self

        class Talk:
            def stream(self, text):
                yield from api.stream(params, text)

        return Talk()


@pytest.fixture
def api(monkeypatch):
    fake = FakeApi()
    for name in ("load", "decode", "stream", "chat"):
        monkeypatch.setitem(specjax.__dict__, name, getattr(fake, name))
    return fake


def run(*arguments, stdin=None):
    return CliRunner().invoke(cli.app, [str(a) for a in arguments], input=stdin)


def test_only_the_text_on_standard_output(api):
    result = run("generate", "toy", "why?")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "blue sky\n", "")
    assert api.calls == [("load", "toy", {}), ("stream", "why?", {})]


def test_prompt_from_standard_input(api):
    assert run("generate", "toy", stdin="from a pipe").exit_code == 0
    assert api.calls[-1][1] == "from a pipe"


def test_every_option_arrives_under_its_own_name(api):
    """DST.7: on the command line; what is not given is not passed on, so there is no default of its own."""
    result = run(
        "generate", "toy", "why?", "--drafter", "ngram", "--dtype", "float32", "-sc", '{"method": "ngram"}',
        "--drafter-config", '{"k": 2}',
        "--max-new-tokens", 7, "--k", 3, "--temperature", 0.5, "--top-k", 4, "--top-p", 0.9, "--min-p", 0.1,
        "--repetition-penalty", 1.1, "--presence-penalty", 0.2, "--frequency-penalty", 0.3,
        "--logit-bias", "42=-3.5", "--logit-bias", "7=1", "--seed", 9, "--n", 1, "--stop", "END", "--stop", "id:5",
        "--ignore-eos", "--rule", "match", "--rows", 2, "--max-len", 99, "--loop", "host",
        "--chat-template", "false", "--chat-template-kwargs", '{"enable_thinking": false}', "--verbose",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert api.calls[0][2] == {
        "drafter": "ngram", "dtype": "float32", "speculative_config": '{"method": "ngram"}',
        "drafter_config": {"k": 2}, "verbose": True,
    }  # fmt: skip
    assert api.calls[1][2] == {
        "max_new_tokens": 7, "k": 3, "temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1,
        "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3,
        "logit_bias": {42: -3.5, 7: 1.0}, "seed": 9, "n": 1, "stop": ["END", 5], "ignore_eos": True,
        "rule": "match", "rows": 2, "max_len": 99, "loop": "host", "chat_template": False,
        "chat_template_kwargs": {"enable_thinking": False}, "verbose": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    "arguments", [["--drafter", "ngram", "--drafter", "some/folder"], ["--drafter", "ngram,some/folder"]]
)
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_several_drafters_are_a_chain(api, command, arguments):
    result = run(command, "toy", *arguments, "--drafter-config", '[null, {"k": 2}]', stdin="why?")
    assert result.exit_code == 0, result.output
    assert api.calls[0][2] == {"drafter": ("ngram", "some/folder"), "drafter_config": [None, {"k": 2}]}


def test_temperature_model_and_template_file(api, tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages }}")
    run("generate", "toy", "x", "--temperature", "model", "--chat-template", file)
    assert api.calls[-1][2] == {"temperature": "model", "chat_template": "{{ messages }}"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--temperature", "warm"], "--temperature takes a number or 'model'"),
        (["--logit-bias", "x"], "--logit-bias takes ID=BIAS"),
        (["--chat-template", "no/such/file"], "neither a template nor a file"),
        (["--chat-template-kwargs", "[1]"], "takes a JSON object"),
        (["--chat-template-kwargs", "{"], "not valid JSON"),
        (["--drafter-config", "3"], "--drafter-config takes a JSON object or list, got '3'"),
    ],
)
def test_bad_values_stop_before_loading(api, arguments, words):
    result = run("generate", "toy", "x", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stdout == ""
    assert not api.calls


def test_unknown_option_is_refused(api):
    result = run("generate", "toy", "x", "--temprature", "1")
    assert result.exit_code == 2
    assert "temprature" in result.stderr


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no such model 'toy'"), "error: no such model 'toy'\n"),
        (FileNotFoundError("folder is gone"), "error: folder is gone\n"),
        (KeyError("x"), "error: KeyError: 'x'\nrun again with --verbose for the traceback\n"),
    ],
)
def test_errors_are_one_clear_message(api, error, text):
    api.fail, api.fail_after = error, -1
    result = run("generate", "toy", "x")
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", text)


def test_traceback_with_verbose_only(api):
    api.fail, api.fail_after = ValueError("broken"), -1
    result = run("generate", "toy", "x", "--verbose")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert "error: broken" in result.stderr


def test_interrupt_keeps_the_text(api):
    api.fail, api.fail_after = KeyboardInterrupt(), 1
    result = run("generate", "toy", "x")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "blue \n", "")


def test_interrupt_keeps_the_json(api):
    api.fail, api.fail_after = KeyboardInterrupt(), 1
    result = run("generate", "toy", "x", "--json")
    record = json.loads(result.stdout)
    assert (result.exit_code, record["text"], record["finish_reason"]) == (130, "blue ", "interrupted")


def test_json_output(api):
    record = json.loads(run("generate", "toy", "x", "--json").stdout)
    assert (record["text"], record["tokens"], record["finish_reason"]) == ("blue sky", [1, 2], "stop")
    assert record["logprobs"] == [-0.5]
    assert record["stats"]["tau"] == 2.5
    assert record["stats"]["mean_acceptance_length"] == 2.5
    assert record["stats"]["acceptance_rate"] is None  # NaN is not JSON


def test_logprobs_and_samples_come_from_decode(api):
    assert json.loads(run("generate", "toy", "x", "--json", "--logprobs").stdout)["logprobs"] == [-0.5]
    assert run("generate", "toy", "x", "-n", 2).stdout == "one\n---\ntwo\n"
    assert [call[0] for call in api.calls] == ["load", "decode"] * 2


def test_chat_answers_every_line(api):
    result = run("chat", "toy", "--system", "be brief", "--seed", 3, stdin="hello\n\nagain\n")
    assert (result.exit_code, result.stdout) == (0, "blue sky\nblue sky\n")
    assert api.calls[1] == ("chat", "be brief", {"seed": 3})
    assert [call[1] for call in api.calls[2:]] == ["hello", "again"]


def test_chat_interrupt_keeps_the_text(api):
    api.fail, api.fail_after = KeyboardInterrupt(), 1
    result = run("chat", "toy", stdin="hello\n")
    assert (result.exit_code, result.stdout) == (130, "blue \n")


OPTIONS = [
    "max_new_tokens",
    "k",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "n",
    "stop",
    "ignore_eos",
    "rule",
    "rows",
    "max_len",
    "logprobs",
    "loop",
    "chat_template",
    "chat_template_kwargs",
    "verbose",
    "drafter",
    "dtype",
    "speculative_config",
    "drafter_config",
]


def test_options_have_the_python_names():
    assert set(OPTIONS) <= set(inspect.signature(cli.generate).parameters)
    text = run("generate", "--help").stdout
    assert not [name for name in OPTIONS if f"--{name.replace('_', '-')}" not in text]


def test_json_values():
    import numpy as np

    assert cli_options.printable({1: (np.float32(1.5), [np.int32(2)], float("inf"))}) == {
        "1": [1.5, [2], None]
    }


def test_doctor_prints_and_reports(monkeypatch):
    assert "compilation cache" in run("doctor").stdout
    assert json.loads(run("doctor", "--json").stdout)["backend"] == "cpu"
    report = dataclasses.replace(specjax.doctor(), problems=("plugin does not match",))
    monkeypatch.setitem(specjax.__dict__, "doctor", lambda: report)
    assert run("doctor").exit_code == 1


def test_version():
    assert run("--version").stdout.strip() == specjax.__version__


def test_help_names_every_command():
    text = run("--help").stdout
    assert all(name in text for name in ("generate", "chat", "demo", "doctor"))
    assert "demo" in sys.modules[demo_module.__name__].__doc__


def specjax_command(*arguments, **env):
    command = [sys.executable, "-m", "specjax.cli", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=os.environ | env, **pipes)


@pytest.mark.long
@pytest.mark.real
def test_real_model_end_to_end(tmp_path):
    def generate(prompt, budget, *more):
        arguments = (
            "generate",
            "smollm2-135m",
            prompt,
            "--max-new-tokens",
            budget,
            "--max-len",
            "1024",
            *more,
        )
        return specjax_command(*arguments, SPECJAX_CACHE=str(tmp_path))

    plain = generate("Count from one to five.", "12")
    text, noise = plain.communicate(timeout=1200)
    assert (plain.returncode, noise) == (0, "")
    drafted = generate("Count from one to five.", "12", "--drafter", "ngram", "--json")
    record = json.loads(drafted.communicate(timeout=1200)[0])
    assert record["text"] == text.rstrip("\n")
    assert record["finish_reason"] in ("stop", "length")
    assert record["stats"]["seed"] == 0
    interrupted = generate("Tell a story.", "900", "--ignore-eos")
    first = interrupted.stdout.read(20)  # decoding has begun
    interrupted.send_signal(signal.SIGINT)
    rest, noise = interrupted.communicate(timeout=1200)
    assert (interrupted.returncode, noise) == (130, "")
    assert first.strip()
    assert rest.endswith("\n")


def test_real_errors_exit_with_two():
    failed = specjax_command("generate", "no-such-model", "x")
    text, noise = failed.communicate(timeout=1200)
    assert (failed.returncode, text) == (2, "")
    assert noise.startswith("error: unknown model 'no-such-model'")
    assert "Traceback" not in noise


def test_real_prompt_checks_come_before_compiling():
    failed = specjax_command("generate", "tiny", "")
    assert failed.communicate(timeout=1200)[1].startswith("error: prompt 0 is an empty string")
    assert failed.returncode == 2
