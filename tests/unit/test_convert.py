"""From layout to layout: layers taken out of their target's files, tables borrowed from it, the command line."""

import mtp_files
import numpy as np
import pytest
import tiny_files
from exported import LAYER, made, read, same
from safetensors.numpy import load_file
from typer.testing import CliRunner

import specjax
from specjax import checkpoints, cli, testing


@pytest.mark.parametrize("kind", ["qwen, experts", "deepseek, short"])
def test_fused_experts_come_apart(kind, tmp_path):
    """PEER.16: a layer out of its target's folder, whose experts are two tensors, in its family's names and back."""
    folder = mtp_files.folder(tmp_path / "t", kind)
    found = checkpoints.convert(folder, tmp_path / "own", folder, method="mtp", dtype="same")
    assert found.format == "native"
    held = load_file(tmp_path / "own" / "model.safetensors")
    assert sum(".experts." in name for name in held) == 12
    again = checkpoints.convert(tmp_path / "own", tmp_path / "native", folder, "native", "same")
    third = checkpoints.convert(tmp_path / "native", tmp_path / "third", folder, dtype="same")
    for other in (again, third):
        assert (other.name, other.cfg) == ("mtp", found.cfg)
        assert same(other.weights, found.weights)


def test_convert_on_the_command_line(tmp_path):
    params = testing.tiny_drafter(testing.tiny_params(), "eagle3")
    specjax.export(params, tmp_path / "a", dtype="float32")
    words = [
        "convert",
        str(tmp_path / "a"),
        str(tmp_path / "b"),
        "--target",
        "tiny",
        "--layout",
        "speculators",
    ]
    done = CliRunner().invoke(cli.app, [*words, "--dtype", "float32"])
    assert done.exit_code == 0, done.output
    assert "eagle3 drafter (specjax format) written to" in done.output
    assert same(read(params, tmp_path / "b").weights, params.drafter)
    failed = CliRunner().invoke(cli.app, [*words[:-1], "zlab"])
    assert failed.exit_code == 2
    assert (
        "the zlab layout cannot hold this eagle3 drafter: it is for dflash. Layouts that can: own"
        in failed.output
    )
    small = CliRunner().invoke(cli.app, [*words[:2], str(tmp_path / "c"), *words[3:5], "--compact"])
    assert small.exit_code == 0, small.output


@pytest.mark.parametrize("kind", ["folder", "gguf", "orbax", "tied"])
def test_targets_lend_their_tables_alone(kind, tmp_path):
    """PEER.16: whatever files the target has, the copies are its own tables, bit for bit."""
    hf = tiny_files.config(num_hidden_layers=3, tie_word_embeddings=kind == "tied")
    arrays = tiny_files.tensors(hf)
    place = tiny_files.folder(tmp_path / "t", hf, arrays)
    base = specjax.load(place, dtype="float32")
    if kind == "gguf":
        place = tiny_files.gguf_file(tmp_path / "t.gguf", hf, arrays)
    if kind == "orbax":
        place = tmp_path / "o"
        specjax.save(base, place)
    layers = LAYER | {"vocab_size": 64, "num_hidden_layers": 1}
    settings = {"transformer": layers, "taps": (0, 1, 2), "qk_norm": True, "own_head": False}
    specjax.export(made(base, "eagle3", settings), tmp_path / "d")
    checkpoints.convert(tmp_path / "d", tmp_path / "s", place, "speculators", "same")
    held = load_file(tmp_path / "s" / "model.safetensors")
    np.testing.assert_array_equal(held["embed_tokens.weight"], arrays["model.embed_tokens.weight"])
    head = "model.embed_tokens.weight" if kind == "tied" else "lm_head.weight"
    np.testing.assert_array_equal(held["lm_head.weight"], arrays[head])
