import numpy as np
import pytest
import tensorflow as tf

from ddl.distribution.path import CPU, GPU, taking
from ddl.tasks.cross_entropy import cross_entropy


def values_and_gradient(labels, logits):
    with tf.GradientTape() as tape:
        tape.watch(logits)
        loss = cross_entropy(labels, logits)
    weights = tf.range(1, 1 + len(labels), dtype=logits.dtype)
    return loss.numpy(), tape.gradient(loss, logits, weights).numpy()


@pytest.mark.parametrize("size", [1.0, 300.0])
def test_on_a_gpu_float64_gives_the_same_up_to_rounding(size):
    random = np.random.default_rng(0)
    labels = tf.constant([2, *random.integers(0, 7, 19)])
    logits = random.normal(size=(20, 7)) * size
    logits[0, 3] = -np.inf
    expected = values_and_gradient(labels, tf.constant(logits))
    with taking(GPU):
        loss, gradient = values_and_gradient(labels, tf.constant(logits))
        none = cross_entropy([7, -1], logits[1:3])
    assert np.isfinite(loss).all()
    np.testing.assert_allclose(loss, expected[0], rtol=1e-14, atol=1e-14)
    np.testing.assert_allclose(gradient, expected[1], rtol=1e-14, atol=1e-14)
    np.testing.assert_array_equal(np.isnan(none), [True, True])


@pytest.mark.parametrize(("dtype", "path"), [("float32", GPU), ("float64", CPU)])
def test_elsewhere_it_is_tensorflow_s(dtype, path):
    logits = tf.cast(np.random.default_rng(0).normal(size=(5, 3)), dtype)
    expected = tf.nn.sparse_softmax_cross_entropy_with_logits([0, 1, 2, 0, 1], logits)
    with taking(path):
        ours = cross_entropy(tf.constant([0, 1, 2, 0, 1], tf.int64), logits)
    np.testing.assert_array_equal(ours, expected)
