"""Sums of metrics, which add up over any split of the examples."""

import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import ddl
from ddl.errors import ConfigError
from ddl.metrics.values import OfMean
from ddl.step.metric_sums import MetricSums, SumsOfLosses, check_dimensions, sums_of
from ddl.tasks.classification import accuracy, top_k_accuracy

NAN = np.nan


def layout(**metrics):
    return MetricSums(ddl.PerExample(tf.zeros([2]), metrics=metrics), "Task.per_example")


def sums(values, weight):
    values, weight = tf.constant(values), tf.constant(weight)
    return sums_of(layout(), values, ddl.PerExample(values), weight, weight)


@given(
    st.lists(
        st.tuples(st.floats(-1e3, 1e3), st.just(0.0) | st.floats(1e-3, 10)), min_size=1, max_size=40
    ),
    st.integers(1, 4),
)
def test_sums_add_up_over_any_split(rows, parts):
    values = np.array([value for value, _ in rows])
    weight = np.array([weight for _, weight in rows])
    total = layout().zeros()
    for part in range(parts):
        total += sums(values[part::parts], weight[part::parts])
    if weight.sum() > 0:
        expected = np.average(values, weights=weight)
        assert layout().means(total)["loss"] == pytest.approx(expected, rel=1e-9, abs=1e-9)
    else:
        assert math.isnan(layout().means(total)["loss"])


def test_a_function_without_a_value_is_nan():
    functions = {math.exp: math.inf, math.log: NAN, lambda mean: 1 / (mean - 710): NAN}
    for function, expected in functions.items():
        mean = -1.0 if function is math.log else 710.0
        found = layout(own=OfMean(tf.zeros([2]), function)).means(np.array([2.0, 0.0, 2 * mean]))
        np.testing.assert_equal(found["own"], expected)


def test_padding_counts_nothing_and_counts_are_exact():
    found = sums([1.0, np.inf, np.nan], [2.0, 0.0, 0.0])
    assert found.numpy().tolist() == [2.0, 2.0]
    total = tf.constant([2.0**25, 0.0], tf.float64) + sums([1.0], [1.0])
    assert total.numpy()[0] == 2.0**25 + 1


def test_figures_of_the_losses_of_a_step_have_names_of_their_own():
    with pytest.raises(ConfigError, match="losses a, b: two metrics have the figure 'error'"):
        SumsOfLosses({name: layout(error=tf.zeros([2])) for name in "ab"})


def test_a_loss_that_pairs_examples_by_broadcasting_is_refused():
    one, two = (ddl.PerExample(tf.zeros([n, n])) for n in (8, 4))
    with pytest.raises(ConfigError, match=r"further dimension grows .*label\[:, tf.newaxis\]"):
        check_dimensions(one, two, "Task.per_example")


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_a_row_with_nan_is_wrong_for_every_label(dtype):
    rows = [[NAN, NAN, NAN], [NAN, 1, 2], [2, NAN, 1], [NAN, np.inf, -np.inf]]
    logits = tf.cast(tf.constant(rows, tf.float64), dtype)
    for label in range(3):
        labels = tf.fill([len(rows)], tf.constant(label, tf.int64))
        assert not accuracy(labels, logits).numpy().any()
        assert not top_k_accuracy(labels, logits, 2).numpy().any()
