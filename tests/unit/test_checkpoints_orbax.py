"""Our own folder: complete, exact, written whole or not at all."""

import json
import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_files

from specjax import checkpoints, config
from specjax.checkpoints import hub, orbax
from specjax.drafters import ngram
from specjax.testing import tiny_params


def same(a, b) -> bool:
    return jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()) and x.dtype == y.dtype, a, b))


def meta_file(folder):
    return folder / hub.ORBAX_META


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip(tmp_path, dtype):
    params = tiny_params(eos_ids=(3, 5))
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    orbax.save(params, tmp_path / "m")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = orbax.load(tmp_path / "m")
    assert loaded.meta == params.meta
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    assert same(params, loaded)
    assert hub.resolve(tmp_path / "m").kind == "orbax"
    with pytest.raises(ValueError, match=r"written by specjax\.save"):
        checkpoints.load_target(hub.resolve(tmp_path / "m"), jnp.float32)


def test_experts_and_a_drafter_without_weights(tmp_path):
    hf = tiny_files.config(**tiny_files.QWEN3_MOE)
    path = tiny_files.folder(tmp_path / "hf", hf, tiny_files.tensors(hf))
    loaded = checkpoints.load_target(hub.resolve(path), jnp.float32)
    meta = config.Meta(
        family=loaded.family,
        target_cfg=loaded.cfg,
        drafter="ngram",
        drafter_cfg=ngram.default("cpu"),
        tokenizer_id="bytes",
        generation=(("temperature", 0.5),),
    )
    params = tiny_params().replace(target=loaded.weights, meta=meta)
    orbax.save(params, tmp_path / "m")
    again = orbax.load(tmp_path / "m")
    assert again.meta == meta
    assert hash(again.meta) == hash(meta)  # static in jit
    assert same(params, again)


def test_the_tokenizer_travels_along(tmp_path):
    from tiny_files import small_tokenizer

    small_tokenizer().save_pretrained(tmp_path / "tok")
    params = tiny_params()
    meta = config.Meta(**vars(params.meta) | {"tokenizer_id": str(tmp_path / "tok")})
    orbax.save(params.replace(meta=meta), tmp_path / "m")
    ids = checkpoints.tokenizer.get(meta.tokenizer_id).encode("hello 12", False)
    shutil.rmtree(tmp_path / "tok")
    (tmp_path / "m").rename(tmp_path / "elsewhere")
    loaded = orbax.load(tmp_path / "elsewhere")
    assert loaded.meta.tokenizer_id == str(tmp_path / "elsewhere" / "tokenizer")
    assert checkpoints.tokenizer.get(loaded.meta.tokenizer_id).encode("hello 12", False) == ids
    orbax.save(loaded, tmp_path / "elsewhere")  # over itself: the files are read before they are replaced
    assert (tmp_path / "elsewhere" / "tokenizer" / "tokenizer.json").is_file()


def test_only_our_own_folders_are_replaced(tmp_path):
    params = tiny_params()
    (tmp_path / "m").mkdir()
    orbax.save(params, tmp_path / "m")  # an empty folder is fine
    other = tiny_params(seed=1)
    orbax.save(other, tmp_path / "m")
    assert same(orbax.load(tmp_path / "m"), other)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").write_text("x")
    with pytest.raises(FileExistsError, match=r"not written by specjax\.save"):
        orbax.save(params, tmp_path / "foreign")
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileExistsError):
        orbax.save(params, tmp_path / "file")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "foreign", "m"]


def test_a_failed_save_leaves_the_old_folder(tmp_path, monkeypatch):
    params = tiny_params()
    orbax.save(params, tmp_path / "m")
    bad = params.replace(meta=config.Meta(**vars(params.meta) | {"tokenizer_id": str(tmp_path / "gone")}))
    with pytest.raises(FileNotFoundError, match="gone"):
        orbax.save(bad, tmp_path / "m")
    assert same(orbax.load(tmp_path / "m"), params)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_weights_that_do_not_fit_their_config_are_not_written(tmp_path):
    params = tiny_params()
    with pytest.raises(ValueError, match=r"\['target'\]\.norm has shape \[33\], the config asks for \[32\]"):
        orbax.save(params.replace(target=params.target.replace(norm=jnp.ones(33))), tmp_path / "m")
    assert not list(tmp_path.iterdir())


def edit(folder, change):
    data = json.loads(meta_file(folder).read_text())
    change(data)
    meta_file(folder).write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d["meta"]["target_cfg"].update(hidden_size=64), "has shape"),
        (lambda d: d["meta"]["target_cfg"].update(num_layers=3), "missing"),
        (lambda d: d["arrays"].pop("['target'].norm"), r"missing \[\"\['target'\]\.norm\"\]"),
        (lambda d: d["meta"].update(family="os.path"), "target family 'os.path'"),
        (lambda d: d["meta"].update(novelty=1), "novelty"),
        (lambda d: d.update(format=99), "format 99"),
        (lambda d: d.pop("arrays"), "damaged"),
    ],
)
def test_inconsistent_meta(tmp_path, change, said):
    orbax.save(tiny_params(), tmp_path / "m")
    edit(tmp_path / "m", change)
    with pytest.raises(ValueError, match=said):
        orbax.load(tmp_path / "m")


def test_damaged_folder(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"not written by specjax\.save"):
        orbax.load(tmp_path)
    orbax.save(tiny_params(), tmp_path / "m")
    files = [path for path in (tmp_path / "m" / "params").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    whole = largest.read_bytes()
    for cut in (100, len(whole) - 1):
        largest.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=f"damaged: .* holds {cut} bytes, {len(whole)} were written"):
            orbax.load(tmp_path / "m")
    largest.unlink()
    with pytest.raises(ValueError, match=r"damaged: .* is missing"):
        orbax.load(tmp_path / "m")
    largest.write_bytes(whole)
    with monkeypatch.context() as patch:  # what else orbax may find

        def refused(*_):
            raise KeyError("chunk")

        patch.setattr("orbax.checkpoint.v1.load_checkpointables", refused)
        with pytest.raises(ValueError, match=r"damaged: its arrays could not be read \('chunk'\)"):
            orbax.load(tmp_path / "m")
    meta_file(tmp_path / "m").with_name("sizes.json").unlink()
    with pytest.raises(ValueError, match=r"damaged: .*sizes\.json"):
        orbax.load(tmp_path / "m")
    meta_file(tmp_path / "m").write_text("{")
    with pytest.raises(ValueError, match=r"data\.json is damaged"):
        orbax.load(tmp_path / "m")


def test_saved_values_are_exact(tmp_path):
    """Extreme values survive: no compression or conversion on the way."""
    params = tiny_params()
    odd = np.array([np.finfo(np.float32).tiny, -0.0, 3.4e38, 1e-45] * 8, np.float32)
    params = params.replace(target=params.target.replace(norm=jnp.asarray(odd)))
    orbax.save(params, tmp_path / "m")
    assert np.asarray(orbax.load(tmp_path / "m").target.norm).tobytes() == odd.tobytes()
