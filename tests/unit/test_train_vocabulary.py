"""Draft vocabularies: the most frequent ids, ends of turns always among them."""

import numpy as np
import pytest

from specjax.train.vocabulary import choose, count, coverage


def test_the_most_frequent():
    counts = count([np.array([5, 5, 3]), np.array([3, 7, 5], np.uint32), np.array([], np.int32)], 10)
    assert choose(counts, 2).tolist() == [3, 5]
    assert coverage(counts, choose(counts, 2)) == pytest.approx(5 / 6)
    assert coverage(np.zeros(10, int), np.array([1])) == 1.0


def test_ends_are_always_in():
    """TRN.4: also when no answer has them."""
    counts = count([np.array([5, 5, 3])], 10)
    assert choose(counts, 2, always=[9]).tolist() == [5, 9]


def test_filled_up_with_others():
    """TRN.4: fewer distinct ids than the vocabulary asked for."""
    counts = count([np.array([5, 5, 3])], 10)
    ids = choose(counts, 6, always=(9, 9))
    assert ids.tolist() == [0, 1, 2, 3, 5, 9]
    assert choose(counts, 10).tolist() == list(range(10))


@pytest.mark.parametrize("size", [0, -1, 11, True, 2.0, "3"])
def test_impossible_sizes(size):
    """TRN.4."""
    with pytest.raises(ValueError, match="from 1 to 10 ids"):
        choose(np.zeros(10, int), size)


def test_impossible_ids():
    with pytest.raises(ValueError, match="always drafted must be in"):
        choose(np.zeros(10, int), 3, always=[10])
    with pytest.raises(ValueError, match="only 1"):
        choose(np.zeros(10, int), 1, always=[1, 2])
    with pytest.raises(ValueError, match="from 3 to 10, the vocabulary"):
        count([np.array([3, 10])], 10)
