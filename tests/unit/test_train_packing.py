"""Documents in rows: every one once, nothing of another's, the same batches from any step on."""

import itertools

import numpy as np
import pytest
import train_texts
from hypothesis import given, strategies as st
from train_texts import documents

from specjax.train import packing
from specjax.train.data import TextData
from specjax.train.store_files import Document
from specjax.train.types import Recipe


def recipe(rows=4, length=48, **changes) -> Recipe:
    return Recipe(method="mtp", rows=rows, length=length, **changes)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return train_texts.store(tmp_path_factory.mktemp("texts"), documents(60, samples=2))


def rows_of(batches):
    """(document, tokens, positions, trained) of every document in batches, and whether padding is empty."""
    for batch, named in batches:
        assert batch.tokens.dtype == batch.doc.dtype == batch.pos.dtype == np.int32
        assert batch.trained.dtype == bool
        assert len(named) == len(batch.tokens)
        for r, row in enumerate(named):
            assert sorted(set(batch.doc[r]) - {-1}) == list(range(len(row)))
            real = batch.doc[r] >= 0
            assert not np.diff(real.astype(int)).max(initial=0) > 0  # padding is behind the last
            assert (np.diff(batch.doc[r][real]) >= 0).all()
            for x in (batch.tokens, batch.pos, batch.trained):
                assert not x[r][~real].any()
            for d, i in enumerate(row):
                at = batch.doc[r] == d
                yield i, batch.tokens[r, at], batch.pos[r, at], batch.trained[r, at]


@pytest.mark.parametrize("pack", [True, False])
def test_an_epoch_is_every_document_once(texts, pack):
    """PEER.17: training and held-out documents are disjoint and all; each is itself, once per epoch, in any epoch."""
    data = TextData(texts, recipe(), pack=pack, validation=0.2, most=None)
    held = list(rows_of(data.validation()))
    for epoch in (0, 3):
        seen = list(rows_of(data.epoch(epoch)))
        assert sorted([i for i, *_ in seen] + [i for i, *_ in held]) == list(range(len(texts)))
        for i, tokens, pos, trained in seen + held:
            d = texts.document(i)
            want = np.zeros(len(d.ids), bool)
            for a, b in d.spans:
                want[a:b] = True
            np.testing.assert_array_equal(tokens, d.ids)
            np.testing.assert_array_equal(pos, np.arange(len(d.ids)))
            np.testing.assert_array_equal(trained, want)
    groups = {texts.group[i] for i, *_ in held}
    assert groups.isdisjoint(
        {texts.group[i] for i, *_ in seen}
    )  # samples and variants of a prompt are on one side
    assert {batch.tokens.shape[0] for batch, _ in data.epoch(0)} == {4}
    widths = {batch.tokens.shape[1] for batch, _ in data.epoch(0)}
    assert widths == {48} if pack else widths <= {32, 48}


@pytest.mark.parametrize("pack", [True, False])
def test_any_step_has_its_batch(texts, pack):
    """TRN.2, PEER.19: batches from a step on are those of a run that came to it; epochs differ, seeds differ."""
    data = TextData(texts, recipe(), pack=pack)
    n = data.per_epoch
    whole = list(itertools.islice(data.batches(0), 2 * n + 3))
    for step in (1, n - 1, n, n + 2, 2 * n):
        again = itertools.islice(TextData(texts, recipe(), pack=pack).batches(step), 3)
        for (a, rows), (b, want) in zip(again, whole[step:], strict=False):
            assert rows == want
            np.testing.assert_array_equal(a.tokens, b.tokens)
            np.testing.assert_array_equal(a.trained, b.trained)
    order = [[rows for _, rows in whole[:n]], [rows for _, rows in whole[n : 2 * n]]]
    assert order[0] != order[1]
    flat = [sorted(tuple(row) for rows in epoch for row in rows) for epoch in order]
    assert flat[0] == flat[1]  # the same rows, in another order
    other = TextData(texts, recipe(seed=1), pack=pack)
    assert [rows for _, rows in other.epoch(0)] != order[0]
    assert other.identity != data.identity
    assert TextData(texts, recipe(), pack=pack).identity == data.identity


@pytest.mark.parametrize("pack", [True, False])
def test_processes_share_every_batch(texts, pack):
    """PEER.17: per-process batches are a partition, in the order of the whole."""
    whole = TextData(texts, recipe(), pack=pack)
    parts = [TextData(texts, recipe(), pack=pack, process=(i, 2)) for i in range(2)]
    for (batch, rows), *mine in zip(whole.epoch(1), *(p.epoch(1) for p in parts), strict=True):
        assert rows == [row for _, named in mine for row in named]
        np.testing.assert_array_equal(batch.tokens, np.concatenate([b.tokens for b, _ in mine]))
        np.testing.assert_array_equal(batch.doc, np.concatenate([b.doc for b, _ in mine]))
    with pytest.raises(ValueError, match=r"4 rows of a batch cannot be shared by processes \(0 of 3\)"):
        TextData(texts, recipe(), process=(0, 3))


@given(st.lists(st.integers(0, 50), max_size=120), st.integers(50, 90), st.integers(0, 5))
def test_packing(lengths, length, seed):
    """Every document once, no row too long, and no two rows that would fit one."""
    lengths = np.array(lengths, int)
    rows = packing.pack(lengths, length, seed)
    assert sorted(i for row in rows for i in row) == np.flatnonzero(lengths).tolist()
    sizes = sorted(int(lengths[row].sum()) for row in rows)
    assert not sizes or sizes[-1] <= length
    assert len(sizes) < 2 or sizes[0] + sizes[1] > length
    assert rows == packing.pack(lengths, length, seed)


@pytest.mark.parametrize(("length", "floor"), [(640, 0.93), (1024, 0.98), (2048, 0.98)])
def test_packing_is_dense(length, floor):
    """Lengths like those of real answers (mean 300, many cut at 256 new tokens) leave little padding.

    Rows of 512 cannot do it: two thirds of these texts are longer than half a row.
    """
    rng = np.random.default_rng(0)
    prompt = np.clip(rng.normal(105, 38, 5000), 40, 192)
    answer = np.where(rng.random(5000) < 0.45, 256, np.clip(rng.lognormal(4.9, 0.5, 5000), 8, 256))
    lengths = (prompt + answer).astype(int)
    rows = packing.pack(lengths, length)
    assert lengths.sum() / (len(rows) * length) >= floor


@given(st.lists(st.integers(1, 256), min_size=1, max_size=60), st.integers(1, 4))
def test_buckets(lengths, most):
    """Few row lengths, all documents in, and no other choice of as many pads less."""
    lengths = np.array(lengths)
    found = packing.buckets(lengths, 256, most)
    assert len(found) <= most
    assert lengths.max() <= found[-1] <= 256

    def cost(sizes):
        return np.array(sizes)[np.searchsorted(sizes, lengths)].sum()

    options = [32 * i for i in range(1, -(-int(lengths.max()) // 32))]
    choices = itertools.chain.from_iterable(itertools.combinations(options, n) for n in range(most))
    assert cost(found) == min(cost([*c, found[-1]]) for c in choices)


def test_the_efficiency_is_told(texts):
    data = TextData(texts, recipe())
    batches = list(data.epoch(0))
    used = sum((b.doc >= 0).sum() for b, _ in batches) / sum(b.doc.size for b, _ in batches)
    assert data.efficiency == pytest.approx(used)
    assert f"{used:.1%}" in str(data)
    assert data.per_epoch == len(batches)


def test_long_documents(tmp_path):
    """PEER.22, TRD.2: cut at the end, and counted; answers that are cut away, and documents without any, too."""
    make = lambda i, n, *spans: Document(  # noqa: E731
        np.arange(1, n + 1, dtype=np.uint32), spans, (True,) * len(spans), "a", i, i
    )
    given = [
        make(0, 20, (5, 20)),  # fits
        make(1, 40, (5, 10), (25, 35)),  # loses its second answer
        make(2, 40, (5, 35)),  # loses an answer's end
        make(3, 40, (30, 35)),  # nothing is left
        make(4, 20),  # had nothing
        make(5, 20, (0, 1)),  # the first token is predicted by nothing
    ]
    store = train_texts.store(tmp_path, given)
    fit = packing.fit(store, 24)
    assert fit.lengths.tolist() == [20, 24, 24, 0, 0, 0]
    assert (fit.shortened, fit.dropped, fit.untrained, fit.answers, fit.cut) == (2, 3, 2, 2, 1)
    assert "3 of 6 documents fit rows of 24 tokens" in str(fit)
    data = TextData(store, recipe(length=24), validation=0)
    got = {i: trained for i, _, _, trained in rows_of(data.epoch(0))}
    assert {i: np.flatnonzero(t).tolist() for i, t in got.items()} == {
        0: list(range(5, 20)),
        1: list(range(5, 10)),
        2: list(range(5, 24)),
    }
    assert data.validation() == []
    assert "2 had nothing" in str(data)


def test_nothing_to_train(tmp_path):
    """TRD.2, PEER.17: no trained token at all, an empty side of the split, and a recipe without room are errors."""
    one = Document(np.arange(1, 9, dtype=np.uint32), ((4, 8),), (True,), "a", 1, 1)
    none = Document(np.arange(1, 9, dtype=np.uint32), (), (), "a", 2, 2)
    empty = train_texts.store(tmp_path / "none", [none], shards=1)
    with pytest.raises(
        ValueError, match="no document has a trained token within 48 tokens: of 1, 1 have none"
    ):
        TextData(empty, recipe())
    store = train_texts.store(tmp_path / "one", [one, none], shards=1)
    with pytest.raises(
        ValueError, match="within 4 tokens: of 2, 1 have none at all, and the answers of the others lie"
    ):
        TextData(store, recipe(length=4))
    with pytest.raises(ValueError, match="rows of 1 tokens hold nothing"):
        packing.fit(store, 1)
    alone = train_texts.store(tmp_path / "alone", [one], shards=1)
    with pytest.raises(ValueError, match=r"1 prompt\(s\) cannot be split"):
        TextData(alone, recipe())
    assert TextData(alone, recipe(), validation=0).per_epoch == 1
    with pytest.raises(ValueError, match=r"validation is a share of the prompts in \[0, 1\), got 1"):
        packing.split(store, 1)
    for seed in range(4):  # whichever of the two prompts is held out, one side has nothing trained
        with pytest.raises(
            ValueError, match=r"no text to (train|evaluate) on: none of 1 documents|no text to evaluate"
        ):
            TextData(store, recipe(seed=seed), validation=0.5)


def test_held_out_texts_are_greedy_where_there_are_some(tmp_path):
    """Acceptance is measured on what the target says; sampled texts are told apart."""
    sampling = {"temperature": [0.0, 0.8], "seed": 0}
    store = train_texts.store(tmp_path / "both", documents(30, samples=3), sampling=sampling)
    data = TextData(store, recipe(), validation=0.3, most=None)
    held = [i for i, *_ in rows_of(data.validation())]
    assert data.greedy
    assert held
    assert (store.temperature[held] == 0).all()
    few = TextData(store, recipe(), validation=0.3, most=3)
    assert len(list(rows_of(few.validation()))) == 3
    sampled = train_texts.store(tmp_path / "hot", documents(30), sampling={"temperature": [0.8], "seed": 0})
    data = TextData(sampled, recipe(), validation=0.3)
    assert not data.greedy
    assert "sampled (acceptance" in str(data)
