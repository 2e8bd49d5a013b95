"""Memory of a call told by configs alone: folders that hold nothing but ``config.json``."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import assistant_tiny
import block_tiny
import eagle3_tiny
import families
import gemma_drafter_reference
import jax
import jax.numpy as jnp
import mtp_files
import published
import pytest
import tiny_files
from block_tiny import BLOCK, SPECULATORS, ZLAB
from published import DRAFTERS, TARGETS
from typer.testing import CliRunner

import specjax
from specjax import attach, cli, config, estimate, registry, testing
from specjax.core import recurrent
from specjax.drafters import markov
from specjax.drafters.dflash_config import Convolution, Selection

pytestmark = pytest.mark.filterwarnings("ignore:drafter .*:UserWarning")
PROMPTS, OPTIONS = [[0] * 1000] * 4, {"max_new_tokens": 500, "verbose": False}


@pytest.fixture(autouse=True)
def quick(request, monkeypatch):
    """Temporaries are estimated by tracing, which takes models of this size many seconds where types are checked;
    tests/unit/test_estimate_methods.py is about them."""
    if "whole" not in request.node.name:
        monkeypatch.setattr(estimate, "transients", lambda *_: 1)


def folder(path: Path, hf: dict[str, Any]) -> Path:
    """A folder with a config and nothing else."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(hf))
    return path


def parameters(tree: Any) -> int:
    leaves = jax.tree.leaves(tree)
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
    return sum(math.prod(x.shape) for x in leaves)


def load(target: Path, drafter: Any = None, **options: Any):
    return specjax.load(target, drafter=drafter, shapes_only=True, dtype="bfloat16", verbose=False, **options)


@pytest.mark.parametrize("name", TARGETS)
def test_every_family(tmp_path, name):
    """PRF.5: as many parameters as published, and a memory estimate, without weights or tokenizer."""
    hf, billions = TARGETS[name]
    params = load(folder(tmp_path / "target", hf))
    count = parameters(params.target)
    assert count / 1e9 == pytest.approx(billions, rel=0.03)
    told = specjax.explain(params, PROMPTS, **OPTIONS)
    assert told.target_bytes == pytest.approx(2 * count, rel=1e-3)  # a few arrays are float32 always
    assert told.total_bytes > told.target_bytes + told.cache_bytes > told.target_bytes


PAIRS = [(name, drafter) for name, drafters in DRAFTERS.items() for drafter in drafters]


def _label(x: Any) -> str:
    if isinstance(x, str):
        return x
    return str(x.get("speculators_model_type") or (x.get("architectures") or [x["model_type"]])[0])


@pytest.mark.parametrize(("name", "drafter"), PAIRS, ids=[f"{n}, {_label(d)}" for n, d in PAIRS])
def test_every_drafter(tmp_path, name, drafter):
    """PRF.5: so with drafters: their own weights and state, before any is there."""
    target = folder(tmp_path / "target", TARGETS[name][0])
    alone = specjax.explain(load(target), PROMPTS, **OPTIONS)
    params = load(target, drafter if isinstance(drafter, str) else folder(tmp_path / "drafter", drafter))
    told = specjax.explain(params, PROMPTS, **OPTIONS)
    assert told.target_bytes == alone.target_bytes
    if drafter == "ngram":
        assert told.drafter_bytes == told.drafter_state_bytes == 0
        return
    assert parameters(params.drafter) > 5e7
    assert told.drafter_bytes < alone.target_bytes / 5
    assert 0 < told.drafter_state_bytes < alone.cache_bytes
    assert told.total_bytes > alone.total_bytes + told.drafter_bytes


def test_tapes_of_a_recurrent_target(tmp_path):
    """KVR.5: Qwen3.6-35B-A3B, one row, seven drafts: 64 MB of states and a tape of 4 MB, where a copy of the states per
    verified position would be 515 MB."""
    params = load(folder(tmp_path / "target", TARGETS["Qwen3.6-35B-A3B"][0]))
    module, cfg = registry.target(params.meta.family), params.meta.target_cfg
    cache = jax.eval_shape(lambda: module.init_cache(cfg, 1, 64, 8, jnp.bfloat16))
    position = (
        8192 * 2 + 2 * 32 * 4
    )  # the convolution's input in bfloat16, decay and write strength in float32
    state = 32 * 128 * 128 * 4 + 3 * 8192 * 2
    told = recurrent.held(cache)
    assert told == (30 * state, 30 * 8 * position, 30 * 8 * state)
    assert [round(n / 1e6) for n in told] == [64, 4, 515]


def test_tapes_are_told():
    params = testing.tiny_drafter(testing.tiny_params(hf=families.HYBRID | {"vocab_size": 64}), "ngram", k=3)
    told = specjax.explain(params, [1, 2, 3], max_new_tokens=20)
    states, tape, copies = (f"{n / 2**20:.1f} MiB" for n in told.recurrent)
    assert 0 < told.recurrent.tape < told.cache_bytes
    assert (
        f"recurrent states {states}, tapes to take drafts back {tape} (copies per position: {copies})"
        in str(told)
    )
    assert "recurrent" not in str(specjax.explain(testing.tiny_params(), [1, 2, 3]))


def test_rings_do_not_grow_with_the_text(tmp_path):
    """KVR.1: of a hundred and of ten thousand new tokens, only what layers without a window keep differs."""
    params = load(folder(tmp_path / "target", TARGETS["Gemma 3 270M"][0]))
    cfg, per_token = params.meta.target_cfg, 3072
    short, long = (specjax.explain(params, [1], max_new_tokens=n) for n in (100, 10_000))
    assert (short.program.tokens, long.program.tokens) == (128, 10_240)
    assert long.cache_bytes - short.cache_bytes == per_token * (10_240 - 128)
    position = 2 * cfg.sliding.kv_heads * cfg.sliding.head_dim * 2 + 4
    rings = 15 * (cfg.sliding.window + 1) * position
    for told in (short, long):
        assert told.cache_bytes == per_token * told.program.slots + rings


@pytest.mark.long
def test_the_whole_estimate(tmp_path):
    """PRF.5, PRF.8: temporaries of the real shapes stay within what one layer's attention scores may take."""
    params = load(folder(tmp_path / "target", TARGETS["Qwen3.6-35B-A3B"][0]), "mtp")
    told = specjax.explain(params, [[0] * 1000] * 2, max_new_tokens=500)
    assert 0 < told.transient_bytes < 3 * config.SCORE_BYTES


def test_sizes_of_published_files(tmp_path):
    """Bytes of tensors as published: DSpark for GLM to the byte, for Qwen3 with copies of the target's tables, the
    E2B assistant."""
    glm = folder(tmp_path / "glm", published.GLM_LIKE)
    params = load(glm, folder(tmp_path / "dspark_glm", published.DSPARK_GLM))
    assert 2 * parameters(params.drafter) == 2_499_130_626
    for target, hf, size in (
        (published.QWEN3_4B, published.DSPARK_4B, 2.79e9),
        (published.QWEN3_8B, published.DSPARK_8B, 4.74e9),
    ):
        where = tmp_path / str(size)
        params = load(folder(where / "target", target), folder(where / "drafter", hf))
        tables = 2 * params.meta.target_cfg.vocab_size * params.meta.target_cfg.hidden_size
        assert 2 * (parameters(params.drafter) + tables) == pytest.approx(size, rel=2e-3)
    e2b = folder(tmp_path / "e2b", TARGETS["Gemma 4 E2B"][0])
    params = load(e2b, folder(tmp_path / "assistant", published.assistant("e2b")))
    assert parameters(params.drafter) == pytest.approx(78e6, rel=1e-3)


# ---------------------------------------------------------------- against folders that do hold weights

HEADS = {
    "markov_rank": 6, "markov_head_type": "gated", "enable_confidence_head": True, "confidence_head_with_markov": True,
}  # fmt: skip


def _blocks(where: Path):
    heads = {"confidence": True, "confidence_markov": True}
    spark = block_tiny.params("dspark", markov=markov.Settings(6, "gated", block_tiny.VOCAB), **heads)
    reduced = block_tiny.params(draft_vocab=10, own_head=10)
    both = {"dflash_config": BLOCK | {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 4}}
    second = block_tiny.params(conv=Convolution(2, 8), selector=Selection(4, 16))
    for name, hf, p in (
        ("z-lab", {**ZLAB, "dflash_config": BLOCK}, None),
        ("DFlash2", {**ZLAB, **both}, second),
        ("z-lab with heads", {**ZLAB, **BLOCK, **HEADS}, spark),
        ("speculators", SPECULATORS, None),
        ("speculators, reduced", SPECULATORS | {"draft_vocab_size": 10}, reduced),
        ("speculators DSpark", SPECULATORS | HEADS | {"speculators_model_type": "dspark"}, spark),
    ):
        yield block_tiny.target(), block_tiny.folder(where / name, hf, p)


def _serial(where: Path):
    for kind in ("llama", "reduced", "latent", "sliding", "no taps"):
        layer, given = eagle3_tiny.KINDS[kind]
        flags = {
            k: v for k, v in given.items() if k not in ("latent", "reduced", "own_embed", "o_bias", "taps")
        }
        hf = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **eagle3_tiny.LAYER,
            **layer,
        }
        hf |= {"draft_vocab_size": eagle3_tiny.VOCAB, "eagle_aux_hidden_state_layer_ids": [0, 2, 3], **flags}
        params = eagle3_tiny.drafted(kind, **({"o_bias": True} if layer.get("attention_bias") else {}))
        held = eagle3_tiny.published(params)
        yield eagle3_tiny.target(), tiny_files.folder(where / kind, hf, held)


def _gemma(where: Path):
    target = testing.tiny_params(3, hf=gemma_drafter_reference.TARGET)
    for name, hf in (("eagle3", gemma_drafter_reference.EAGLE3), ("dspark", gemma_drafter_reference.DSPARK)):
        for merged in (True, False):
            hf = hf | {"attention_k_eq_v": merged}
            held = gemma_drafter_reference.tensors(hf)
            yield target, tiny_files.folder(where / f"{name} {merged}", hf, held)


def _assistants(where: Path):
    for i, given in enumerate(({}, assistant_tiny.CLUSTERS)):
        drafted = assistant_tiny.drafted(**given)
        yield assistant_tiny.target(), assistant_tiny.folder(where / str(i), drafted)


@pytest.mark.parametrize("cases", [_blocks, _serial, _gemma, _assistants])
def test_same_as_with_weights(tmp_path, cases):
    """What the config tells is what the tensors would have told."""
    for target, full in cases(tmp_path / "full"):
        base = target.replace(target=jax.eval_shape(lambda p: p, target.target))
        bare = folder(tmp_path / "bare" / full.relative_to(tmp_path), config_of(full))
        found = [attach.attach(base, attach.plan(str(where), None, None), str) for where in (full, bare)]
        assert found[0].meta.drafter_cfg == found[1].meta.drafter_cfg, full
        assert found[0].drafter == found[1].drafter, full


def config_of(full: Path) -> dict[str, Any]:
    return json.loads((full / "config.json").read_text())


@pytest.mark.parametrize("kind", ["qwen", "qwen, experts", "deepseek"])
def test_mtp_same_as_with_weights(tmp_path, kind):
    counted = {} if kind == "deepseek" else {"mtp_num_hidden_layers": 1}
    full = mtp_files.folder(tmp_path / "full", kind, **counted)
    found = [load(where, "mtp") for where in (full, folder(tmp_path / "bare", config_of(full)))]
    assert found[0].meta.drafter_cfg == found[1].meta.drafter_cfg
    assert (found[0].target, found[0].drafter) == (found[1].target, found[1].drafter)


# ---------------------------------------------------------------- what is told and refused


def test_on_the_command_line(tmp_path):
    """Prompt as a number of tokens: no tokenizer is there either."""
    target = folder(tmp_path / "target", TARGETS["Qwen3-8B"][0])
    drafter = folder(tmp_path / "drafter", published.DFLASH_8B)
    words = [
        "explain",
        str(target),
        "--drafter",
        str(drafter),
        "--dtype",
        "bfloat16",
        "--rows",
        "2",
        "--json",
    ]
    run = CliRunner().invoke(cli.app, [*words, "--prompt-tokens", "700"])
    assert run.exit_code == 0, run.output
    told = json.loads(run.stdout)
    assert told["prompt_tokens"] == [700, 700]
    assert told["target_bytes"] == 2 * 8_190_735_360


def test_assumptions_are_told(tmp_path):
    target = folder(tmp_path / "target", TARGETS["Qwen3-8B"][0])
    with pytest.warns(UserWarning, match="there are no weights: its tensors are taken to be"):
        params = load(target, folder(tmp_path / "drafter", published.DFLASH_8B))
    assert any("there are no weights" in note for note in params.meta.drafter_notes)


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_quantised_configs_are_refused_by_name(tmp_path, key):
    """NUM.3: an estimate for weights that could not be loaded would mislead."""
    hf = TARGETS["Qwen3-8B"][0]
    packed = {key: {"quant_method": "compressed-tensors"}}
    with pytest.raises(ValueError, match="quantised with 'compressed-tensors' are not supported"):
        load(folder(tmp_path / "packed", hf | packed))
    kimi = published.KIMI_K25
    with pytest.raises(ValueError, match="quantised with 'compressed-tensors' are not supported"):
        load(folder(tmp_path / "kimi", kimi | {"text_config": kimi["text_config"] | packed}))
    target = folder(tmp_path / "target", hf)
    with pytest.raises(ValueError, match="quantised with 'compressed-tensors' are not supported"):
        load(target, folder(tmp_path / "drafter", published.DFLASH_8B | packed))


def test_what_a_config_alone_cannot_tell(tmp_path):
    target = folder(tmp_path / "target", TARGETS["Qwen3-8B"][0])
    bare = {key: value for key, value in published.DFLASH_8B.items() if key != "intermediate_size"}
    with pytest.raises(
        ValueError, match="there are no weights, and the config alone lacks 'intermediate_size'"
    ):
        load(target, folder(tmp_path / "bare", bare))
    with pytest.raises(ValueError, match="no known drafter format"):
        load(target, folder(tmp_path / "strange", {"model_type": "mistral"}))
    with pytest.raises(ValueError, match="no layer for multi-token prediction"):
        load(folder(tmp_path / "kimi", published.KIMI_K25), "mtp")
    with pytest.raises(FileNotFoundError, match="holds no safetensors file"):
        specjax.load(target, verbose=False)


def test_hub_models_are_explained_without_a_download_of_weights(tmp_path, monkeypatch):
    import huggingface_hub

    asked = []
    here = folder(tmp_path / "here", TARGETS["SmolLM2-135M"][0])

    def download(repo, **options):
        asked.append(options["ignore_patterns"])
        return str(here)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    load("owner/model", "owner/draft")
    assert len(asked) == 2
    assert all("*.safetensors" in patterns for patterns in asked)
    shutil.rmtree(here)
    hf = tiny_files.config()
    here = tiny_files.folder(tmp_path / "full", hf, tiny_files.tensors(hf))
    specjax.load("owner/model", verbose=False)
    assert "*.safetensors" not in asked[-1]
