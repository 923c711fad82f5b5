import keras
import numpy as np
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


class Traced(keras.layers.Layer):
    """Draws and takes moments in a function that `trace` may trace."""

    def __init__(self, trace):
        super().__init__()
        inner = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
        self.inner, self.function = keras.Sequential(inner), trace(self.compute)

    def compute(self, x):
        return self.inner(x, training=True)

    def call(self, x):
        return self.function(x)


def test_the_probes_leave_no_trace_of_a_function_of_the_users():
    """Of 8 rows, as training has them. Training would reuse it, with what the probes held."""
    rows, found = (np.random.default_rng(0).normal(size=(16, 3)), np.arange(16) % 2), []
    for trace in (tf.function, lambda function: function):
        keras.utils.set_random_seed(0)
        task = ddl.Classification(keras.Sequential([Traced(trace), keras.layers.Dense(2)]))
        ddl.Trainer(task, keras.optimizers.SGD(0.5), rows, global_batch_size=8).train(2)
        found.append(task.model.get_weights())
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
