import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl.layers.normalization
from ddl.errors import ConfigError
from ddl.layers.normalization import batch_moments, take_over_moments
from tests.conftest import make_strategy, microbatch

RANDOM = np.random.default_rng(0)


def moments(inputs, counts=None, axis=-1, moving=None):
    axes = [a for a in range(inputs.ndim) if a != axis % inputs.ndim]
    channels = inputs.shape[axis]
    moving = moving or (np.zeros(channels, inputs.dtype), np.ones(channels, inputs.dtype))
    counts = None if counts is None else tf.constant(counts)
    moving = list(map(tf.constant, moving))
    return [m.numpy() for m in batch_moments(tf.constant(inputs), axes, counts, moving, False)]


@pytest.mark.parametrize("shape", [(8, 3), (8, 4, 5, 3)])
@pytest.mark.parametrize("axis", [-1, 1])
def test_moments_of_the_rows_that_count(shape, axis):
    inputs = RANDOM.normal(size=shape)
    counts = np.array([True] * 5 + [False] * 3)
    axes = tuple(a for a in range(inputs.ndim) if a != axis % inputs.ndim)
    for given, rows in ((None, inputs), (counts, inputs[:5])):
        mean, variance = moments(inputs, given, axis)
        np.testing.assert_allclose(mean, rows.mean(axes), atol=1e-14)
        np.testing.assert_allclose(variance, rows.var(axes), atol=1e-14)


@pytest.mark.parametrize("axis", [-1, 1])
def test_moments_under_a_mask_of_tokens(axis):
    inputs, counts = RANDOM.normal(size=(8, 4, 3)), RANDOM.random((8, 4)) < 0.5
    counted = np.where(counts[..., np.newaxis], inputs, np.nan)
    axes = (0, 1) if axis == -1 else (0, 2)
    mean, variance = moments(inputs, counts, axis)
    np.testing.assert_allclose(mean, np.nanmean(counted, axes), atol=1e-14)
    np.testing.assert_allclose(variance, np.nanvar(counted, axes), atol=1e-14)


@pytest.mark.parametrize("counts", [None, np.arange(1000) < 990])
def test_a_mean_far_from_zero_loses_no_digits(counts):
    """Σx² - (Σx)² in float32 would be all rounding here."""
    inputs = (RANDOM.normal(size=(1000, 2)) + 1e4).astype("f4")
    _, variance = moments(inputs, counts)
    np.testing.assert_allclose(variance, inputs[:990].astype("f8").var(0), rtol=0.05)


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_moving_moments_where_nothing_counts(replicas):
    strategy = make_strategy("mirrored" if replicas > 1 else "one_device", replicas)
    moving = [tf.constant([1.0, 2.0]), tf.constant([3.0, 4.0])]

    def replica():
        inputs = tf.fill([4, 2], np.inf)
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            mean, variance = batch_moments(inputs, [0], tf.zeros([4], bool), moving, replicas > 1)
            loss = tf.reduce_sum(mean * variance)
        return mean, variance, tape.gradient(loss, inputs)

    found = tf.function(lambda: strategy.run(replica), autograph=False)()
    of_each = [strategy.experimental_local_results(value) for value in found]
    for mean, variance, gradient in zip(*of_each, strict=True):
        np.testing.assert_array_equal(mean, moving[0])
        np.testing.assert_array_equal(variance, moving[1])
        np.testing.assert_array_equal(gradient, np.zeros([4, 2]))


def plain_moments(own, mask):
    """Differentiated by TensorFlow, one operation after the other."""
    counted = tf.boolean_mask(own, mask)
    mean = tf.reduce_mean(counted, 0)  # tf.nn.moments has wrong second gradients
    return mean, tf.reduce_mean(tf.square(counted - mean), 0)


def on_rows(strategy, inputs, counts, function):
    """Calls a function of inputs, mask and moments on the rows of each replica; on one, plainly."""
    replicas = strategy.num_replicas_in_sync
    rows = len(inputs) // replicas
    moving = [tf.zeros(inputs.shape[-1], inputs.dtype)] * 2

    def replica():
        first = rows * tf.distribute.get_replica_context().replica_id_in_sync_group
        own = tf.constant(inputs)[first : first + rows]
        mask = tf.constant(counts)[first : first + rows]
        if replicas == 1:
            return function(own, mask, lambda: plain_moments(own, mask))
        return function(own, mask, lambda: batch_moments(own, [0], mask, moving, True))

    results = tf.function(lambda: strategy.run(replica), autograph=False)()
    return [[v.numpy() for v in strategy.experimental_local_results(each)] for each in results]


def with_gradient(own, mask, moments):
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
    inputs = (
        np.random.default_rng(0).normal(size=(40, 3)) + np.repeat([1000, 1001, 990, 0], 10)[:, None]
    )
    counts = np.array([True] * 27 + [False] * 13)
    inputs[~counts] = np.inf
    one = on_rows(make_strategy("one_device", 1), inputs, counts, with_gradient)
    rounding = 1e-12 if dtype == "float64" else 5e-6  # float32 inputs are rounded, too
    mean, variance, gradients = on_rows(
        make_strategy(kind, 4), inputs.astype(dtype), counts, with_gradient
    )
    np.testing.assert_allclose(mean, one[0] * 4, rtol=rounding)
    np.testing.assert_allclose(variance, one[1] * 4, rtol=rounding)
    gradient = np.concatenate(gradients)
    largest = np.abs(one[2]).max()
    np.testing.assert_allclose(gradient, one[2][0], rtol=0, atol=10 * rounding * largest)
    # Bit for bit the same moments everywhere, in whichever order replicas are added.
    assert (np.array([mean, variance]) == np.array([mean[:1], variance[:1]])).all()


def test_one_all_reduce_gathers_the_moments_of_a_layer(monkeypatch):
    summed, total = [], ddl.layers.normalization.sum_over_replicas
    monkeypatch.setattr(
        ddl.layers.normalization,
        "sum_over_replicas",
        lambda values: [total(values), summed.append(values.shape)][0],
    )
    counts = np.arange(8) < 7
    on_rows(make_strategy("mirrored", 2), RANDOM.normal(size=(8, 3)), counts, with_gradient)
    # Traced on each of two replicas: the moments, and their gradients.
    assert summed == [(2, 3 * 3 + 1)] * 2 + [(2, 3)] * 2


def with_second_gradient(own, mask, moments):
    """Gradients of the squared gradients of a loss of moments and inputs, as of a penalty."""
    with tf.GradientTape() as outer:
        outer.watch(own)
        with tf.GradientTape() as inner:
            inner.watch(own)
            mean, variance = moments()
            finite = tf.where(mask[:, tf.newaxis], own, tf.zeros([], own.dtype))
            loss = tf.reduce_sum(tf.sin(finite * mean) * variance)
        penalty = tf.reduce_sum(tf.square(inner.gradient(loss, own)))
    return [outer.gradient(penalty, own)]


def test_second_gradients_over_replicas():
    """With masked entries that are infinite, as those of padding may be."""
    inputs, counts = RANDOM.normal(size=(8, 3)), np.arange(8) < 7
    inputs[7] = np.inf
    ((expected,),) = on_rows(make_strategy("one_device", 1), inputs, counts, with_second_gradient)
    (on_two,) = on_rows(make_strategy("mirrored", 2), inputs, counts, with_second_gradient)
    assert np.isfinite(on_two).all()
    np.testing.assert_allclose(np.concatenate(on_two), expected, rtol=0, atol=1e-12)


def layer_moved_by(inputs, counts, **arguments):
    """Moving mean and variance after one call: with momentum 0 those of the batch."""
    layer = keras.layers.BatchNormalization(momentum=0.0, **arguments)
    layer.build(inputs.shape)
    take_over_moments([layer])
    with microbatch(rows=len(counts), mask=counts).forward():
        make_strategy("one_device", 1).run(lambda: layer(tf.constant(inputs), training=True))
    return layer.moving_mean.numpy(), layer.moving_variance.numpy()


@pytest.mark.parametrize("synchronized", [True, False])
def test_padding_never_reaches_the_moments(synchronized):
    """Also holds Keras's private hook: were it renamed, padding would be counted again."""
    inputs = RANDOM.normal(size=(8, 3)).astype("f4")
    inputs[5:] = np.inf
    counts = [True] * 5 + [False] * 3
    mean, variance = layer_moved_by(inputs, counts, synchronized=synchronized)
    np.testing.assert_allclose(mean, inputs[:5].mean(0), rtol=1e-5)
    np.testing.assert_allclose(variance, inputs[:5].var(0), rtol=1e-5)


def test_parts_of_examples_count_as_they_do():
    inputs = RANDOM.normal(size=(8, 3)).astype("f4")
    mean, _ = layer_moved_by(inputs, [True, True, False, False])
    np.testing.assert_allclose(mean, inputs[:4].mean(0), rtol=1e-5)
    with pytest.raises(ConfigError, match="the 3 examples, got 8 rows"):
        layer_moved_by(inputs, [True, True, False])


def test_elsewhere_it_is_keras_own():
    def trained(takes_over):
        layer = keras.layers.BatchNormalization()
        layer.build((8, 3))
        if takes_over:
            take_over_moments([layer])
        inputs = np.random.default_rng(0).normal(size=(8, 3))
        return layer(inputs, training=True).numpy(), layer.moving_variance.numpy()

    for ours, theirs in zip(trained(True), trained(False), strict=True):
        np.testing.assert_array_equal(ours, theirs)


class Frozen(keras.layers.BatchNormalization):
    """Normalizes with its moving moments in training, too. Its call takes no mask."""

    def call(self, inputs, training=None):
        return super().call(inputs, training=False)


def test_a_subclass_with_a_call_of_its_own_keeps_it():
    layer = Frozen()
    take_over_moments([layer])
    with microbatch(rows=4).forward():
        outputs = layer(tf.constant([[1.0], [2.0], [3.0], [4.0]]), training=True)
    np.testing.assert_allclose(outputs[:, 0], [1, 2, 3, 4], rtol=1e-3)


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
