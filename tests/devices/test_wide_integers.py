"""Casts of integers that a device holds as int64."""

import numpy as np
import pytest
import tensorflow as tf

from ddl.distribution.path import as_int64, narrowed

VALUES = np.array([3, 0, 2**31 - 1])


@pytest.mark.parametrize("dtype", ["int32", "uint32"])
def test_integers_keep_their_values_and_are_cast_once(dtype):
    @tf.function
    def both(wide):
        narrow = narrowed(wide, dtype)
        return narrow, as_int64(narrow), as_int64(narrow + tf.ones([], dtype))

    narrow, wide, changed = both(tf.constant(VALUES, tf.int64))
    assert narrow.dtype == dtype
    assert wide.dtype == changed.dtype == tf.int64
    np.testing.assert_array_equal(narrow, VALUES)
    np.testing.assert_array_equal(wide, VALUES)
    np.testing.assert_array_equal(changed, (VALUES.astype(dtype) + np.ones([], dtype)))
    graph = both.get_concrete_function(tf.TensorSpec([3], tf.int64)).graph
    assert [one.type for one in graph.get_operations()].count("Cast") == 2


def test_other_integers_are_cast():
    np.testing.assert_array_equal(as_int64(tf.constant([1, 2], tf.uint8)), [1, 2])
