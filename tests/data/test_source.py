"""Sources of what users and libraries have, `decode`, and the errors of both."""

import numpy as np
import pytest
import tensorflow as tf

from ddl.data import Source
from ddl.errors import ConfigError, DataError
from tests.data.test_arrays import LikeTorch


class Items:
    """Items given one by one. Says which were read."""

    def __init__(self, items):
        self.items = items
        self.read = []

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        self.read.append(index)
        return self.items[index]


class Batched(Items):
    """As data sets of PyTorch, grain and Hugging Face, which are asked for many items at once."""

    def __getitems__(self, indices):
        assert isinstance(indices, list)
        return [self[index] for index in indices]


class Blocks:
    """As ddl's own readers."""

    def __len__(self):
        return 10

    def rows(self, indices):
        return {
            "x": np.stack([indices, -indices], 1).astype(">i2"),
            "t": np.array(["a"])[indices * 0],
        }


def examples(count=10):
    return [{"x": np.full([2], i, np.float32), "label": i} for i in range(count)]


@pytest.mark.parametrize("kind", [Items, Batched, list])
def test_items_become_rows(kind):
    source = Source(kind(examples()))
    assert len(source) == 10
    assert source.arrays is None
    assert source.element_spec == {
        "x": tf.TensorSpec([2], tf.float32, "x"),
        "label": tf.TensorSpec([], tf.int64, "label"),
    }
    rows = source.rows(np.array([7, 0, 7]))
    assert rows["x"].tolist() == [[7, 7], [0, 0], [7, 7]]
    assert rows["label"].tolist() == [7, 0, 7]


def test_indices_are_pythons_integers():
    """Lists and many data sets of PyTorch take no others as keys."""
    items = Items(examples())
    Source(items).rows(np.array([3]))
    assert {type(index) for index in items.read} == {int}


def test_items_may_be_given_by_lists_alone():
    class ByLists:
        def __len__(self):
            return 4

        def __getitems__(self, indices):
            return [{"x": index} for index in indices]

    assert Source(ByLists()).rows(np.array([3, 1]))["x"].tolist() == [3, 1]


def test_readers_give_blocks():
    source = Source(Blocks(), files=["a", "b"])
    assert source.files == ("a", "b")
    assert source.element_spec["x"] == tf.TensorSpec([2], tf.int16, "x")
    assert source.element_spec["t"] == tf.TensorSpec([], tf.string, "t")
    rows = source.rows(np.array([3, 1]))
    assert rows["x"].dtype == np.dtype("=i2")
    assert rows["x"].tolist() == [[3, -3], [1, -1]]
    assert rows["t"].tolist() == ["a", "a"]


@pytest.mark.parametrize(
    ("value", "dtype", "shape"),
    [
        (3, tf.int64, []),
        (2.5, tf.float64, []),
        (True, tf.bool, []),
        ("text", tf.string, []),
        (b"jpeg\0", tf.string, []),
        (["a\0", "b"], tf.string, [2]),
        ([1, 2], tf.int64, [2]),
        (np.float16(2), tf.float16, []),
        (np.arange(2, dtype=">i4"), tf.int32, [2]),
        (np.arange(6).reshape(2, 3).T, tf.int64, [3, 2]),
        (np.array(np.nan, tf.bfloat16.as_numpy_dtype), tf.bfloat16, []),
        (np.nan, tf.float64, []),
        (tf.constant([1, 2], tf.uint8), tf.uint8, [2]),
        (LikeTorch([[1.5]]), tf.float64, [1, 1]),
        (np.zeros([0, 2], np.int8), tf.int8, [0, 2]),
    ],
)
def test_values_of_items(value, dtype, shape):
    source = Source([{"x": value}] * 3)
    assert source.element_spec["x"] == tf.TensorSpec(shape, dtype, "x")
    rows = source.rows(np.array([2, 0]))["x"]
    assert tf.constant(rows).dtype == dtype
    assert rows.dtype.isnative
    assert repr(rows.tolist()) == repr([np.asarray(value, rows.dtype).tolist()] * 2)


def test_tuples_of_keras_are_named():
    assert list(Source([(1, 2)] * 4).element_spec) == ["image", "label"]
    assert list(Source([({"a": 1}, 2, 0.5)] * 4).element_spec) == ["a", "label", "weight"]


def crop(item, seed):
    """An example of a shape of its own, drawn by the seed."""
    noise = tf.random.stateless_uniform([2], seed)
    return {"x": item["x"] + noise, "label": item["label"], "seed": seed}


def test_decode_makes_the_examples():
    source = Source({"x": np.zeros([4, 2], np.float32), "label": np.arange(4)}, crop)
    assert source.arrays is None
    assert source.element_spec["seed"] == tf.TensorSpec([2], tf.int64, "seed")
    assert set(source.rows(np.array([1]))) == {"x", "label"}


def of(*items):
    return lambda: Source(list(items))


def decoded(decode, item=0):
    return lambda: Source([{"x": item}], decode)


class Changing(Items):
    def __getitem__(self, index):
        self.read.append(index)
        return {"x": len(self.read)}


class Frame:
    """As pandas's."""

    columns = ("x",)
    __len__ = __getitem__ = to_numpy = lambda *_: 1


class Endless:
    def __iter__(self):
        return iter([])


def drawing(item, seed):
    return {"x": tf.random.uniform([2])}


BAD = {
    "no length": (lambda: Source(Endless()), "Endless has no __len__. .* ddl.data.stream"),
    "no index": (lambda: Source({1, 2}), "set has no __getitem__. Pass a generator"),
    "a frame": (lambda: Source(Frame()), "Frame is indexed by columns. .*to_numpy"),
    "nothing": (of(), "list must have at least one example, got 0. Correct its data"),
    "no example": (of(5), "Item 0 of list must be a dict of features, or a tuple .* got 5"),
    "an array": (lambda: Source(np.zeros([3, 2])), "Item 0 of ndarray must be a dict"),
    "a dict in a dict": (of({"x": {"y": 1}}), "Feature 'x' of Item 0 of list is a dict of y. Put"),
    "None": (of({"x": None}), "Feature 'x' of Item 0 of list is None. Leave it out"),
    "an object": (of({"x": object()}), "Feature 'x' must be numbers or text .*Python objects"),
    "a date": (of({"x": np.datetime64("2020")}), "'x' has dtype datetime64.*lacks. Convert it"),
    "ragged": (
        of({"x": [[1], [2, 3]]}),
        "Item 0 of list: .*'x' .* Pad all to one length.* or pack",
    ),
    "changing": (lambda: Source(Changing([0])), "Two reads of item 0 of Changing differ.*decode"),
    "weights": (of({"weight": 1}), "'weight' of list must be one float .* got int64 of shape"),
    "weight rows": (of({"weight": [1.0]}), r"one float per example, got float64 of shape \(1,\)"),
    "draws": (decoded(drawing), "test_source.py:.*drawing draws random numbers by .*stateless"),
    "no dict": (decoded(lambda item, seed: item["x"]), "lambda> must be a dict of features, or"),
    "a shape": (
        decoded(lambda item, seed: {"x": tf.io.decode_raw(item["x"], tf.uint8)}, b"ab"),
        r"'x' of .*lambda> must have one static shape, got \(None,\). .*ensure_shape. Pad .*pack",
    ),
    "a ragged tensor": (
        decoded(lambda item, seed: {"x": tf.strings.split([item["x"]])}, "a b"),
        "'x' of .*lambda> is a ragged tensor. Call feature.to_tensor",
    ),
    "a sparse tensor": (
        decoded(lambda item, seed: {"x": tf.sparse.from_dense([item["x"]])}),
        "'x' of .*lambda> is a sparse tensor. Call tf.sparse.to_dense",
    ),
    "a decoded weight": (
        decoded(lambda item, seed: {"weight": item["x"]}),
        "'weight' of list must be one float per example, got int64",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_unfit_sources_are_refused(case):
    make, message = BAD[case]
    with pytest.raises(DataError, match=message):
        make()


def test_decode_must_take_an_item_and_a_seed():
    with pytest.raises(ConfigError, match=r"Source.decode must be a function of \(item, seed\)"):
        Source([{"x": 1}], lambda item: item)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (
            {"x": [1, 2, 3]},
            r"'x' of item 4 of list is int64 of shape \(3,\), .*\(2,\). Pad all.*pack",
        ),
        ({"x": [1.0, 2.0]}, r"'x' of item 4 of list is float64 .*item 0 int64 .* Convert it"),
        ({"x": ["a", "b"]}, r"'x' of item 4 of list is string .*item 0 int64 .* Convert it"),
        ({"y": [1, 2]}, "Item 4 of list has the features y; item 0 has x. Give all"),
        ({"x": [1, 2], "y": 1}, "Item 4 of list has the features x, y; item 0 has x"),
        ({"x": [[1], [2, 3]]}, "Item 4 of list: Feature 'x' .*NumPy could not convert it"),
        (3, "Item 4 of list must be a dict of features"),
    ],
)
def test_an_item_unlike_the_first_is_named(item, message):
    source = Source([{"x": [1, 2]}] * 4 + [item])
    with pytest.raises(DataError, match=message) as caught:
        source.rows(np.array([1, 4]))
    assert source.error is caught.value


class Raising(Items):
    def __init__(self, error):
        super().__init__(examples())
        self.error = error

    def __getitem__(self, index):
        if index == 5:
            raise self.error
        return self.items[index]


class RaisingBatched(Raising):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


@pytest.mark.parametrize("error", [KeyError("k"), FileNotFoundError("f"), RuntimeError("r")])
def test_an_error_that_repeats_names_the_item(error):
    name = type(error).__name__
    with pytest.raises(DataError, match=f"Raising could not read item 5: {name}: .*Correct"):
        Source(Raising(error)).rows(np.array([1, 5, 2]))
    with pytest.raises(DataError, match=f"could not read item 1 or a later one: {name}: .*Correct"):
        Source(RaisingBatched(error)).rows(np.array([1, 5, 2]))
    with pytest.raises(DataError, match=f"could not read item 5: {name}: .*Correct"):
        Source(RaisingBatched(error)).rows(np.array([5]))


@pytest.mark.parametrize("kind", [Raising, RaisingBatched])
@pytest.mark.parametrize("error", [DataError("own"), OSError("disk"), MemoryError("full")])
def test_data_errors_and_those_of_the_system_stay_as_they_are(error, kind):
    """A restart may cure the latter."""
    source = Source(kind(error))
    with pytest.raises(type(error)) as caught:
        source.rows(np.array([1, 5]))
    assert caught.value is error
    assert source.error is error


def test_a_list_of_items_must_be_answered_item_by_item():
    class Short(Batched):
        def __getitems__(self, indices):
            return super().__getitems__(indices[:1])

    with pytest.raises(DataError, match="one item for each of the 2 indices in its list, got 1"):
        Source(Short(examples())).rows(np.array([1, 2]))


def png(item, seed):
    return {"x": tf.ensure_shape(tf.io.decode_png(item["png"]), [1, 1, 1])}


def test_the_first_example_that_cannot_be_decoded_is_named():
    good = tf.io.encode_png(np.zeros([1, 1, 1], np.uint8)).numpy()
    pictures = [{"png": good}] * 3 + [{"png": good[:20]}]
    assert Source(pictures, png).damaged() == (
        "The first example that cannot be decoded is item 3 of list."
    )
    assert Source(pictures[:3], png).damaged() is None
    assert Source(pictures).damaged() is None

    class Described(Items):
        def describe(self, index):
            return f"{index}.png"

    assert Source(Described(pictures), png).damaged().endswith("is 3.png.")
