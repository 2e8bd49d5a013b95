"""Features of packed rows: what they do not depend on, and the same numbers from every source."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import testing
from specjax.core import platform
from specjax.kernels import dispatch, packed_attention
from specjax.layers.attention import attend, attend_parts, causal
from specjax.testing.models import tiny_config
from specjax.train import features, packed, records, shards, sources
from specjax.train.types import Batch, Features
from specjax.types import KVView, Pair, TapSpec

VOCAB, LENGTH = 48, 16
LENGTHS = [9, 3, 7, 5, 11, 2, 14]
TEXTS = [np.random.default_rng(i).integers(1, VOCAB, n).astype(np.int32) for i, n in enumerate(LENGTHS)]
#: One epoch, and another packing of the same documents: rows of two batches.
FIRST = [[[0, 2], [4, 3], [6, 5]], [[1], [], []]]
SECOND = [[[5, 6], [3, 2, 1], [4]], [[0], [], []]]


def batch_of(rows) -> Batch:
    """These documents, packed."""
    out = {name: np.zeros((len(rows), LENGTH), np.int32) for name in ("tokens", "doc", "pos")}
    out["doc"] -= 1
    for r, row in enumerate(rows):
        start = 0
        for d, document in enumerate(row):
            n = LENGTHS[document]
            at = slice(start, start + n)
            out["tokens"][r, at], out["doc"][r, at], out["pos"][r, at] = TEXTS[document], d, np.arange(n)
            start += n
    return Batch(**out, trained=out["doc"] >= 0)


@functools.cache
def target(dtype="float32"):
    params = testing.tiny_params(hf=tiny_config(vocab=VOCAB, layers=1))
    return jax.tree.map(lambda x: x.astype(dtype), params.target), params.meta


def extract(dtype="float32", taps=(0, 1), kv=True) -> sources.Extract:
    meta = target()[1]
    return sources.Extract(Pair(meta.family, meta.target_cfg), TapSpec(taps, True, kv), dtype)


def online(dtype="float32") -> sources.Online:
    return sources.Online(extract(dtype), target(dtype)[0])


def arrays(out: Features, at=slice(None)) -> list[np.ndarray]:
    """Everything with a number per token, ``[tokens ...]``."""
    by_token = lambda x: np.asarray(x).swapaxes(1, 2) if x.ndim == 4 else np.asarray(x)  # noqa: E731
    return [by_token(x)[at] for x in jax.tree.leaves(out)]


def same(a, b) -> bool:
    return all(x.dtype == y.dtype and (x == y).all() for x, y in zip(a, b, strict=True))


# What a query sees


@pytest.mark.parametrize("window", [None, 1, 4])
def test_masks_equal_an_explicit_one(window):
    """PEER.13: full and windowed layers, packed documents, padding."""
    batch = batch_of(SECOND[0])
    seen = np.asarray(causal(jnp.asarray(batch.pos), packed.seen_at(batch.doc, batch.pos), window))
    for r in range(len(seen)):
        for t in range(LENGTH):
            for s in range(LENGTH):
                one = batch.doc[r, t] == batch.doc[r, s] >= 0 and s <= t
                assert seen[r, t, s] == (one and (window is None or t - s < window))


def test_attention_over_packed_rows():
    """PEER.13: against a dense softmax, with a soft cap; garbage of other documents and of padding is not seen."""
    batch, rng = batch_of(SECOND[0]), np.random.default_rng(0)
    q, k, v = (rng.standard_normal((3, LENGTH, n, 8)).astype(np.float32) for n in (4, 2, 2))
    spoilt = [x.copy() for x in (k, v)]
    for x in spoilt:
        x[0, batch.doc[0] != 1] = np.nan
    q, *spoilt, pos, doc = map(jnp.asarray, (q, *spoilt, batch.pos, batch.doc))
    cache = packed.PackedKV(None, None, doc, pos)
    keys, values, key_pos, _ = cache.extend(*spoilt, pos, jnp.full(3, LENGTH), "extend")
    got = attend(q, keys, values, pos, key_pos, 0.4, window=3, softcap=2.0)
    seen = np.asarray(causal(pos, key_pos, 3))
    scores = 2.0 * np.tanh(np.einsum("rthc,rshc->rhts", q, k.repeat(2, 2)) * 0.4 / 2.0)
    weights = np.exp(scores) * seen[:, None]
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-30)
    want = np.einsum("rhts,rshc->rthc", weights, v.repeat(2, 2))
    clean = (np.arange(3)[:, None] > 0) | (batch.doc == 1)
    np.testing.assert_allclose(np.asarray(got)[clean], want[clean], atol=1e-5)
    assert not np.asarray(got)[(batch.doc < 0) & clean].any()


def _parts(dtype, heads=4, kv_heads=2, size=64, length=LENGTH):
    rng = np.random.default_rng(0)
    shapes = (3, length, heads, size), (3, kv_heads, length, size), (3, kv_heads, length, size)
    return [jnp.asarray(rng.standard_normal(s), dtype) for s in shapes]


def test_what_the_packed_kernel_takes(monkeypatch):
    """Everything else is the reference's."""
    said = lambda *facts: packed_attention.refuse(packed_attention.case(*facts))  # noqa: E731
    assert "NVIDIA" in said(*_parts("bfloat16"), 0.1, None)
    monkeypatch.setattr(platform, "backend", lambda: "cuda")
    assert said(*_parts("bfloat16"), 0.1, None) is None
    assert "full precision" in said(*_parts("float32"), 0.1, None)
    assert "soft cap" in said(*_parts("bfloat16"), 0.1, 50.0)
    assert "channels" in said(*_parts("bfloat16", size=512), 0.1, None)
    assert "channels" in said(*_parts("bfloat16", size=12), 0.1, None)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 3])
def test_packed_kernel_on_the_device(window):
    """cuDNN against the reference: what each query sees is the same."""
    batch, (q, k, v) = batch_of(SECOND[0]), _parts("bfloat16")
    pos, key_pos = jnp.asarray(batch.pos), packed.seen_at(jnp.asarray(batch.doc), jnp.asarray(batch.pos))
    assert dispatch.choose("packed_attention", q, k, v, 0.125, None).implementation == "kernel"
    got = jax.jit(lambda *x: attend(*x, pos, key_pos, 0.125, window))(q, k, v)
    want = attend_parts(q, ((k, v, causal(pos, key_pos, window)),), 0.125)
    real = batch.doc >= 0
    np.testing.assert_allclose(np.asarray(got, "f4")[real], np.asarray(want, "f4")[real], atol=0.02)


def test_rows_a_target_cannot_run():
    """A recurrent state runs through a row: refused on the host, as are documents beyond the target's positions."""
    import families

    batch = batch_of(FIRST[0])
    hybrid = families.target().meta
    hybrid = Pair(hybrid.family, hybrid.target_cfg)
    assert not packed.packable(hybrid)
    with pytest.raises(ValueError, match=r"up to 2 documents: pack one document per row"):
        features.check(hybrid, batch)
    features.check(hybrid, batch_of([[0], [6]]))
    short = testing.tiny_params(hf=tiny_config(max_positions=8)).meta
    with pytest.raises(ValueError, match=r"14 tokens is beyond the 8 positions"):
        features.check(Pair(short.family, short.target_cfg), batch)


# What features depend on


def test_what_stands_beside_a_document_does_not_matter():
    """TRD.3: bit for bit at the same place, to rounding at another, and again."""
    batch = batch_of(FIRST[0])
    at = batch.doc[0] == 0
    out = online().get([], batch)
    assert same(arrays(out), arrays(online().get([], batch)))
    other = jax.tree.map(np.copy, batch)
    other.tokens[0, ~at], other.tokens[1:] = 7, 9
    other.doc[0, ~at] = 3
    beside = online().get([], other)
    assert same(arrays(out, (0, at)), arrays(beside, (0, at)))
    alone = batch_of([[1, 0], [], []])
    moved = arrays(online().get([], alone), (0, alone.doc[0] == 1))
    for a, b in zip(arrays(out, (0, at)), moved, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_in_any_batch(dtype):
    """TRD.3: so that epochs may order rows as they like, and features be kept or not."""
    one, other = (batch_of([FIRST[0][i] for i in order]) for order in ((0, 1, 2), (2, 0, 1)))
    a, b = (arrays(online(dtype).get([], x)) for x in (one, other))
    assert same([x[[2, 0, 1]] for x in a], b)


def test_rows_in_parts(monkeypatch):
    """Rows whose scores would take too much room are run one after the other: the same features."""
    batch = batch_of(FIRST[0])
    whole = online().get([], batch)
    monkeypatch.setattr(features, "SCORE_BYTES", 4 * 4 * LENGTH**2)
    parts = jax.jit(extract())(target()[0], batch)
    for a, b in zip(arrays(whole), arrays(parts), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inside_a_step_they_are_the_same(dtype):
    """TRD.3: what reads them does not change them, and nothing is differentiated through them."""

    @jax.jit
    def step(weights, batch):
        def loss(weights):
            out = extract(dtype)(weights, batch)
            return jnp.sum(jnp.tanh(out.hidden.astype(jnp.float32))), out

        return jax.grad(loss, has_aux=True)(weights)

    batch, (weights, _) = batch_of(FIRST[0]), target(dtype)
    slopes, inside = step(weights, batch)
    assert same(arrays(inside), arrays(online(dtype).get([], batch)))
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(slopes))


# Sources


def source_of(kind, dtype, folder, **room):
    given = {"device_bytes": 0, "host_bytes": 0} | room
    return sources.open_source(kind, extract(dtype), target(dtype)[0], LENGTHS, folder=folder, **given)


def written(folder, dtype="float32", **more):
    batches = ((rows, batch_of(rows)) for rows in FIRST)
    sources.write(extract(dtype), target(dtype)[0], folder, batches, LENGTHS, shard_bytes=1000, **more)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_sources_give_the_same(dtype, tmp_path):
    """TRD.3: online, offline, and hybrid on the device and in host memory, filled online and from files, bit for bit;
    packed otherwise in the second epoch, every document keeps its numbers."""
    written(tmp_path / "f", dtype)
    assert len(list((tmp_path / "f").glob("*.safetensors"))) > 1
    room = {"device": {"device_bytes": 1 << 30}, "host": {"host_bytes": 1 << 30}}
    every = [source_of("offline", dtype, tmp_path / "f")]
    every += [
        source_of("hybrid", dtype, folder, **r) for folder in (None, tmp_path / "f") for r in room.values()
    ]
    plain, known = online(dtype), {}
    for rows in FIRST:
        batch = batch_of(rows)
        want = plain.get(rows, batch)
        for r, row in enumerate(rows):
            known |= {x: arrays(want, (r, batch.doc[r] == d)) for d, x in enumerate(row)}
        assert all(same(arrays(want), arrays(source.get(rows, batch))) for source in every)
    for rows in SECOND:
        batch = batch_of(rows)
        for source in every:
            out = source.get(rows, batch)
            assert not any(x[batch.doc < 0].any() for x in arrays(out)[:-1])
            for r, row in enumerate(rows):
                assert all(same(arrays(out, (r, batch.doc[r] == d)), known[x]) for d, x in enumerate(row))


def test_where_features_are_kept():
    """Device, host or nowhere, by what fits; the plan says so with sizes."""
    size = sum(LENGTHS) * extract().layout(target()[0]).bytes_per_token
    assert size == 51 * 4 * (3 * 32 + 2 * 2 * 8)
    plan = lambda **room: source_of("hybrid", "float32", None, **room).plan  # noqa: E731
    assert "kept on the device: 51 tokens x 128 float32" in plan(device_bytes=size)
    assert "kept in host memory" in plan(device_bytes=size - 1, host_bytes=size)
    assert "they are not kept" in plan(device_bytes=size - 1, host_bytes=size - 1)
    assert records.host_room() > 1 << 20
    with pytest.raises(ValueError, match="not 'somewhere'"):
        source_of("somewhere", "float32", None)
    with pytest.raises(ValueError, match="give their folder"):
        source_of("offline", "float32", None)


def test_keys_and_values_are_kept_in_their_layout():
    """Two kinds of layers with different heads; what is not needed is left out."""
    rng = np.random.default_rng(0)
    batch = batch_of(FIRST[0])
    random = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    at = jnp.where(batch.doc >= 0, batch.pos, -1)
    view = lambda heads, size: KVView(*(random(3, heads, LENGTH, size) for _ in "kv"), at)  # noqa: E731
    given = Features(
        random(3, LENGTH, 6), {4: random(3, LENGTH, 6)}, {"full": view(1, 5), "sliding": view(2, 3)}
    )
    names, widths = ("hidden", "tap.4", "full.k", "full.v", "sliding.k", "sliding.v"), (6, 6, 5, 5, 6, 6)
    heads, starts = (0, 0, 1, 1, 2, 2), np.cumsum([0, *widths])
    shape = features.Layout(tuple(map(features.Field, names, starts.tolist(), widths, heads)), "float32")
    flat = features.flatten(given, shape)
    assert flat.shape == (3, LENGTH, shape.width) == (3, LENGTH, 34)
    back = features.unflatten(flat, shape, TapSpec((4,), True, True), batch.doc, batch.pos)
    assert jax.tree.structure(back) == jax.tree.structure(given)
    assert same(arrays(back), arrays(given))
    less = features.unflatten(flat, shape, TapSpec((), True), batch.doc, batch.pos)
    assert (less.taps, less.kv) == ({}, None)


def test_documents_that_do_not_fit():
    """Names, lengths and token ids are compared before a number is given out."""
    source, batch = source_of("hybrid", "float32", None, host_bytes=1 << 30), batch_of(FIRST[0])
    with pytest.raises(ValueError, match="4 rows were named for a batch of 3 rows"):
        source.get([*FIRST[0], [1]], batch)
    with pytest.raises(ValueError, match="row 2 has a document 0, named -1"):
        source.get(FIRST[0][:2], batch)
    assert same(arrays(source.get([[1]], batch_of(FIRST[1]))), arrays(source.get([[1]], batch_of(FIRST[1]))))
    with pytest.raises(ValueError, match="row 0 has a document 1, named -1; known are 0 to 6"):
        source.get([[0], [4, 3], [6, 5]], batch)
    with pytest.raises(ValueError, match="row 1 has a document 0, named 7"):
        source.get([[0, 2], [7, 3], [6, 5]], batch)
    with pytest.raises(ValueError, match="document 3 has 11 tokens in this batch and 5 with features"):
        source.get([[0, 2], [3, 4], [6, 5]], batch)
    source.get(FIRST[0], batch)
    other = jax.tree.map(np.copy, batch)
    other.tokens[1, 2] += 1
    with pytest.raises(ValueError, match=r"document 4 has token .* at position 2"):
        source.get(FIRST[0], other)


def test_a_document_twice_in_a_batch():
    """It is kept once, and both places are given it."""
    source, rows = source_of("hybrid", "float32", None, device_bytes=1 << 30), [[5, 1, 5], [1, 1, 1], []]
    batch = batch_of(rows)
    first, then = source.get(rows, batch), source.get(rows, batch)
    at = batch.doc[0] == 0
    assert same(arrays(first, (0, at)), arrays(then, (0, at)))
    assert same(arrays(then, (0, at)), arrays(then, (0, batch.doc[0] == 2)))


# Files


def test_writing_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    """A disk that fills up costs the shard that was being written, never those before it."""
    import safetensors.numpy

    whole, stopped, save, told = tmp_path / "whole", tmp_path / "stopped", safetensors.numpy.save_file, []
    written(whole)
    calls = iter([None, OSError(28, "No space left on device")])

    def full(arrays, path):
        save(arrays, path)
        if problem := next(calls):
            raise problem

    monkeypatch.setattr(safetensors.numpy, "save_file", full)
    with pytest.raises(OSError, match=r"features-00001.*No space left.*1 shards before it are whole"):
        written(stopped)
    assert sorted(f.name for f in stopped.iterdir()) == ["features-00000.safetensors", "features.json"]
    monkeypatch.setattr(safetensors.numpy, "save_file", save)
    written(stopped, told=told.append)
    assert told[-1] == len(LENGTHS)
    a, b = shards.Reader(whole), shards.Reader(stopped)
    assert all((x == y).all() for n in range(len(LENGTHS)) for x, y in zip(a.get(n), b.get(n), strict=True))


def test_no_room(tmp_path, monkeypatch):
    """The size is known before anything is computed."""
    monkeypatch.setattr("shutil.disk_usage", lambda _: types.SimpleNamespace(free=1000))
    with pytest.raises(
        OSError, match=r"features of 51 tokens x 128 float32 take 0\.00 GiB, and .*: make room"
    ):
        written(tmp_path / "f")
    assert not (tmp_path / "f").exists()


def _read_all(folder):
    source = source_of("offline", "float32", folder)
    return [arrays(source.get(rows, batch_of(rows))) for rows in FIRST]


@pytest.mark.parametrize("damage", ["byte", "short", "missing"])
def test_a_damaged_shard_is_named(damage, tmp_path):
    """And only its documents are written anew."""
    written(tmp_path / "f")
    path = sorted((tmp_path / "f").glob("*.safetensors"))[1]
    bytes_ = bytearray(path.read_bytes())
    bytes_[-9] ^= 1
    path.write_bytes(bytes_ if damage == "byte" else bytes_[:-4])
    if damage == "missing":
        path.unlink()
    said = "does not exist" if damage == "missing" else "is damaged"
    with pytest.raises(ValueError, match=rf"{path.name} {said}.*Delete that file and write features again"):
        _read_all(tmp_path / "f")
    path.unlink(missing_ok=True)
    with pytest.raises(ValueError, match=rf"{path.name} does not exist"):
        source_of("offline", "float32", tmp_path / "f")
    written(tmp_path / "f")
    for rows, got in zip(FIRST, _read_all(tmp_path / "f"), strict=True):
        assert same(got, arrays(online().get(rows, batch_of(rows))))


def test_folders_that_do_not_serve(tmp_path):
    """Another target, type or fewer parts; documents that are not there; no folder; other files in it."""
    folder, weights = tmp_path / "f", target()[0]
    sources.write(extract(), weights, folder, [(FIRST[1], batch_of(FIRST[1]))], LENGTHS)
    spoilt = weights.replace(norm=weights.norm * 2)
    open_ = lambda kind, to=weights: sources.Offline(kind, to, folder)  # noqa: E731
    with pytest.raises(ValueError, match="of another target: its weights differs"):
        open_(extract(), spoilt)
    with pytest.raises(ValueError, match="they are float32, and bfloat16 is asked for"):
        open_(extract("bfloat16"))
    assert open_(extract(taps=(1,), kv=False)).get(FIRST[1], batch_of(FIRST[1])).kv is None
    other = sources.Extract(extract().pair, TapSpec((0,), True), "float32")
    with pytest.raises(
        ValueError, match=r"holds features already, and their parts differ: choose another folder"
    ):
        sources.write(other, weights, folder, [], LENGTHS)
    with pytest.raises(ValueError, match="holds features already, and they are of another target"):
        sources.write(extract(), spoilt, folder, [], LENGTHS)
    with pytest.raises(ValueError, match=r"features of document 0 are not in .*, which has 1 documents"):
        shards.Reader(folder).get(0)
    with pytest.raises(FileNotFoundError, match="holds no features"):
        shards.Reader(tmp_path)
    with pytest.raises(FileExistsError, match="something else than features"):
        sources.write(extract(), weights, tmp_path, [], LENGTHS)
    (folder / "features.json").write_text("{")
    with pytest.raises(ValueError, match=r"features\.json is damaged"):
        shards.Reader(folder)
