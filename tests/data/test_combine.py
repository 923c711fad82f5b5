"""Parts, folds and unions of sources: which examples they hold."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from ddl.data.combine import concatenate, k_fold, mix, subset
from ddl.data.source import Source
from ddl.errors import ConfigError, DataError

SIDES = ("train", "test")


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
@pytest.mark.parametrize(("count", "folds"), [(5, 2), (11, 4), (6, 6), (1_100, 3)])
def test_each_example_is_in_the_test_data_of_one_fold(make, count, folds):
    def sides(seed):
        return [
            [numbers(k_fold(data, folds, n, s, seed=seed)) for s in SIDES] for n in range(folds)
        ]

    data = make(0, count)
    for train, test in sides(7):
        assert sorted(train + test) == list(range(count))
        assert len(test) in (count // folds, -(-count // folds))
    assert sorted(x for _, test in sides(7) for x in test) == list(range(count))
    assert sides(7) != sides(8)


def test_folds_are_as_unlike_as_by_chance():
    """A pair of the same fold in one seed is one in another seed as often as any pair."""
    tests = [numbers(k_fold(arrays(0, 2_000), 4, 0, "test", seed=seed)) for seed in range(6)]
    for first, second in itertools.combinations(tests, 2):
        assert abs(len({*first} & {*second}) - 125) < 6 * 9  # hypergeometric: 9 is its deviation
    assert all(set(np.diff(test)) >= {1, 2, 3} for test in tests)  # neither blocks nor strides


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 0, "test"), "k_fold.folds must be from 2 to 5, .* got 1 and 0"),
        ((6, 0, "test"), "k_fold.folds must be from 2 to 5, .* got 6 and 0"),
        ((2.5, 0, "test"), "k_fold.folds must be from 2 to 5, .* got 2.5 and 0"),
        ((3, 3, "test"), "k_fold.fold from 0 to folds - 1, got 3 and 3"),
        ((3, -1, "test"), "k_fold.fold from 0 to folds - 1, got 3 and -1"),
        ((3, 0, "eval"), "k_fold.split must be 'train' or 'test', got 'eval'"),
    ],
)
def test_folds_that_are_none(arguments, message):
    with pytest.raises(ConfigError, match=message):
        k_fold(arrays(0, 5), *arguments)


@pytest.mark.parametrize("make", [arrays, items])
def test_concatenations_hold_all_examples_in_order(make):
    joined = concatenate([make(0, 3), make(10, 1), make(20, 2)])
    assert numbers(joined) == [0, 1, 2, 10, 20, 21]
    assert joined.rows(np.array([5, 0, 3, 5]))["x"].tolist() == [21, 0, 10, 21]


def test_labels_must_mean_the_same():
    one, other = Source(items(0, 2)), Source(items(2, 2))
    one.items, other.items = SimpleNamespace(class_names="ab"), SimpleNamespace(class_names="b")
    with pytest.raises(DataError, match="must have the same classes, got a, b, and b"):
        concatenate([one, other])


def test_a_mixture_has_its_shares_and_holds_each_example():
    mixed = mix([items(0, 100), items(1000, 30), items(2000, 5)], [0.5, 0.3, 0.2])
    found = np.array(numbers(mixed))
    assert len(found) == 200
    counts = np.bincount(found // 1000)
    assert counts.tolist() == [100, 60, 40]
    occurring = np.unique(found, return_counts=True)[1]
    assert occurring.tolist() == [1] * 100 + [2] * 30 + [8] * 5
    assert set(found[:50] // 1000) == {0, 1, 2}  # mixed also without shuffle
