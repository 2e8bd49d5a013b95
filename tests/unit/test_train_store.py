"""Texts on disk: read back as written, whole or refused."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import train_texts
from safetensors import SafetensorError
from safetensors.numpy import save_file
from train_texts import META, SAME, documents

from specjax.train.store import load
from specjax.train.store_files import Writer, read_shard


def same(a, b) -> bool:
    return np.array_equal(a.ids, b.ids) and (a.spans, a.ended, a.source, a.prompt, a.group, a.sample, a.part) == (
        b.spans, b.ended, b.source, b.prompt, b.group, b.sample, b.part
    )  # fmt: skip


def test_what_was_written(tmp_path):
    """Documents come back, in an order that does not depend on that of writing."""
    given = documents(20, samples=2)
    one = train_texts.store(tmp_path / "one", given, shards=3)
    two = train_texts.store(tmp_path / "two", given[::-1], shards=1)
    assert one.digest == two.digest
    assert len(one) == 40
    by_key = {(d.prompt, d.sample): d for d in given}
    for i in range(40):
        d = one.document(i)
        assert same(d, by_key[d.prompt, d.sample])
        assert same(d, two.document(i))
        assert d.ids.dtype == np.uint32
        assert one.trained[i] == sum(b - a for a, b in d.spans)
        assert one.lengths[i] == len(d.ids)
    counts = one.counts()
    assert sum(c["documents"] for c in counts.values()) == 40
    assert sum(c["tokens"] for c in counts.values()) == len(one.ids)
    assert sum(c["answers"] for c in counts.values()) == len(one.spans)
    assert (one.temperature == 0).all()


def test_folders_together(tmp_path):
    """Greedy and sampled texts of the same prompts are one store; those of another target are refused."""
    hot = {"sampling": {"temperature": [0.7, 1.0], "seed": 0}, "sources": ["b", "a"]}
    greedy = train_texts.store(tmp_path / "greedy", documents(6))
    train_texts.store(tmp_path / "hot", documents(6, seed=1, samples=3), **hot)
    both = load(tmp_path / "greedy", tmp_path / "hot")
    assert len(both) == 24
    assert both.sources == ("a", "b")
    assert sorted(both.temperature.tolist()) == [0.0] * 6 + [0.7] * 6 + [1.0] * 12
    for i in np.flatnonzero(both.temperature == 0):
        j = int(np.flatnonzero(greedy.prompt == both.prompt[i])[0])
        assert same(both.document(i), greedy.document(j))
    assert both.digest == load(tmp_path / "hot", tmp_path / "greedy").digest
    with pytest.raises(ValueError, match=r"6 documents are there twice.*prompt 10+0, sample 0"):
        load(tmp_path / "greedy", tmp_path / "greedy")
    train_texts.store(tmp_path / "other", documents(6), target={"family": "llama", "weights": "x"})
    with pytest.raises(ValueError, match=r"do not belong together: target.weights is 'w' there and 'x' here"):
        load(tmp_path / "greedy", tmp_path / "other")


@pytest.mark.parametrize("damage", ["byte", "tail", "swapped", "checksum"])
def test_damaged_shards(tmp_path, damage):
    """A damaged shard is an error that names it, when reading and when going on."""
    train_texts.store(tmp_path, documents(9), shards=3)
    path = tmp_path / "texts-000001.safetensors"
    raw = bytearray(path.read_bytes())
    if damage == "byte":
        raw[-3] ^= 1
    elif damage == "tail":
        raw = raw[:-40]
    elif damage == "swapped":
        raw = bytearray(b"hello")
    path.write_bytes(raw)
    if damage == "checksum":
        arrays = read_shard(tmp_path / "texts-000000.safetensors")
        save_file(arrays, path)
    for act in (lambda: load(tmp_path), lambda: Writer(tmp_path, META, SAME).done()):
        with pytest.raises(ValueError, match=r"texts-000001.safetensors is damaged.*Delete the file"):
            act()


def test_half_written_shards_are_nothing(tmp_path):
    """PEER.20: what a kill left half written is neither read nor in the way."""
    train_texts.store(tmp_path, documents(4))
    before = load(tmp_path).digest
    (tmp_path / "texts-000002.safetensors.77.tmp").write_bytes(b"half")
    assert load(tmp_path).digest == before
    with Writer(tmp_path, META, SAME) as writer:
        assert not list(tmp_path.glob("*.tmp"))
        assert writer.done() == {(d.prompt, 0) for d in documents(4)}
        writer.write(documents(6)[4:])
        with pytest.raises(ValueError, match="is not finished"):
            load(tmp_path)
        assert len(load(tmp_path, partial=True)) == 6


@pytest.mark.parametrize("kind", [OSError, SafetensorError])
def test_a_full_disk(tmp_path, monkeypatch, kind):
    """A shard that cannot be written leaves the others, and no trace of itself; safetensors has an error of its own."""

    def full(arrays, path, metadata):
        path.write_bytes(b"half")
        raise kind("I/O error: No space left on device (os error 28)")

    with Writer(tmp_path, META, SAME) as writer:
        writer.write(documents(2))
        monkeypatch.setattr("safetensors.numpy.save_file", full)
        with pytest.raises(OSError, match="No space left"):
            writer.write(documents(4)[2:])
        monkeypatch.undo()
        assert sorted(p.name for p in tmp_path.glob("texts*")) == ["texts-000000.safetensors", "texts.json"]
        writer.write(documents(4)[2:])
    assert len(load(tmp_path, partial=True)) == 4


def test_other_settings_are_refused(tmp_path):
    """Each difference is named."""
    train_texts.store(tmp_path, documents(2))
    other = META | {"sampling": {"temperature": [0.5], "seed": 0}, "tokenizer": {"vocabulary": "u"}}
    with pytest.raises(
        ValueError, match=r"made otherwise: tokenizer.vocabulary is 'v' there and 'u' here; sampling.temp"
    ):
        Writer(tmp_path, other, SAME)
    with Writer(tmp_path, META | {"sources": ["c"]}, SAME) as writer:  # the refusal let go of the folder
        assert writer.meta["sources"] == ["a", "b", "c"]
    (tmp_path / "texts.json").unlink()
    with pytest.raises(ValueError, match="holds texts without"):
        Writer(tmp_path, META, SAME)


def test_one_writer_at_a_time(tmp_path):
    """A second process is refused; one that was killed is no hindrance."""
    code = (
        "import sys; sys.path[:0] = ['tests']\n"
        "from train_texts import META, SAME\nfrom specjax.train.store_files import Writer\n"
        f"writer = Writer({str(tmp_path)!r}, META, SAME)\nprint('there', flush=True)\nsys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ
    )
    try:
        assert other.stdout.readline() == b"there\n"
        with pytest.raises(ValueError, match="is being written by another process"):
            Writer(tmp_path, META, SAME)
    finally:
        other.kill()
        other.communicate()
    with Writer(tmp_path, META, SAME):
        pass


def test_what_is_no_store(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no texts: .*texts.json does not exist"):
        load(tmp_path)
    for text in ("{", "[]", json.dumps({"format": 9}), json.dumps({"format": 1})):
        (tmp_path / "texts.json").write_text(text)
        with pytest.raises(ValueError, match=r"texts.json is damaged or of another kind"):
            load(tmp_path)
    with pytest.raises(ValueError, match="no folder of texts"):
        load()
    with Writer(tmp_path / "new", META, SAME) as writer:
        writer.write([])
        writer.save_meta(complete=True)
    with pytest.raises(ValueError, match="no document"):
        load(tmp_path / "new")
