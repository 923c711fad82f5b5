"""Parts and unions of sources: which examples they hold."""

import numpy as np
import pytest

from ddl.data.combine import concatenate, mix, subset


def items(first, count):
    return [{"x": np.int64(n), "text": f"t{n}"} for n in range(first, first + count)]


def arrays(first, count):
    numbers = range(first, first + count)
    return {"x": np.array(numbers), "text": [f"t{n}" for n in numbers]}


def numbers(source):
    """Returns the examples of a source, of which each has its own text."""
    rows = source.rows(np.arange(len(source)))
    assert rows["text"].tolist() == [f"t{x}" for x in rows["x"]]
    return rows["x"].tolist()


@pytest.mark.parametrize("make", [arrays, items])
def test_subsets_hold_the_first_or_the_listed_examples(make):
    for count in (3, np.int64(3)):
        assert numbers(subset(make(10, 6), count)) == [10, 11, 12]
    assert numbers(subset(make(10, 6), [4, 0, 4])) == [14, 10, 14]
    assert numbers(subset(subset(make(10, 6), [5, 3, 1]), np.array([2, 0]))) == [11, 15]


@pytest.mark.parametrize("make", [arrays, items])
def test_concatenations_hold_all_examples_in_order(make):
    joined = concatenate([make(0, 3), make(10, 1), make(20, 2)])
    assert numbers(joined) == [0, 1, 2, 10, 20, 21]
    assert joined.rows(np.array([5, 0, 3, 5]))["x"].tolist() == [21, 0, 10, 21]


def test_a_mixture_has_its_shares_and_holds_each_example():
    mixed = mix([items(0, 100), items(1000, 30), items(2000, 5)], [0.5, 0.3, 0.2])
    found = np.array(numbers(mixed))
    assert len(found) == 200
    counts = np.bincount(found // 1000)
    assert counts.tolist() == [100, 60, 40]
    occurring = np.unique(found, return_counts=True)[1]
    assert occurring.tolist() == [1] * 100 + [2] * 30 + [8] * 5
    assert set(found[:50] // 1000) == {0, 1, 2}  # mixed also without shuffle
