"""The installed package: quick import, lazy names, typing marker, doctor."""

import json
import re
import subprocess
import sys
from importlib import metadata, resources

import pytest

import specjax
from specjax import progress, registry
from specjax.core import doctor as doctor_module, platform

HEAVY = ("transformers", "orbax", "matplotlib", "torch")


def python(code: str, **env: str) -> str:
    """Standard output of a fresh interpreter; a warning or failure fails the test."""
    import os

    full = os.environ | {"JAX_PLATFORMS": "cpu"} | env
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=full, timeout=1200
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return done.stdout


def test_import_is_quick_and_light():
    modules = json.loads(python("import specjax, sys, json; print(json.dumps(sorted(sys.modules)))"))
    assert not [m for m in (*HEAVY, "jax", "numpy") if m in modules]
    assert len(modules) < 200  # it takes 74


def test_doctor_and_types_stay_light():
    code = "import specjax, sys; specjax.doctor(); specjax.Params; print([m for m in %r if m in sys.modules])"
    assert python(code % (HEAVY,)).strip() == "[]"


def test_names_are_listed_and_resolve_lazily():
    assert set(dir(specjax)) == set(specjax.__all__)
    assert {"load", "decode", "stream", "chat", "audit", "explain", "save", "cast"} <= set(specjax.__all__)
    assert {"doctor", "draft_step", "verify_step", "start", "checkpoints", "Params"} <= set(specjax.__all__)
    for name in specjax.__all__:
        assert getattr(specjax, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'decoed'"):
        _ = specjax.decoed


def test_stub_and_table_name_the_same_things():
    source = resources.files("specjax").joinpath("__init__.py").read_text()
    block = source.split("if TYPE_CHECKING:")[1].split("_NAMES")[0]
    missing = [n for n in specjax.__all__ if n != "__version__" and f"{n} as {n}" not in block]
    assert not missing


def test_core_names_no_drafter_and_no_family():
    """What drafts and what is drafted for reach ``core`` through the registry only: not even a comment names one."""
    files = [f for f in resources.files("specjax").joinpath("core").iterdir() if f.name.endswith(".py")]
    paths = {*registry.TARGETS.values(), *registry.DRAFTERS.values()}
    names = {*registry.TARGETS, *registry.DRAFTERS, *(path.rpartition(".")[2] for path in paths)}
    assert len(files) > 5
    for file in files:
        words = set(re.findall(r"[a-z0-9_]+", file.read_text().lower()))
        assert not words & names, file.name
        assert not {w for w in words if w.startswith(("qwen", "llama", "gemma", "deepseek", "eagle"))}, (
            file.name
        )
        assert not re.search(
            r"specjax\.(drafters|targets)|from specjax import .*(drafters|targets)", file.read_text()
        )


def test_version_and_typing_marker():
    assert specjax.__version__ == metadata.version("specjax")
    assert resources.files("specjax").joinpath("py.typed").is_file()


def test_doctor_reports_every_field():
    report = specjax.doctor()
    text = str(report)
    for word in (
        "jaxlib",
        "flax",
        "orbax-checkpoint",
        "transformers",
        "kernels",
        "compilation cache",
        "dtype",
    ):
        assert word in text
    assert report.backend == "cpu"
    assert report.devices
    assert report.devices[0].memory > 0
    assert json.loads(json.dumps(report.to_dict()))["dtype"] == "float32"
    assert all(kernel.reason for kernel in report.kernels)


def test_doctor_names_a_plugin_of_another_release():
    found = doctor_module.problems(
        "rocm", {"jax-rocm7-plugin": "0.10.1.post1", "jax-rocm7-pjrt": "0.10.2"}, "0.10.2"
    )
    assert len(found) == 1
    assert "jax-rocm7-plugin==0.10.2" in found[0]
    assert not doctor_module.problems("rocm", {"jax-rocm7-plugin": "0.10.2.post3"}, "0.10.2")


def test_doctor_names_an_unused_gpu():
    (found,) = doctor_module.problems("cpu", {"jax-cuda12-plugin": "0.10.2"}, "0.10.2")
    assert "runs on the CPU" in found


@pytest.mark.parametrize(
    ("count", "text"), [(None, "memory unknown"), (5, "5 B"), (1536, "1.5 KiB"), (3 << 40, "3072.0 GiB")]
)
def test_sizes_in_words(count, text):
    assert doctor_module.size(count) == text


def test_auto_dtype_gives_a_reason():
    assert platform.default_dtype("cpu").dtype.name == "float32"
    assert platform.default_dtype("cuda").dtype.name == "bfloat16"
    assert "CPU" in platform.default_dtype().reason


def test_command_buffers_are_off_on_rocm_only(monkeypatch):
    monkeypatch.delenv("SPECJAX_COMMAND_BUFFERS", raising=False)
    assert platform.compiler_options("rocm") == {"xla_gpu_enable_command_buffer": ""}
    assert (
        platform.traced_options("cuda")
        == platform.traced_options("rocm")
        == platform.compiler_options("rocm")
    )
    assert platform.traced_options("cpu") == {}
    assert platform.compiler_options("cuda") == platform.compiler_options() == {}
    monkeypatch.setenv("SPECJAX_COMMAND_BUFFERS", "1")
    assert platform.compiler_options("rocm") == {}


CACHE = """
import jax, jax.numpy as jnp
from specjax.core.platform import enable_compilation_cache
{before}
folder = enable_compilation_cache()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.jit(lambda x: jnp.tanh(x @ x))(jnp.ones((8, 8))).block_until_ready()
print(folder, jax.config.jax_compilation_cache_dir, len(list(folder.glob("*-cache"))) if folder else 0)
"""


@pytest.mark.parametrize(
    "before", ["", "jax.jit(lambda x: x + 1)(1).block_until_ready()"], ids=["first", "late"]
)
def test_compilation_cache_is_on_by_default(tmp_path, before):
    for _ in range(2):  # the second process reads what the first wrote, without a word
        folder, used, entries = python(
            CACHE.format(before=before), SPECJAX_CACHE="", XDG_CACHE_HOME=str(tmp_path)
        ).split()
        assert folder == used
        assert folder.startswith(str(tmp_path / "specjax"))
        assert int(entries) > 0


def test_compilation_cache_respects_the_user(tmp_path):
    assert (
        python(CACHE.format(before=""), SPECJAX_CACHE="off", XDG_CACHE_HOME=str(tmp_path)).split()[0]
        == "None"
    )
    mine = str(tmp_path / "mine")
    out = python(CACHE.format(before=""), SPECJAX_CACHE="", JAX_COMPILATION_CACHE_DIR=mine).split()
    assert out[:2] == [mine, mine]
    assert not (tmp_path / "specjax").exists()


def test_compilation_cache_survives_a_folder_it_cannot_make(tmp_path):
    (tmp_path / "file").write_text("")
    out = python(CACHE.format(before=""), SPECJAX_CACHE=str(tmp_path / "file" / "below"))
    assert out.split()[0] == "None"


def test_progress_is_silent_off_a_terminal(capsys):
    with progress.line() as say:
        say("loading")
    assert capsys.readouterr() == ("", "")


def test_progress_lines_when_asked(capsys):
    with progress.line(verbose=True) as say, progress.line() as inner, progress.line(verbose=False) as mute:
        say("outer")
        inner("inner")
        mute("nothing")
    assert capsys.readouterr().err.split() == ["outer", "inner"]


def test_progress_counters_do_not_flood(capsys):
    with progress.line(verbose=True) as say:
        for i in range(100):
            say(f"loading: {i}/100")
        say("compiling")
    assert capsys.readouterr().err.splitlines() == ["loading: 0/100", "compiling"]


def test_progress_of_long_work_off_a_terminal(capsys):
    """One line a second at first, one a minute after twenty minutes."""
    now = 0.0
    say = progress._plain_lines(lambda: now)
    for now in [*range(10), *range(1200, 1500, 10)]:
        say(f"training: at {now}")
    told = [int(text.split()[-1]) for text in capsys.readouterr().err.splitlines()]
    assert told == [*range(10), *range(1200, 1500, 60)]
    with progress.line(logged=True) as say, progress.line(verbose=False) as mute:
        say("training")
        mute("nothing")
    with progress.line(verbose=False, logged=True) as say:
        say("nothing")
    assert capsys.readouterr().err.split() == ["training"]


def test_functions_stay_functions_whatever_is_imported_first():
    code = (
        "import importlib, pkgutil, specjax\n"
        "for m in pkgutil.walk_packages(specjax.__path__, 'specjax.'): importlib.import_module(m.name)\n"
        "print([n for n in specjax.__all__ if n not in ('checkpoints', 'train', 'zoo', '__version__')"
        " and not callable(getattr(specjax, n))])"
    )
    assert python(code).strip() == "[]"
