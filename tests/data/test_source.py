"""Sources of what users and libraries have, `decode`, and the errors of both."""

import numpy as np
import pytest
import tensorflow as tf

from ddl.data import Source
from ddl.errors import ConfigError, DataError


class Items:
    """A data set as PyTorch's: items one by one. It ends, or raises, at a bad one."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        assert type(index) is int
        if isinstance(self.items[index], Exception):
            raise self.items[index]
        return self.items[index]


def examples(count=10):
    return [{"x": np.full([2], i, np.float32), "label": i} for i in range(count)]


@pytest.mark.parametrize("kind", [Items, list])
def test_items_become_rows(kind):
    source = Source(kind(examples()), files=["a"])
    assert (len(source), source.arrays, source.files) == (10, None, ("a",))
    assert source.element_spec["x"] == tf.TensorSpec([2], tf.float32, "x")
    rows = source.rows(np.array([7, 0, 7]))
    assert rows["x"].tolist() == [[7, 7], [0, 0], [7, 7]]
    assert rows["label"].tolist() == [7, 0, 7]


def crop(item, seed):
    """Changes an item by its seed."""
    noise = tf.random.stateless_uniform([2], seed)
    return {"x": item["x"] + noise, "label": item["label"], "seed": seed}


def png(item, seed):
    return {"x": tf.ensure_shape(tf.io.decode_png(item["png"]), [1, 1, 1])}


def test_decode_makes_the_examples():
    source = Source({"x": np.zeros([4, 2], np.float32), "label": np.arange(4)}, crop)
    assert source.arrays is None
    assert source.element_spec["seed"] == tf.TensorSpec([2], tf.int64, "seed")
    assert set(source.rows(np.array([1]))) == {"x", "label"}
    with pytest.raises(ConfigError, match=r"Source.decode must be a function of \(item, seed\)"):
        Source([{"x": 1}], lambda item: item)


class Changing(list):
    def __getitem__(self, index):
        return {"x": np.random.default_rng().random()}


UNFIT = [
    (iter([]), None, "list_iterator has no __len__. .* ddl.data.stream"),
    ([], None, "list must have at least one example, got 0. Correct its data"),
    ([5], None, "Item 0 of list must be a dict of features, or a tuple .* got 5"),
    ([{"x": [[1], [2, 3]]}], None, "'x' of Item 0 of list .* pad texts to one length, or pack"),
    (Changing([0]), None, "Two reads of item 0 of Changing differ.*decode"),
    ([{"x": 1}], lambda i, s: {"x": tf.random.uniform([])}, "test_source.py.*draws .*stateless"),
    (
        [{"x": 2}],
        lambda i, s: {"x": tf.range(i["x"])},
        r"static shape, got \(None,\). .*pad .*pack",
    ),
]


@pytest.mark.parametrize(("items", "decode", "message"), UNFIT)
def test_unfit_sources_are_refused(items, decode, message):
    with pytest.raises(DataError, match=message):
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


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("kind", ["i2", "u4", "i8", "f2", "f4", "f8", "c8"])
def test_rows_have_this_machines_byte_order(kind, order):
    """tf.data reads the bytes as they lie."""
    source = Source({"x": np.arange(6).astype(order + kind).reshape(3, 2)})
    found = source.rows(np.array([2, 0]))["x"]
    assert found.dtype.isnative
    assert source.element_spec["x"] == tf.TensorSpec([2], found.dtype, "x")
    assert found.tolist() == [[4, 5], [0, 1]]
