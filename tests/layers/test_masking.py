import numpy as np
import pytest
import tensorflow as tf

from ddl.layers.masking import kept_or_zero


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("factor", [None, 2.0])
def test_dropped_entries_are_zero_even_if_infinite(dtype, factor):
    inputs = tf.constant([[1.5, np.inf], [np.nan, -3.0]], dtype)
    kept = tf.constant([[True, False], [False, True]])
    scale = None if factor is None else tf.constant(factor, dtype)
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        values = kept_or_zero(inputs, kept, scale)
    times = factor or 1.0
    assert values.dtype == inputs.dtype
    np.testing.assert_array_equal(tf.cast(values, "float64"), [[1.5 * times, 0], [0, -3 * times]])
    gradient = tf.cast(tape.gradient(values, inputs), "float64")
    np.testing.assert_array_equal(gradient, [[times, 0], [0, times]])
