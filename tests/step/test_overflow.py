import numpy as np
import pytest
import tensorflow as tf

from ddl.step.overflow import all_finite


def rows(values):
    return tf.IndexedSlices(tf.constant(values), tf.constant([0]), tf.constant([4, 2]))


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_each_gradient_is_looked_at_sparse_ones_too(bad):
    assert all_finite([tf.ones([3]), rows([[1.0, 2.0]])])
    for gradient in (tf.constant([1.0, bad]), rows([[1.0, bad]])):
        assert not all_finite([tf.ones([3]), gradient])
