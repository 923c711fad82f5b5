import keras
import numpy as np
import tensorflow as tf

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
