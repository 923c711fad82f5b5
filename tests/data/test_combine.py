"""Parts and unions of sources: which examples they hold."""

import numpy as np
import pytest
import tensorflow as tf

from ddl.data.combine import concatenate, mix, subset
from ddl.data.source import Source
from ddl.errors import ConfigError, DataError


class Items:
    """Numbers from `first` on, read one by one."""

    class_names = ("even", "odd")

    def __init__(self, first, count):
        self.first, self.count = first, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return {"x": np.int64(self.first + index), "text": f"t{self.first + index}"}


def arrays(first, count):
    return {
        "x": np.arange(first, first + count),
        "text": [f"t{n}" for n in range(first, first + count)],
    }


def numbers(source):
    """Returns the examples of a source, of which each has its own text."""
    rows = source.rows(np.arange(len(source)))
    assert [t.decode() if isinstance(t, bytes) else t for t in rows["text"]] == [
        f"t{x}" for x in rows["x"]
    ]
    return rows["x"].tolist()


def decode_as(name):
    def decode(item, seed):
        return {"x": item["x"], "text": tf.strings.join([name, item["text"]])}

    return decode


MAKES = [arrays, Items]


@pytest.mark.parametrize("make", MAKES)
def test_subsets_hold_the_first_or_the_listed_examples(make):
    assert numbers(subset(make(10, 6), 3)) == [10, 11, 12]
    assert numbers(subset(make(10, 6), [4, 0, 4])) == [14, 10, 14]
    assert numbers(subset(subset(make(10, 6), [5, 3, 1]), np.array([2, 0]))) == [11, 15]


@pytest.mark.parametrize("make", MAKES)
def test_concatenations_hold_all_examples_in_order(make):
    joined = concatenate([make(0, 3), make(10, 1), make(20, 2)])
    assert numbers(joined) == [0, 1, 2, 10, 20, 21]
    rows = joined.rows(np.array([5, 0, 3, 5]))
    assert rows["x"].tolist() == [21, 0, 10, 21]


def test_parts_of_arrays_in_memory_stay_arrays(tmp_path):
    for made in (subset(arrays(0, 4), 2), concatenate([arrays(0, 4), arrays(4, 1)])):
        assert made.arrays is not None
    np.save(tmp_path / "x.npy", np.arange(4))
    mapped = {"x": np.load(tmp_path / "x.npy", mmap_mode="r")}
    assert subset(mapped, 2).arrays is None


def test_a_mixture_has_its_shares_and_holds_each_example():
    mixed = mix([Items(0, 100), Items(1000, 30), Items(2000, 5)], [0.5, 0.3, 0.2])
    found = np.array(numbers(mixed))
    assert len(found) == 200
    counts = np.bincount(found // 1000)
    assert counts.tolist() == [100, 60, 40]
    occurring = np.unique(found, return_counts=True)[1]
    assert occurring.tolist() == [1] * 100 + [2] * 30 + [8] * 5
    assert set(found[:50] // 1000) == {0, 1, 2}  # mixed also without shuffle


def test_a_mixture_of_sources_of_one_size_does_not_align_them():
    found = np.array(numbers(mix([Items(0, 500), Items(1000, 500)], [0.5, 0.5])))
    first, second = found[found < 1000], found[found >= 1000] - 1000
    assert np.mean(first[:400] == second[:400]) < 0.05


def test_one_decode_is_passed_on():
    decode = decode_as("a")
    sources = [Source(Items(n, 2), decode, files=[f"file{n}"]) for n in (0, 5)]
    for made in (concatenate(sources), subset(sources[0], 1), mix(sources, [0.5, 0.5])):
        assert made.decode is decode
        assert made.files[0] == "file0"


def test_a_part_has_the_attributes_of_its_source():
    assert subset(Items(0, 3), 2).items.class_names == ("even", "odd")
    assert not hasattr(concatenate([Items(0, 3), Items(3, 1)]).items, "class_names")


X = {"x": np.arange(4)}
WRONG = {
    "too many": (lambda: subset(X, 5), "from 1 to 4"),
    "none": (lambda: subset(X, 0), "from 1 to 4"),
    "an index beyond": (lambda: subset(X, [0, 4]), "indices below that"),
    "a negative index": (lambda: subset(X, [-1]), "indices below that"),
    "a fraction": (lambda: subset(X, [0.5]), "indices below that"),
    "a tf.data.Dataset": (lambda: concatenate([tf.data.Dataset.range(3)]), "take, skip"),
    "no sources": (lambda: mix([], []), "list of at least one source"),
    "other features": (lambda: concatenate([X, {"y": X["x"]}]), "Number 0 has x.*number 1 has y"),
    "other shapes": (lambda: mix([X, {"x": np.ones([2, 3])}], [0.5, 0.5]), "same features"),
    "other decodes": (
        lambda: concatenate([Source(Items(0, 2), decode_as("a")), Items(2, 2)]),
        "same features and decode.*one decode to all",
    ),
    "shares": (lambda: mix([X, X], [0.5, 0.6]), "positive numbers with sum 1"),
    "no share": (lambda: mix([X, X], [1.0, 0.0]), "positive"),
}


@pytest.mark.parametrize(("call", "told"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_refused(call, told):
    with pytest.raises((ConfigError, DataError), match=told):
        call()
