import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops import op_selector

from ddl.layers import sum_over_replicas
from ddl.layers.normalization import batch_moments
from ddl.layers.replica_gather import gather_over_replicas
from tests.conftest import for_every_strategy, make_strategy


def on_replicas(strategy, function):
    """Returns each replica's results of a traced `function` of the replica's number."""

    def replica():
        context = tf.distribute.get_replica_context()
        return function(tf.cast(context.replica_id_in_sync_group, tf.float64))

    results = tf.function(lambda: strategy.run(replica))()
    return [strategy.experimental_local_results(each) for each in results]


@for_every_strategy
def test_sum_and_gradient_cover_all_replicas(strategy):
    replicas = strategy.num_replicas_in_sync

    def function(number):
        x = tf.stack([number + 1, 2.0])
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = sum_over_replicas(x)
            loss = tf.reduce_sum((number + 1) * total**2)
        return total, tape.gradient(loss, x)

    totals, gradients = on_replicas(strategy, function)
    numbers = np.arange(1.0, replicas + 1)
    total = np.array([numbers.sum(), 2.0 * replicas])
    for own_total, gradient in zip(totals, gradients, strict=True):
        np.testing.assert_allclose(own_total, total)
        np.testing.assert_allclose(gradient, 2 * total * numbers.sum())


def test_gradients_of_gradients():
    def function(number):
        x = number + 1
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = sum_over_replicas(x) ** 3
            gradient = inner.gradient(loss, x)
        return gradient, outer.gradient(gradient, x)

    first, second = on_replicas(make_strategy("mirrored", 2), function)
    # The losses of both replicas are s³ of the sum s = 1 + 2; each further gradient doubles.
    np.testing.assert_allclose(first, 2 * 3 * 3**2)
    np.testing.assert_allclose(second, 2 * 2 * 6 * 3)


def test_outside_of_replicas_it_is_the_tensor():
    assert sum_over_replicas(tf.constant(3.0)) == 3.0


def summed(x):
    return sum_over_replicas(x)


def gathered(x):
    return tf.reduce_sum(gather_over_replicas([x])[0], 0, keepdims=True)


def normalized(x):
    """By the moments of BatchNormalization, whose gradient is written out."""
    mean, variance = batch_moments(x, [0], None, (), over_replicas=True)
    return mean + variance


def longest_search(depth, layer, strategy, monkeypatch) -> int:
    """Returns how many operations TensorFlow's largest search covers in a chain of layers."""
    sizes = []
    walk = op_selector.get_backward_walk_ops

    def counted(*arguments, **options):
        found = walk(*arguments, **options)
        sizes.append(len(found))
        return found

    def replica():
        x = tf.random.uniform([2, 2])
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            for _ in range(depth):
                y = tf.tanh(y) * layer(tf.tanh(y))
        return tape.gradient(y, x)

    with monkeypatch.context() as patch:
        patch.setattr(op_selector, "get_backward_walk_ops", counted)
        tf.function(lambda: strategy.run(replica)).get_concrete_function()
    assert sizes
    return max(sizes)


@pytest.mark.parametrize("layer", [summed, gathered, normalized])
@pytest.mark.parametrize("collectives", [False, True])
def test_tracing_looks_at_no_more_operations_in_a_deeper_model(layer, collectives, monkeypatch):
    strategy = make_strategy("mirrored", 2)
    if collectives:  # as several workers, which start them in replica context
        monkeypatch.setattr(type(strategy.extended), "_use_merge_call", lambda _: False)
    short, long = (longest_search(depth, layer, strategy, monkeypatch) for depth in (3, 6))
    assert long == short < 100
