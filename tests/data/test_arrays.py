"""Arrays as examples: what they may be, that they are not copied, and what is refused."""

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from ddl.data import Source
from ddl.errors import DataError


class LikeTorch:
    """A tensor of another library, which NumPy can convert."""

    def __array__(self, dtype=None, copy=None):
        return np.array([[1.5], [2.0]], dtype)


def test_no_array_is_copied(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(12, dtype=">i2").reshape(6, 2))
    data = {
        "mapped": np.load(tmp_path / "x.npy", mmap_mode="r"),
        "strided": np.arange(48.0)[::8],
        "transposed": np.arange(12).reshape(2, 6).T,
        "read_only": np.broadcast_to(np.zeros(3, np.uint8), [6, 3]),
        "text": np.array(["a", "bc"] * 3),
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
    assert source.element_spec["x"] == tf.TensorSpec([2], found.dtype, "x")
    assert found.tolist() == [[4, 5], [0, 1]]


ARRAYS = [
    ([True, False], tf.bool),
    ([1, 2], tf.int64),
    ([1.5, np.nan], tf.float64),
    (np.array([1, 2], ml_dtypes.bfloat16), tf.bfloat16),
    (tf.constant([1, 2], tf.int8), tf.int8),
    (LikeTorch(), tf.float64),
    (np.zeros([2, 0, 3], np.uint8), tf.uint8),
    ([b"a\0", b"b"], tf.string),  # text of NumPy's would lose the zero at its end
    (["a\0", b"b"], tf.string),
    ([["a\0"], ["b"]], tf.string),
]


@pytest.mark.parametrize(("values", "dtype"), ARRAYS)
def test_what_numpy_converts_is_an_array(values, dtype):
    source = Source({"x": values})
    assert source.element_spec["x"].dtype == dtype
    expected = values if isinstance(values, list) else np.asarray(values).tolist()
    assert repr(source.rows(np.array([1, 0]))["x"].tolist()) == repr(expected[::-1])


UNFIT = [
    ({}, "must be a dict of features, or a tuple .x, y."),
    (([1],), "must be a dict of features, or a tuple .x, y."),
    ({3: [1]}, "has a feature named 3. Name features by texts"),
    ({"x": {"y": [1]}}, "Feature 'x' of The data is a dict. Put its features beside"),
    ({"x": [1], "y": None}, "Feature 'y' of The data is None. Leave it out"),
    (({"label": [1]}, [2]), "whose x has the feature 'label' too. Rename it"),
    ({"x": []}, r"'x' must have at least one example, got shape \(0,\)"),
    ({"x": 3.0}, "'x' must have shape .examples, .* got one value, 3.0"),
    ({"x": tf.ragged.constant([[1], [2, 3]])}, "got one value, <tf.RaggedTensor"),
    ({"x": [1, 2], "y": [1]}, "'x' has 2 and 'y' has 1"),
    (
        {"x": [[1, 2], [3]]},
        "'x' of The data must be an array .*: .*[^.]. Pad all to one length, or pack",
    ),
    ({"x": np.array([{}, 2], object)}, "'x' must be numbers or text .* objects, such as {}"),
    ({"x": ["a", 2]}, "'x' must be numbers or text .* objects, such as 2"),
    ({"x": np.array(["2020-01-01"], "datetime64[D]")}, "'x' has dtype datetime64"),
    ({"x": np.zeros(2, np.longdouble)}, "'x' has dtype .*, which TensorFlow lacks"),
    ({"x": [1, 2], "weight": [1, 2]}, "one float per example, got int64"),
    ({"x": [1, 2], "weight": [1.0, -2.0]}, "at least 0, got -2.0 in row 1 of 2"),
    ({"x": [1, 2], "weight": [1.0, np.nan]}, "finite numbers .* got nan in row 1"),
    ({"x": [1, 2], "weight": [0.0, 0.0]}, "0 for all 2 examples"),
]


@pytest.mark.parametrize(("data", "message"), UNFIT)
def test_unfit_arrays_are_refused(data, message):
    with pytest.raises(DataError, match=message):
        Source(data)
