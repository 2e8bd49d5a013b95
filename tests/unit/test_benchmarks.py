"""Benchmarks of step times: what they count and promise, and that they run at a tiny size."""

import dataclasses
import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from specjax import registry
from specjax.checkpoints.tree import is_spec

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def steps():
    """Modules of benchmarks/, which is no package."""
    paths = [str(ROOT / "benchmarks"), str(ROOT)]
    sys.path[:0] = paths
    try:
        names = ("shapes", "model", "run")
        found = {name: importlib.import_module(f"steps_{name}") for name in names}
        yield SimpleNamespace(
            **found, predicted=importlib.import_module("predicted"), plots=importlib.import_module("plots")
        )
    finally:
        for path in paths:
            sys.path.remove(path)


def shapes_of(abstract):
    shape = lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype or jnp.bfloat16))  # noqa: E731
    return jax.tree.map(shape, abstract, is_leaf=is_spec)


def test_bytes_of_real_shapes(steps):
    """An 8B model reads 15.14 GB per step; of a mixture, what every token reads and one expert per layer."""
    for shape, dense, experts in [
        ("qwen3-8b", 15.14e9, 0),
        ("gemma-4-31b", 61.4e9, 0),
        ("gemma-4-26b-a4b", 4.77e9, 0.357e9),
        ("qwen3.6-35b-a3b", 3.9e9, 0.252e9),
    ]:
        hf = steps.shapes.SHAPES[shape]
        module = registry.target(hf["model_type"])
        found = steps.model._target(shapes_of(module.abstract(module.config(hf))))
        assert found == pytest.approx((dense, experts), rel=0.02), shape


def test_ideal_round_costs(steps):
    """By bytes alone, as they follow from an 8B model's sizes."""
    target = steps.run.Target(
        "qwen3-8b", steps.shapes.SHAPES["qwen3-8b"], jnp.dtype("bfloat16"), shapes_only=True
    )
    total = {}
    for text in ("plain", "c8", "dflash-7", "eagle3-3", "mtp-3", "mtp32k-3"):
        contender = steps.run.Contender(target, steps.shapes.method(text), 1, 1024)
        total[text] = steps.model.round_bytes(contender, None).total
    ideal = {"c8": 1.0, "dflash-7": 1.22, "eagle3-3": 1.15, "mtp-3": 1.33, "mtp32k-3": 1.14}
    assert {name: total[name] / total["plain"] for name in ideal} == pytest.approx(ideal, abs=0.02)


def test_every_method_has_a_drafter_of_its_size(steps):
    """Where the target has one at all: about the published number of weights."""
    weights = {}
    for shape, hf in steps.shapes.SHAPES.items():
        cfg = registry.target(hf["model_type"]).config(hf)
        for text in (
            "dflash-7",
            "dflash-15",
            "dspark-7",
            "eagle3-3",
            "mtp-3",
            "mtp32k-3",
            "assistant-5",
            "ngram-7",
        ):
            how = steps.shapes.method(text)
            if (how.name == "assistant") != ("gemma" in shape) and how.name == "assistant":
                with pytest.raises(ValueError, match="belong to Gemma"):
                    steps.shapes.drafter(how, cfg)
                continue
            name, made = steps.shapes.drafter(how, cfg)
            assert made.k == how.k
            specs = registry.drafter(name).abstract(made)
            weights[shape, text] = sum(x.size for x in jax.tree.leaves(shapes_of(specs)))
    assert weights["qwen3-8b", "dflash-7"] == pytest.approx(1.05e9, rel=0.05)
    assert weights["qwen3-8b", "ngram-7"] == 0
    assert weights["qwen3-8b", "eagle3-3"] == pytest.approx(0.41e9, rel=0.1)


def row(shape="qwen3-8b", method="plain", k=0, batch=1, context=1024, ms=4.0, **more):
    name = {"plain": "plain", "c": f"c{k + 1}"}.get(method, f"{method}-{k}")
    key = f"{shape}/b{batch}/{context}/{name}"
    base = {
        "key": key,
        "shape": shape,
        "method": method,
        "k": k,
        "batch": batch,
        "context": context,
        "ms": ms,
    }
    return base | {"plain_ms": 4.0, "R": ms / 4.0, "model_ms": 3.6} | more


def test_limits_are_told_as_held_or_missed(steps):
    for given, verdicts in [
        (row(host_ms=0.2), ["held", "missed (to be explained)"]),
        (row(ms=4.3), ["MISSED"]),
        (row(method="c", k=7, ms=4.2), ["held"]),
        (row(method="dflash", k=15, ms=5.5), ["MISSED"]),
        (row(method="eagle3", k=3, ms=4.7), ["held"]),
        (row(method="mtp32k", k=3, ms=5.0), ["missed (to be explained)"]),
        (row(batch=8, ms=3.9), ["held"]),
        (row(shape="llama-3.1-8b"), []),
        (row(shape="smollm2-135m", method="ngram", k=7, host_ms=0.05), ["held"]),
    ]:
        said = [str(x) for x in steps.model.limits(given)]
        assert all(x.startswith(verdict + " ") for x, verdict in zip(said, verdicts, strict=True)), said


def test_predictions(steps, tmp_path):
    """Dense rows get a ratio, mixtures a table of R without a claim, what was not measured says so."""
    distinct = [{"tokens": 1, "experts": 8.0, "ms": 4.0}, {"tokens": 8, "experts": 50.0, "ms": 8.0}]
    moe = "qwen3.6-35b-a3b"
    report = {
        "device": "a device", "commit": "abc", "options": {"dtype": "bfloat16"},
        "results": [
            row(method="dspark", k=7, ms=5.2), row(shape=moe, method="dflash", k=7, ms=9.0),
            row(shape=moe, method="c", k=7, ms=8.0, by_distinct=distinct), {"key": "broken", "error": "no"},
        ],
    }  # fmt: skip
    found = {(x["target"], x["method"]): x for x in steps.predicted.table(report)}
    dense = found["Qwen3-8B", "DSpark"]
    assert dense["predicted"] == pytest.approx(4.92 / 1.3)
    assert dense["verdict"] == "ahead"
    assert dense["R_to_undercut"] == pytest.approx(3.0, rel=0.02)
    mixed = found["Qwen3.6-35B-A3B", "DFlash"]
    assert (mixed["predicted"], mixed["by_experts"]) == (None, [(1, 8.0, 1.25), (8, 50.0, 2.25)])
    assert "larger than one device" in found["Kimi-K2.5", "DFlash"]["verdict"]
    page = steps.predicted.markdown(list(found.values()), report)
    assert "| 8 | 50.0 | 2.25 |" in page
    assert "| Kimi-K2.5 | DFlash, GSM8K, 7 | 2.37 |" in page
    (tmp_path / "x.json").write_text(json.dumps({"results": []}))
    with pytest.raises(ValueError, match="holds neither"):
        steps.plots.draw(tmp_path / "x.json")


def test_acceptance_is_forced_by_the_benchmark_alone(steps):
    """The profile's mean, and no option of a call that leads there."""
    assert steps.run.forced_tau(7) == pytest.approx(4.92)
    assert len(steps.run.survival(20)) == 20
    from specjax.calls import OPTIONS
    from specjax.core import round as rnd

    assert not hasattr(rnd.accept, "real")
    assert not any("force" in name for name in OPTIONS)
    assert not [f.name for f in dataclasses.fields(rnd.State) if "force" in f.name]


def run(*words, ok=(0,)):
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT, timeout=1800)
    assert done.returncode in ok, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.long
def test_steps_run_and_are_continued(tmp_path):
    """PRF.7: plain, given drafts on a mixture by distinct experts, a drafter; a second run measures nothing again."""
    out = tmp_path / "steps.json"
    words = [
        "benchmarks/steps.py",
        "--tiny",
        "--shapes",
        "qwen3.6-35b-a3b",
        "--methods",
        "c4,dflash-3",
        "--contexts",
    ]
    words += ["64", "--repeats", "1", "--profile", "dflash-3", "--out", str(out)]
    run(*words)
    rows = {x["key"].rsplit("/", 1)[1]: x for x in json.loads(out.read_text())["results"]}
    assert set(rows) == {"plain", "c4", "dflash-3"}
    assert rows["plain"]["R"] == 1
    assert all(x["ms"] > 0 and x["model_ms"] > 0 and "host_ms" in x for x in rows.values())
    assert rows["dflash-3"]["draft_ms"] > 0
    assert rows["dflash-3"]["kernels"]
    assert rows["dflash-3"]["tau_seen"] == pytest.approx(3.37, abs=0.6)  # as the profile says
    assert rows["plain"]["tau_seen"] == 1
    hit = [x["experts"] for x in rows["c4"]["by_distinct"]]
    assert hit == sorted(hit)
    assert 2 <= hit[0] < hit[-1] <= 8
    before = out.read_text()
    assert "weights are made" not in run(*words)
    assert json.loads(out.read_text())["results"] == json.loads(before)["results"]
    run("benchmarks/plots.py", str(out))
    run("benchmarks/predicted.py", str(out))
    assert {x.name for x in tmp_path.iterdir()} >= {
        "steps_qwen3.6-35b-a3b.png", "experts_hit.png", "predicted.md"
    }  # fmt: skip


@pytest.mark.long
def test_peers_count_the_same_tokens(tmp_path):
    out = tmp_path / "peers.json"
    words = [
        "benchmarks/peers/decode.py",
        "--tiny",
        "--sides",
        "specjax,transformers static,dflash package,flashspec",
    ]
    run(*words, "--out", str(out))
    rows = {x["side"]: x for x in json.loads(out.read_text())["results"]["sides"]}
    assert {"specjax plain", "specjax dflash-3", "transformers static compiled"} <= set(rows)
    assert all(x["tokens"] == x["same_as_plain"] == [9] for x in rows.values())
