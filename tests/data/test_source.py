"""Sources of what users and libraries have, `decode`, and the errors of both."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from ddl.data import Source
from ddl.data.checks import check_same_classes
from ddl.data.pipeline import BatchPipeline
from ddl.errors import ConfigError, DataError


def png(item, seed):
    return {"x": tf.ensure_shape(tf.io.decode_png(item["png"]), [1, 1, 1])}


class Changing(list):
    def __getitem__(self, index):
        return {"x": np.random.default_rng().random()}


UNFIT = [
    (iter([]), None, "list_iterator has no __len__. .* ddl.data.stream"),
    ([], None, "list must have at least one example, got 0. Correct its data"),
    ([5], None, "Item 0 of list must be a dict of features, or a tuple .* got 5"),
    ([([[[1], [2, 3]]], 0)], None, "Item 0 of list has 1 arrays as x. Give x as one array"),
    ([{"x": []}], None, "Feature 'x' of Item 0 of list has no values"),
    ([{"x": np.ma.array([1, 2], mask=[0, 1])}], None, "has masked values. Fill them"),
    ([{"x": [[1], [2, 3]]}], None, "'x' of Item 0 of list .* pad texts to one length, or pack"),
    (Changing([0]), None, "Two reads of item 0 of Changing differ.*decode"),
    ([{"x": 1}], lambda item: item, r"Source.decode must be a function of \(item, seed\)"),
    ([{"x": 1}], lambda i, s: {"x": tf.random.uniform([])}, "test_source.py.*draws .*stateless"),
    ([{"x": 1}], lambda i, s: {"x": keras.random.normal([])}, "draws .*stateless"),
    ([{"x": 2}], lambda i, s: {"x": tf.range(i["x"])}, r"static shape, got \(None,\).* pad .*pack"),
]


@pytest.mark.parametrize(("items", "decode", "message"), UNFIT)
def test_unfit_sources_are_refused(items, decode, message):
    with pytest.raises((ConfigError, DataError), match=message):
        Source(items, decode)


LIKE = r"Item 4 of list must be like the first, x int64 \(2,\), got "
OTHER = [
    ({"x": [1, 2, 3]}, LIKE + r"x int64 \(3,\).*Resize.*pad.*pack"),
    ({"x": [1.0, 2.0]}, LIKE + "x float64"),
    (3, "Item 4 of list must be a dict of features"),
]


@pytest.mark.parametrize(("item", "message"), OTHER)
def test_an_item_unlike_the_first_is_named(item, message):
    source = Source([{"x": [1, 2]}] * 4 + [item])
    with pytest.raises(DataError, match=message) as caught:
        source.rows(np.array([1, 4]))
    assert source.error is caught.value


class WithNamesOfReaders(list):
    """A user's class, with attributes that mean something else in the readers of ddl."""

    rows, class_names = (5, 6), len

    def describe(self):
        raise AssertionError


def test_a_users_class_may_have_any_attributes():
    source = Source(WithNamesOfReaders([{"x": 1.0}, {"x": 2.0}]))
    assert source.rows(np.array([1, 0]))["x"].tolist() == [2, 1]
    assert source.describe(1) == "item 1 of WithNamesOfReaders"
    check_same_classes(source, source)


class Photos:  # so large that each is read alone
    def __len__(self):
        return 2

    def rows(self, indices):
        return {"x": np.zeros((1, 999, 9_999) if indices[0] else (1, 9_999, 999), "f4")}


def test_rows_of_another_shape_and_the_same_size_are_no_examples():
    updates, _ = BatchPipeline(Source(Photos()), 1).rows(tf.distribute.get_strategy())
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"Shape of tensor .* \[1,999,9999\]"):
        list(updates.take(2))


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("kind", ["i2", "u4", "i8", "f2", "f4", "f8", "c8"])
def test_rows_have_this_machines_byte_order(kind, order):
    """tf.data reads the bytes as they lie."""
    source = Source({"x": np.arange(6).astype(order + kind).reshape(3, 2)})
    found = source.rows(np.array([2, 0]))["x"]
    assert found.dtype.isnative
    assert source.element_spec["x"] == tf.TensorSpec([2], found.dtype, "x")
    assert found.tolist() == [[4, 5], [0, 1]]
