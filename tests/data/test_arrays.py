"""Arrays as examples: what they may be, that they are not copied, and what is refused."""

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from ddl.data import Source
from ddl.data.arrays import Arrays
from ddl.errors import DataError


class LikeTorch:
    """A tensor of another library: NumPy can convert it."""

    def __init__(self, array):
        self._array = np.asarray(array)

    def __array__(self, dtype=None, copy=None):
        return self._array.astype(dtype or self._array.dtype)


def rows(data, *indices):
    return Source(data).rows(np.array(indices))


def test_arrays_give_their_rows_in_their_dtypes():
    source = Source({"x": np.arange(12.0).reshape(6, 2), "label": [5, 4, 3, 2, 1, 0]})
    assert len(source) == 6
    assert source.element_spec == {
        "x": tf.TensorSpec([2], tf.float64, "x"),
        "label": tf.TensorSpec([], tf.int64, "label"),
    }
    found = source.rows(np.array([4, 0, 4]))
    assert found["x"].tolist() == [[8, 9], [0, 1], [8, 9]]
    assert found["label"].tolist() == [1, 5, 1]
    assert source.items[1] == {"x": pytest.approx([2, 3]), "label": 4}


@pytest.mark.parametrize(
    ("data", "names"),
    [
        (([1], [2]), ["image", "label"]),
        (([1], [2], [3.0]), ["image", "label", "weight"]),
        (([1], [2], None), ["image", "label"]),
        (({"a": [1], "b": [2]}, [3], [4.0]), ["a", "b", "label", "weight"]),
    ],
)
def test_parts_of_a_tuple_are_named(data, names):
    assert list(Source(data).element_spec) == names


def test_no_array_is_copied(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(12, dtype=">i2").reshape(6, 2))
    read_only = np.arange(6)
    read_only.flags.writeable = False
    data = {
        "mapped": np.load(tmp_path / "x.npy", mmap_mode="r"),
        "strided": np.arange(48.0)[::8],
        "transposed": np.arange(12).reshape(2, 6).T,
        "read_only": read_only,
        "swapped": np.arange(6, dtype=">f8"),
        "text": np.array(["a", "b"] * 3),
        "weight": np.ones(6, np.float32),
    }
    source = Source(data)
    for name, array in data.items():
        assert np.shares_memory(source.arrays[name], array), name
        np.testing.assert_array_equal(source.rows(np.array([5, 1]))[name], array[[5, 1]])


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("kind", ["i2", "u4", "i8", "f2", "f4", "f8", "c8"])
def test_rows_have_this_machines_byte_order(kind, order):
    """tf.data reads the bytes as they lie."""
    source = Source({"x": np.arange(6).astype(order + kind).reshape(3, 2)})
    found = source.rows(np.array([2, 0]))["x"]
    assert found.dtype.isnative
    assert tf.as_dtype(found.dtype) == source.element_spec["x"].dtype
    assert found.tolist() == [[4, 5], [0, 1]]


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([True, False], tf.bool),
        ([1, 2], tf.int64),
        ([1.5, 2], tf.float64),
        (np.array([1, 2], ml_dtypes.bfloat16), tf.bfloat16),
        (tf.constant([1, 2], tf.int8), tf.int8),
        (LikeTorch([[1.0], [2.0]]), tf.float64),
        (np.zeros([2, 0, 3], np.uint8), tf.uint8),
    ],
)
def test_what_numpy_converts_is_an_array(values, dtype):
    source = Source({"x": values})
    assert source.element_spec["x"].dtype == dtype
    np.testing.assert_array_equal(source.rows(np.array([1]))["x"][0], np.asarray(values)[1])


@pytest.mark.parametrize("texts", [[b"a\0", b"b"], ["a\0", "b"], [["a\0"], ["b"]], [b"a\0", "b"]])
def test_text_keeps_zero_bytes_at_its_end(texts):
    """NumPy's text of fixed length would lose them, as raw bytes of an image might."""
    assert Source({"x": texts}).element_spec["x"].dtype == tf.string
    assert rows({"x": texts}, 1, 0)["x"].tolist() == texts[::-1]


def test_text_of_fixed_length_becomes_objects():
    found = rows({"x": np.array(["a", "bc"])}, 1)["x"]
    assert found.dtype == object
    assert found.tolist() == ["bc"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "must be a dict of features, or a tuple .x, y."),
        (([1],), "must be a dict of features, or a tuple .x, y."),
        ({3: [1]}, "has a feature named 3. Name features by texts"),
        ({"x": {"y": [1]}}, "Feature 'x' of The data is a dict of y. Put its features beside"),
        ({"x": [1], "y": None}, "Feature 'y' of The data is None. Leave it out"),
        (({"label": [1]}, [2]), "whose x has the feature 'label' too. Rename it"),
        ({"x": []}, r"'x' must have at least one example, got shape \(0,\). Pass data"),
        ({"x": 3.0}, "'x' must .* got a single value, 3.0. Pass an array, or repeat"),
        ({"x": tf.ragged.constant([[1], [2, 3]])}, "single value, <tf.RaggedTensor.* Pass an arr"),
        ({"x": [1, 2], "y": [1]}, "'x' has 2 and 'y' has 1. Pass arrays"),
        ({"x": [[1, 2], [3]]}, "'x' must be an array .*: .*[^.]. Pad all to one length.*, or pack"),
        ({"x": np.array([{}, 2], object)}, "'x' must be numbers or text .* objects, such as {}"),
        ({"x": ["a", 2]}, "'x' must be numbers or text .* objects, such as 2"),
        ({"x": ["a", None]}, "'x' must be numbers or text .* objects, such as None"),
        ({"x": np.array(["2020-01-01"], "datetime64[D]")}, "'x' has dtype datetime64"),
        ({"x": np.zeros(2, np.longdouble)}, "'x' has dtype .*, which TensorFlow lacks. Convert"),
        ({"x": [1], "weight": np.zeros(1, [("a", "f4")])}, "'weight' has dtype .*TensorFlow lacks"),
        ({"x": [1], "weight": ["a"]}, "'weight' must be one float per example, got object"),
        ({"x": [1, 2], "weight": [1, 2]}, r"float per example, got int64 .*\. Pass an array \["),
        ({"x": [1], "weight": [[1.0]]}, r"float per example, got float64 of shape \(1, 1\)"),
        ({"x": [1, 2], "weight": [1.0, -2.0]}, "at least 0, got -2.0 in example 1. Correct it"),
        ({"x": [1, 2], "weight": [1.0, np.nan]}, "finite number .* got nan in example 1"),
        ({"x": [1, 2], "weight": [0.0, 0.0]}, "0 for all 2 examples.* Give a positive weight"),
    ],
)
def test_unfit_arrays_are_refused(data, message):
    with pytest.raises(DataError, match=message):
        Arrays(data)


def test_features_may_hold_nan_and_infinity():
    assert Source({"x": [np.nan, np.inf]}).element_spec["x"].dtype == tf.float64


def test_weights_are_checked_chunk_by_chunk(monkeypatch):
    monkeypatch.setattr("ddl.data.arrays._CHUNK", 4)
    weight = np.zeros(50, np.float16)
    weight[49] = 1
    Arrays({"weight": weight})
    weight[17] = np.inf
    with pytest.raises(DataError, match="got inf in example 17"):
        Arrays({"weight": weight})
