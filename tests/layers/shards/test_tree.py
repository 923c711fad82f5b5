import numpy as np
import pytest
import tensorflow as tf

from ddl.layers.shards.tree import exchanged, sum_in_tree


def test_parts_can_be_added_apart():
    values = [tf.constant(x) for x in np.random.default_rng(0).normal(size=[8, 50]).astype("f4")]
    whole = sum_in_tree(values)
    for parts in (2, 4, 8):
        size = 8 // parts
        sums = [sum_in_tree(values[i : i + size]) for i in range(0, 8, size)]
        np.testing.assert_array_equal(sum_in_tree(sums), whole)
    in_order = values[0]
    for value in values[1:]:
        in_order += value
    assert np.any(in_order.numpy() != whole.numpy())  # else no order would show


def test_a_number_that_is_no_power_of_two_is_an_error():
    with pytest.raises(ValueError, match="power of two, got 3"):
        sum_in_tree([tf.zeros([])] * 3)


def test_an_exchanged_value_is_no_constant_to_the_graph_optimizer():
    """TensorFlow multiplies by the reciprocal of a constant divisor, which rounds otherwise."""
    x = tf.constant(np.arange(1, 200, dtype=np.float32))

    @tf.function(autograph=False)
    def divided(x):
        constant = tf.constant(49.0)
        return x / exchanged(constant), x / constant

    exact = x.numpy() / np.float32(49)
    by_exchanged, by_constant = divided(x)
    np.testing.assert_array_equal(by_exchanged, exact)
    # If this fails, TensorFlow no longer does so, and `exchanged` is not needed.
    assert np.any(by_constant.numpy() != exact)
