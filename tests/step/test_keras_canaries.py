"""What Keras 3 gets wrong under tf.distribute, and what of its inside ddl relies on.

The tests marked as expected failures say what would be right. The day one of them passes, Keras
has mended it: then look whether what ddl does instead is still needed.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.conftest import make_strategy

keras_is_wrong = pytest.mark.xfail(strict=True, raises=AssertionError)


def replica_id():
    return tf.distribute.get_replica_context().replica_id_in_sync_group


def linear_model(strategy, optimizer):
    """y = w·x with w = 0 at the start, and its optimizer."""
    with strategy.scope():
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        layer.build((None, 2))
        made = optimizer()
        made.build(layer.trainable_variables)
    return layer.kernel, made


def apply(strategy, optimizer, kernel, gradient):
    """Applies each replica's own gradient in Keras's way, which sums them."""

    @tf.function(autograph=False)
    def update():
        strategy.run(lambda: optimizer.apply([gradient()], [kernel]))

    update()
    return [copy.numpy() for copy in strategy.experimental_local_results(kernel.value)]


def overflow_on(replica):
    def gradient():
        bad = tf.equal(replica_id(), replica)
        return tf.where(bad, np.float32(np.inf), np.float32(1.0)) * tf.ones([2, 1])

    return gradient


def loss_scaled():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0)


@pytest.mark.parametrize("replica", [0, pytest.param(1, marks=keras_is_wrong)])
def test_keras_skips_an_overflow_on_any_replica(replica):
    """Keras asks for finiteness on rate_without_plateau gradients and takes replica 0's answer."""
    strategy = make_strategy("mirrored", 2)
    kernel, optimizer = linear_model(strategy, loss_scaled)
    for copy in apply(strategy, optimizer, kernel, overflow_on(replica)):
        assert np.array_equal(copy, np.zeros([2, 1]))
    assert float(optimizer.dynamic_scale.numpy()) == 4.0


def kept(strategy, layer):
    @tf.function(autograph=False)
    def masks():
        return strategy.experimental_local_results(
            strategy.run(lambda: layer(tf.ones([4, 50]), training=True))
        )

    return [mask.numpy() != 0 for mask in masks()]


@keras_is_wrong
def test_keras_dropout_draws_for_each_replica():
    strategy = make_strategy("mirrored", 2)
    with strategy.scope():
        layer = keras.layers.Dropout(0.5)
    first, second = kept(strategy, layer)
    assert not np.array_equal(first, second)


@keras_is_wrong
def test_keras_keeps_one_set_of_statistics():
    strategy = make_strategy("mirrored", 2)
    with strategy.scope():
        layer = keras.layers.BatchNormalization()
        layer.build((None, 1))

    @tf.function(autograph=False)
    def run():
        inputs = lambda: tf.fill([4, 1], tf.cast(replica_id(), tf.float32))  # noqa: E731
        strategy.run(lambda: layer(inputs(), training=True))

    run()
    first, second = strategy.experimental_local_results(layer.moving_mean.value)
    assert first.numpy() == second.numpy()


# What ddl relies on that Keras does not promise.


def test_keras_sums_over_replicas_through_the_hook_that_ddl_replaces():
    """And through it alone: with the identity in its place a gradient is taken as it is."""
    strategy = make_strategy("mirrored", 2)
    for hook, expected in ((None, -2.0), (lambda pairs: pairs, -1.0)):
        kernel, optimizer = linear_model(strategy, lambda: keras.optimizers.SGD(1.0))
        if hook:
            assert callable(optimizer._all_reduce_sum_gradients)
            optimizer._all_reduce_sum_gradients = hook
        for copy in apply(strategy, optimizer, kernel, lambda: tf.ones([2, 1])):
            np.testing.assert_array_equal(copy, expected)


def test_central_storage_still_refuses_batch_normalization():
    """Without the aggregation that ddl.step.moving_statistics gives its variables."""
    strategy = make_strategy("central_storage", 2)
    with strategy.scope():
        layer = keras.layers.BatchNormalization()
        layer.build((None, 1))
    with pytest.raises(ValueError, match="aggregation"):
        strategy.run(lambda: layer(tf.ones([4, 1]), training=True))
