"""Sources of what users and libraries have, `decode`, and the errors of both."""

import concurrent.futures
import threading
import time
import types

import numpy as np
import pytest
import tensorflow as tf

from ddl.data import Source
from ddl.errors import ConfigError, DataError
from tests.data.test_arrays import LikeTorch


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


class Lists:
    """A data set as Hugging Face's: asked for many items at once."""

    __init__, __len__, one = Items.__init__, Items.__len__, Items.__getitem__

    def __getitems__(self, indices):
        assert isinstance(indices, list)
        return [self.one(index) for index in indices]


class Blocks(Items):
    """As ddl's own readers."""

    def rows(self, indices):
        return {"x": np.stack([self[i]["x"] for i in indices.tolist()]).astype(">i2")}


def examples(count=10):
    return [{"x": np.full([2], i, np.float32), "label": i} for i in range(count)]


@pytest.mark.parametrize("kind", [Items, Lists, list, Blocks])
def test_items_become_rows(kind):
    source = Source(kind(examples()), files=["a"])
    assert (len(source), source.arrays, source.files) == (10, None, ("a",))
    dtype = tf.int16 if kind is Blocks else tf.float32
    assert source.element_spec["x"] == tf.TensorSpec([2], dtype, "x")
    rows = source.rows(np.array([7, 0, 7]))
    assert rows["x"].tolist() == [[7, 7], [0, 0], [7, 7]]
    assert rows["x"].dtype == dtype.as_numpy_dtype
    assert kind is Blocks or rows["label"].tolist() == [7, 0, 7]


VALUES = [
    (3, tf.int64, []),
    (True, tf.bool, []),
    ("text", tf.string, []),
    (b"jpeg\0", tf.string, []),
    (["a\0", "b"], tf.string, [2]),
    (np.arange(2, dtype=">i4"), tf.int32, [2]),
    (np.array(np.nan, tf.bfloat16.as_numpy_dtype), tf.bfloat16, []),
    (tf.constant([1, 2], tf.uint8), tf.uint8, [2]),
    (LikeTorch(), tf.float64, [2, 1]),
    (np.zeros([0, 2], np.int8), tf.int8, [0, 2]),
]


@pytest.mark.parametrize(("value", "dtype", "shape"), VALUES)
def test_values_of_items(value, dtype, shape):
    source = Source([{"x": value}] * 3)
    assert source.element_spec["x"] == tf.TensorSpec(shape, dtype, "x")
    rows = source.rows(np.array([2, 0]))["x"]
    assert tf.constant(rows).dtype == dtype
    assert rows.dtype.isnative
    assert repr(rows.tolist()) == repr([np.asarray(value, rows.dtype).tolist()] * 2)


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


FRAME = types.SimpleNamespace(__len__=0, __getitem__=0, columns=0, to_numpy=0)
UNFIT = [
    (iter([]), None, "list_iterator has no __len__. .* ddl.data.stream"),
    (FRAME, None, "Namespace is indexed by columns. .*to_numpy"),
    ([], None, "list must have at least one example, got 0. Correct its data"),
    ([5], None, "Item 0 of list must be a dict of features, or a tuple .* got 5"),
    ([{"x": None}], None, "Feature 'x' of Item 0 of list is None. Leave it out"),
    ([{"x": object()}], None, "'x' must be numbers or text .*Python objects, such as <obj"),
    ([{"x": [[1], [2, 3]]}], None, "'x' of Item 0 of list .* Pad all to one length, or pack"),
    (Changing([0]), None, "Two reads of item 0 of Changing differ.*decode"),
    ([{"weight": 1}], None, "'weight' of list must be one float .* got int64 of shape"),
    ([{"x": 1}], lambda i, s: {"x": tf.random.uniform([])}, "test_source.py.*draws .*stateless"),
    ([{"x": 1}], lambda i, s: i["x"], "lambda> must be a dict of features, or"),
    (
        [{"x": 2}],
        lambda i, s: {"x": tf.range(i["x"])},
        r"static shape, got \(None,\). .*Pad .*pack",
    ),
    ([{"x": "a"}], lambda i, s: {"x": tf.strings.split([i["x"]])}, "is a RaggedTensor.*to_tensor"),
    ([{"x": 1}], lambda i, s: {"x": tf.sparse.from_dense([i["x"]])}, "is a SparseTensor.*to_dense"),
    ([{"x": 1}], lambda i, s: {"weight": i["x"]}, "'weight' of list must be one float.* int64"),
]


@pytest.mark.parametrize(("items", "decode", "message"), UNFIT)
def test_unfit_sources_are_refused(items, decode, message):
    with pytest.raises(DataError, match=message):
        Source(items, decode)


LIKE = r"Item 4 of list must be like the first, x int64 \(2,\), got "
OTHER = [
    ({"x": [1, 2, 3]}, LIKE + r"x int64 \(3,\).*Pad all.*pack"),
    ({"x": [1.0, 2.0]}, LIKE + "x float64"),
    ({"x": ["a", "b"]}, LIKE + "x string"),
    ({"y": [1, 2]}, LIKE + "y int64"),
    ({"x": [1, 2], "y": 1}, LIKE + "x int64 .*, y int64"),
    ({"x": [[1], [2, 3]]}, "'x' of Item 4 of list .*NumPy could not convert it"),
    (3, "Item 4 of list must be a dict of features"),
]


@pytest.mark.parametrize(("item", "message"), OTHER)
def test_an_item_unlike_the_first_is_named(item, message):
    source = Source([{"x": [1, 2]}] * 4 + [item])
    with pytest.raises(DataError, match=message) as caught:
        source.rows(np.array([1, 4]))
    assert source.error is caught.value


@pytest.mark.parametrize("error", [KeyError("k"), FileNotFoundError("f"), RuntimeError("r")])
def test_an_error_that_repeats_names_the_item(error):
    items, name = [*examples(5), error], type(error).__name__
    for kind, read, item in [(Items, [1, 5], "5"), (Lists, [5], "5"), (Lists, [1, 5], "1 or a l")]:
        with pytest.raises(DataError, match=f"could not read item {item}.*: {name}: .*Correct"):
            Source(kind(items)).rows(np.array(read))


@pytest.mark.parametrize("kind", [Items, Lists, Blocks])
@pytest.mark.parametrize("error", [DataError("own"), OSError("disk"), MemoryError("full")])
def test_errors_of_the_data_and_of_the_system_stay_as_they_are(error, kind):
    """A restart may cure the latter."""
    source = Source(kind([*examples(5), error]))
    with pytest.raises(type(error)) as caught:
        source.rows(np.array([1, 5]))
    assert caught.value is source.error is error


def test_a_users_object_is_read_by_one_thread_at_a_time():
    items, reading = Lists(examples()), threading.Lock()

    def read(indices):
        assert reading.acquire(blocking=False)
        time.sleep(0.01)
        reading.release()
        return [items.one(0)]

    items.__getitems__ = read
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        list(threads.map(Source(items).rows, np.zeros([8, 1], int)))


def test_a_list_of_items_must_be_answered_item_by_item():
    items = Lists(examples())
    items.__getitems__ = lambda indices: [items.one(0)]
    with pytest.raises(DataError, match="must return 2 items for as many indices, got 1"):
        Source(items).rows(np.array([1, 2]))


def test_the_first_example_that_cannot_be_decoded_is_named():
    good = tf.io.encode_png(np.zeros([1, 1, 1], np.uint8)).numpy()
    pictures = Items([{"png": good}] * 3 + [{"png": good[:20]}])
    assert "png failed on item 3 of Items: " in str(Source(pictures, png).undecodable())
    pictures.describe = "{}.png".format
    assert "png failed on 3.png: " in str(Source(pictures, png).undecodable())
    assert Source(pictures.items[:3], png).undecodable() is None
    assert Source(pictures).undecodable() is None
