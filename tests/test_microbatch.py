import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from tests.conftest import microbatch


def test_what_is_recomputed_for_the_backward_pass_draws_the_same():
    layer = keras.layers.Dropout(0.5)
    x = tf.ones([8, 16])

    @tf.function(autograph=False)
    def forward_and_gradient():
        current = microbatch()
        with tf.GradientTape() as tape, current.forward():
            tape.watch(x)
            y = tf.recompute_grad(lambda x: layer(x, training=True) ** 2)(x)
        with current.backward():
            return y, tape.gradient(y, x)

    y, gradient = forward_and_gradient()
    # y = (2·mask)², so its gradient is 8·mask: another mask would not fit.
    np.testing.assert_array_equal(gradient, 2 * y)
    assert {0.0, 4.0} == set(y.numpy().ravel())


class TwoLosses:
    """Draws and takes moments in a function that `trace` may trace, in both losses of a step."""

    def __init__(self, trace):
        inner = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
        self.model = keras.Sequential([keras.Input((3,)), *inner, keras.layers.Dense(1)])
        self.function = trace(lambda x: self.model(x, training=True)[:, 0])

    def squares(self, features, training):
        return ddl.PerExample(self.function(features["input"]) ** 2)

    def sizes(self, features, training):
        return ddl.PerExample(tf.abs(1 - self.function(features["input"])))

    def step(self, update, batch):
        update.minimize(self.squares, batch)
        update.minimize(self.sizes, batch)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_function_that_the_user_traces_draws_anew_in_each_loss(microbatches):
    rows, found = {"input": np.random.default_rng(0).normal(size=(16, 3))}, []
    for trace in (tf.function, lambda function: function):
        keras.utils.set_random_seed(0)
        task, options = TwoLosses(trace), {"accumulation_steps": microbatches}
        ddl.Trainer(task, keras.optimizers.SGD(0.1), rows, global_batch_size=8, **options).train(3)
        found.append(task.model.get_weights())
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
