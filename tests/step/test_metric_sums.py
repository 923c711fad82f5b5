import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from ddl.step.metric_sums import MetricSums
from ddl.tasks.classification import accuracy, top_k_accuracy


def test_accuracy():
    logits = tf.constant([[1.0, 2.0], [3.0, 0.0], [0.0, 1.0]])
    assert accuracy(tf.constant([1, 1, 1], tf.int64), logits).numpy().tolist() == [1, 0, 1]


def test_top_k_counts_the_k_largest():
    logits = tf.constant([[4.0, 3.0, 2.0, 1.0]] * 4)
    labels = tf.constant([0, 1, 2, 3], tf.int64)
    assert top_k_accuracy(labels, logits, 2).numpy().tolist() == [1, 1, 0, 0]


def test_top_k_gives_nothing_for_a_model_that_says_the_same_of_all_classes():
    logits = tf.zeros([2, 10])
    assert top_k_accuracy(tf.constant([0, 9]), logits, 5).numpy().tolist() == [0, 0]


NAN = np.nan
WITH_NAN = [[NAN, NAN, NAN], [NAN, 1, 2], [2, NAN, 1], [1, 2, NAN], [NAN, np.inf, -np.inf]]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_row_with_nan_is_wrong_for_every_label(dtype):
    logits = tf.cast(tf.constant(WITH_NAN, tf.float64), dtype)
    for label in range(3):
        labels = tf.fill([len(WITH_NAN)], tf.constant(label, tf.int64))
        assert accuracy(labels, logits).numpy().tolist() == [0] * len(WITH_NAN)
        for k in (1, 2, 3, 4):
            assert top_k_accuracy(labels, logits, k).numpy().tolist() == [0] * len(WITH_NAN)


def test_infinite_logits_are_ordered_as_numbers():
    logits = tf.constant([[-np.inf, 0.0, np.inf]] * 3)
    labels = tf.constant([0, 1, 2])
    assert accuracy(labels, logits).numpy().tolist() == [0, 0, 1]
    assert top_k_accuracy(labels, logits, 2).numpy().tolist() == [0, 1, 1]


def test_the_first_of_equal_logits_is_predicted():
    labels = tf.constant([0, 1, 2])
    assert accuracy(labels, tf.zeros([3, 3])).numpy().tolist() == [1, 0, 0]


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16", "int32", "uint32", "int64"])
def test_labels_of_every_integer_dtype(dtype):
    logits = tf.one_hot([3, 1, 120], 121)
    labels = tf.cast(tf.constant([3, 0, 120]), dtype)
    assert accuracy(labels, logits).numpy().tolist() == [1, 0, 1]
    assert top_k_accuracy(labels, logits, 1).numpy().tolist() == [1, 0, 1]


@given(
    st.lists(
        st.tuples(st.floats(-1e3, 1e3), st.just(0.0) | st.floats(1e-3, 10)), min_size=1, max_size=40
    ),
    st.integers(1, 4),
)
def test_sums_add_up_over_any_split(rows, parts):
    values = np.array([value for value, _ in rows])
    weight = np.array([weight for _, weight in rows])
    layout = MetricSums(["loss"])
    total = layout.zeros()
    for part in range(parts):
        total += layout.sums({"loss": values[part::parts]}, tf.constant(weight[part::parts]))
    if weight.sum() > 0:
        expected = np.average(values, weights=weight)
        assert layout.means(total)["loss"] == pytest.approx(expected, rel=1e-9, abs=1e-9)
    else:
        assert math.isnan(layout.means(total)["loss"])


@pytest.mark.parametrize(
    ("function", "mean", "expected"),
    [
        (math.exp, 710.0, math.inf),  # OverflowError
        (math.log, 0.0, NAN),  # ValueError
        (lambda mean: 1 / mean, 0.0, NAN),  # ZeroDivisionError
        (lambda mean: 1.0, NAN, NAN),  # not called: there is no mean
        (math.exp, 1.0, math.e),
    ],
)
def test_a_function_without_a_value_is_nan(function, mean, expected):
    layout = MetricSums(["loss", "own"], {"own": function})
    weight = 0.0 if math.isnan(mean) else 2.0
    sums = np.array([weight, weight, 0.0 if weight == 0 else weight * mean])
    np.testing.assert_allclose(layout.means(sums)["own"], expected, rtol=1e-15)


def test_padding_counts_nothing_whatever_it_holds():
    layout = MetricSums(["loss"])
    sums = layout.sums({"loss": tf.constant([1.0, np.inf, np.nan])}, tf.constant([2.0, 0.0, 0.0]))
    assert sums.numpy().tolist() == [2.0, 2.0]


def test_counts_beyond_the_integers_of_float32_are_exact():
    layout = MetricSums(["loss"])
    total = tf.constant([2.0**25, 0.0], tf.float64)
    total += layout.sums({"loss": tf.constant([1.0])}, tf.constant([1.0]))
    assert total.numpy()[0] == 2.0**25 + 1
