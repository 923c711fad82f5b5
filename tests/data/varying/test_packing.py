"""Which documents stand in which row."""

import numpy as np
import pytest
from ddl.data.varying.packing import packing

RANDOM = np.random.default_rng(0)


def rows_of(found):
    return np.split(found.documents, found.first[1:-1])


@pytest.mark.parametrize("count", [1, 7, 500])
@pytest.mark.parametrize("length", [1, 3, 50])
def test_each_document_stands_in_one_row_that_holds_it(count, length):
    lengths = RANDOM.integers(1, length + 1, count)
    found = packing(lengths, length, seed=0)
    np.testing.assert_array_equal(np.sort(found.documents), np.arange(count))
    sums = [lengths[row].sum() for row in rows_of(found)]
    assert max(sums) <= length
    assert min(sums) > 0


def best_fit(lengths, row_length):
    """Places one document after the other: the number of rows that the rule takes."""
    free: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [space for space in free if space >= length]
        if fitting:
            free.remove(min(fitting))
        free.append((min(fitting) if fitting else row_length) - length)
    return len(free)


def test_as_many_rows_as_placing_one_by_one():
    for _ in range(20):
        lengths = RANDOM.integers(1, 33, 60)
        assert len(rows_of(packing(lengths, 32, 0))) == best_fit(lengths.tolist(), 32)


def test_little_padding():
    lengths = np.minimum(RANDOM.geometric(0.02, 20_000), 256)
    found = packing(lengths, 256, seed=0)
    rows = len(found.first) - 1
    assert lengths.sum() / (rows * 256) > 0.995
    assert lengths.mean() / 256 < 0.25  # what one document a row would fill


def test_the_seed_decides_among_documents_of_one_length():
    lengths = RANDOM.integers(1, 9, 100)
    one, same, other = (packing(lengths, 16, seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one.documents, same.documents)
    assert (one.documents != other.documents).any()
    # In a row, too: the longest document is not always the first.
    first = [lengths[row][0] < lengths[row].max() for row in rows_of(one)]
    assert any(first)
