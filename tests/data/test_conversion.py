"""What users pass as data."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl.data.conversion as module
from ddl.data import Source, as_source
from ddl.data.conversion import sources_by_name
from ddl.errors import DataError
from tests.data.test_source import Items, Lists, examples

X, Y = np.zeros([4, 2]), np.arange(4)
ITEMS = Items(examples())


class Sequences(keras.utils.PyDataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return X, Y


@pytest.fixture(autouse=True)
def streamed(monkeypatch):
    """The arguments that `ddl.data.stream` gets."""
    given = []
    monkeypatch.setattr(module, "stream", given.append)
    return given


CONVERTED = [
    ({"x": X, "y": Y}, {"x", "y"}),
    ((X, Y), {"image", "label"}),
    ([X, Y], {"image", "label"}),
    ([X, Y, np.ones(4)], {"image", "label", "weight"}),
    (({"a": X, "b": X}, Y), {"a", "b", "label"}),
    ({"x": X.tolist()}, {"x"}),
    (ITEMS, {"x", "label"}),
    (Lists(examples()), {"x", "label"}),
    (examples(2), {"x", "label"}),
    ([(X[0], 1)] * 2, {"image", "label"}),
    ([({"a": 1}, 1)] * 5, {"a", "label"}),
    ([[X[0], Y[0]]] * 4, {"image", "label"}),
]


@pytest.mark.parametrize(("data", "features"), CONVERTED)
def test_arrays_and_items_become_a_source(data, features, streamed):
    source = as_source(data)
    assert isinstance(source, Source)
    assert set(source.element_spec) == features
    assert as_source(source) is source
    assert not streamed


SET, SOURCE = tf.data.Dataset.range(3), Source({"x": X})


@pytest.mark.parametrize("data", [SET, Sequences(), lambda: iter([1]), iter([1])])
def test_other_data_are_streamed(data, streamed):
    as_source(data)
    assert streamed == [data]


UNFIT = [
    ((SET, SOURCE), "D must be one data set, got .*Dataset', 'Source'.*concatenate or mix"),
    ({"x": SOURCE, "y": X}, "D must be one data set, got .'Source', 'ndarray'.*by name"),
    (None, "NoneType has no __len__. .*\n  in D$"),
    ("data.csv", "D must be arrays or a reader .* 'data.csv'"),
    (X, "Item 0 of ndarray must be a dict of features.*(\n.*)*\n  in D$"),
    ({"a": {"x": X}}, "Feature 'a' of The data is a dict. Put .*\n  in D$"),
    ((X, Y[:3]), "'image' has 4 and 'label' has 3.*\n  in D$"),
]


@pytest.mark.parametrize(("data", "message"), UNFIT)
def test_unfit_data_are_refused(data, message):
    with pytest.raises(DataError, match=message):
        as_source(data, "D")


SETS = [{"x": X}, (X, Y), [X, Y], SOURCE, ITEMS, SET, Sequences(), examples, iter([1])]


@pytest.mark.parametrize("one", SETS)
def test_data_by_name(one, streamed):
    found = sources_by_name({"labelled": {"x": X}, "other": one})
    assert list(found) == ["labelled", "other"]
    assert list(sources_by_name({"other": one})) == ["other"]
    assert isinstance(found["other"], Source) or streamed == [one, one]


@pytest.mark.parametrize("feature", [X, [1, 2], (1, 2), ["a", "b"], range(3), tf.zeros([2])])
def test_one_data_set_has_no_name(feature):
    assert (
        list(sources_by_name({"x": feature})) == list(sources_by_name((feature, feature))) == [""]
    )


BADLY_NAMED = [
    ({1: SOURCE}, "needs a name of text, got 1"),
    ({"a": {"x": X}, "b": {"x": []}}, r"'x' must have .*\n  in Trainer.train_data\['b'\]$"),
]


@pytest.mark.parametrize(("data", "message"), BADLY_NAMED)
def test_unfit_training_data_are_named(data, message):
    with pytest.raises(DataError, match=message):
        sources_by_name(data)
