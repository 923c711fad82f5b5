import keras
import numpy as np
import pytest
import tensorflow as tf

from ddl.layers.normalization import batch_moments, take_over_moments
from tests.conftest import make_strategy, microbatch


def plain_moments(own, mask):
    """Differentiated by TensorFlow, one operation after the other."""
    counted = tf.boolean_mask(own, mask)
    mean = tf.reduce_mean(counted, 0)  # tf.nn.moments has wrong second gradients
    return mean, tf.reduce_mean(tf.square(counted - mean), 0)


def on_rows(strategy, inputs, counts):
    """Returns moments and gradient of the rows of each replica; on one, plainly."""
    replicas = strategy.num_replicas_in_sync
    rows = len(inputs) // replicas
    moving = [tf.zeros(inputs.shape[-1], inputs.dtype)] * 2

    def replica():
        first = rows * tf.distribute.get_replica_context().replica_id_in_sync_group
        own = tf.constant(inputs)[first : first + rows]
        mask = tf.constant(counts)[first : first + rows]
        if replicas == 1:
            return with_gradient(own, lambda: plain_moments(own, mask))
        return with_gradient(own, lambda: batch_moments(own, [0], mask, moving, True))

    results = tf.function(lambda: strategy.run(replica), autograph=False)()
    return [[v.numpy() for v in strategy.experimental_local_results(each)] for each in results]


def with_gradient(own, moments):
    with tf.GradientTape() as tape:
        tape.watch(own)
        mean, variance = moments()
        replicas = tf.distribute.get_replica_context().num_replicas_in_sync
        loss = tf.reduce_sum(tf.sin(mean) + mean * variance**2) / replicas
    return mean, variance, tape.gradient(loss, own)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("kind", ["mirrored", "central_storage"])
def test_moments_of_replicas_are_those_of_all_rows(kind, dtype):
    """Far from zero, with another mean on each replica; one replica has padding alone."""
    means = np.repeat([1000, 1001, 990, 0], 10)[:, None]
    inputs = np.random.default_rng(0).normal(size=(40, 3)) + means
    counts = np.array([True] * 27 + [False] * 13)
    inputs[~counts] = np.inf
    one = on_rows(make_strategy("one_device", 1), inputs, counts)
    rounding = 1e-12 if dtype == "float64" else 5e-6  # float32 inputs are rounded, too
    mean, variance, gradients = on_rows(make_strategy(kind, 4), inputs.astype(dtype), counts)
    np.testing.assert_allclose(mean, one[0] * 4, rtol=rounding)
    np.testing.assert_allclose(variance, one[1] * 4, rtol=rounding)
    gradient = np.concatenate(gradients)
    largest = np.abs(one[2]).max()
    np.testing.assert_allclose(gradient, one[2][0], rtol=0, atol=10 * rounding * largest)
    # Bit for bit the same moments everywhere, in whichever order replicas are added.
    assert (np.array([mean, variance]) == np.array([mean[:1], variance[:1]])).all()


def test_moments_where_xla_compiles():
    """In one pass, without the loss of precision of E[x²] - E[x]², and with Keras's gradient."""
    random = np.random.default_rng(0)
    values = random.normal(1e4, [1.0, 2.0, 0.5], (8, 5, 5, 3))
    weights = random.normal(size=values.shape)

    def computed(dtype, compiled):
        layer = keras.layers.BatchNormalization(dtype=dtype)
        layer.build(values.shape)
        take_over_moments([layer])

        @tf.function(autograph=False, jit_compile=compiled)
        def run(inputs):
            with microbatch().forward(), tf.GradientTape() as tape:
                tape.watch(inputs)
                loss = tf.reduce_sum(layer(inputs, training=True) * weights.astype(dtype))
            return tape.gradient(loss, inputs)

        gradient = run(tf.constant(values, dtype)).numpy()
        return gradient, layer.moving_mean.numpy(), layer.moving_variance.numpy()

    expected = computed("float64", False)
    assert np.abs(expected[0]).max() > 1e-3
    for ours, theirs in zip(computed("float64", True), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)
    variance = computed("float32", True)[2]
    np.testing.assert_allclose(variance, expected[2], rtol=1e-4)
