import numpy as np
import pytest
import tensorflow as tf

from ddl.data import RandomAccessSource
from ddl.data.checks import data_errors
from ddl.errors import ConfigError, DataError


def test_looked_up_examples_have_static_shapes(tmp_path):
    stored = np.memmap(tmp_path / "x", np.float32, "w+", shape=(20, 3))
    stored[:] = np.arange(60).reshape(20, 3)
    source = RandomAccessSource(lambda i: {"x": stored[i], "label": i * 2}, 20)
    assert source.element_spec["x"] == tf.TensorSpec([3], tf.float32, "x")
    dataset = tf.data.Dataset.range(4).batch(2, drop_remainder=True).map(source.gather)
    assert dataset.element_spec["x"].shape == [2, 3]
    last = list(dataset)[-1]
    assert last["x"].numpy().tolist() == [[6, 7, 8], [9, 10, 11]]
    assert last["label"].numpy().tolist() == [4, 6]


@pytest.mark.parametrize(
    ("lookup", "message"),
    [
        (
            lambda i: {"x": np.zeros([1, 3], np.float32)},
            r"must return 'x' .* got float32 of shape \(1, 3\)",
        ),
        (lambda i: {"x": np.zeros([2, 3])}, "must return 'x' .* got float64"),
        (lambda i: {"y": np.zeros([2, 3])}, "must return the features x, got y"),
        (
            lambda i: {"x": {}[int(i[0])]},
            r"examples 7, 8 raised KeyError: 7, raised in .*random_access.py:\d+\. Correct the",
        ),
        (
            lambda i: {"x": np.where(i == 8, np.nan, 1)[:, None].repeat(3, 1).astype("f4")},
            "'x' must be finite, .* first in example 8. Remove",
        ),
        (lambda i: [i], r"must return a dict .*, got list from .*test_random_access.py:\d+: <lam"),
    ],
)
def test_a_failing_lookup_tells_why(lookup, message):
    source = RandomAccessSource(lookup, 10, {"x": tf.TensorSpec([3], tf.float32)})
    with pytest.raises(tf.errors.OpError, match=message):
        tf.function(source.gather)(tf.constant([7, 8], tf.int64))


def test_text_keeps_zero_bytes_at_its_end():
    """Arrays of fixed-length text lose them."""
    texts = [b"a\0", b"b\0\0", "c\0"]
    source = RandomAccessSource(lambda indices: {"x": [texts[i] for i in indices]}, 3)
    read = tf.function(source.gather)(tf.constant([2, 0, 1], tf.int64))["x"]
    assert read.numpy().tolist() == [b"c\0", b"a\0", b"b\0\0"]


def test_an_error_of_the_system_may_pass():
    def lookup(indices):
        raise ConnectionResetError("Connection reset by peer")

    with pytest.raises(ConnectionResetError):  # not a DataError, which is never restarted
        RandomAccessSource(lookup, 10)
    source = RandomAccessSource(lookup, 10, {"x": tf.TensorSpec([3], tf.float32)})
    with pytest.raises(tf.errors.UnknownError, match="ConnectionResetError") as raised:
        tf.function(source.gather)(tf.constant([7, 8], tf.int64))
    assert "Looking up examples" not in str(raised.value)
    with pytest.raises(tf.errors.UnknownError, match="ConnectionResetError"), data_errors():
        next(iter(source.batches(2, 0, seed=0, shuffle=False)))


@pytest.mark.parametrize(("text", "restarts"), [("Input/output error", True), ("bad", False)])
def test_only_a_failing_disk_or_network_is_no_fault_of_the_data(text, restarts):
    kind = tf.errors.UnknownError if restarts else DataError
    with pytest.raises(kind, match=text), data_errors():
        raise tf.errors.UnknownError(None, None, f"a.tfrecord; {text} [Op:IteratorGetNext]")


def test_refuses_a_lookup_of_other_arguments():
    with pytest.raises(ConfigError, match=r"lookup must be a function of \(indices\), got .*\(\)"):
        RandomAccessSource(lambda: {}, 10)
