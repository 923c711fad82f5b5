"""Schedule-free AdamW against its definition."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from ddl.errors import ConfigError
from ddl.optimizers import AdamWScheduleFree
from ddl.optimizers.checks import check_optimizer
from ddl.precision import set_precision


def defined(start, gradients, rate, beta_1, beta_2, decay, warmup):
    """x, y and z after each update, with NumPy."""
    x, z, v, total, after = start.copy(), start.copy(), np.zeros_like(start), 0.0, []
    y = start.copy()
    for t, g in enumerate(gradients, 1):
        factor = min(t / warmup, 1) if warmup else 1.0
        v = beta_2 * v + (1 - beta_2) * g**2
        direction = g / (np.sqrt(v / (1 - beta_2**t)) + 1e-8) + decay * y
        z = z - rate * factor * direction
        total += factor**2
        c = factor**2 / total
        x = (1 - c) * x + c * z
        y = (1 - beta_1) * z + beta_1 * x
        after.append((x, y, z))
    return after


@pytest.mark.parametrize("warmup", [0, 1, 4])
@pytest.mark.parametrize("decay", [None, 0.1])
def test_is_what_the_paper_defines(warmup, decay):
    set_precision("float64")
    random = np.random.default_rng(0)
    start, gradients = random.normal(size=5), random.normal(size=(9, 5))
    variable = keras.Variable(start)
    optimizer = AdamWScheduleFree(
        0.1, beta_1=0.8, beta_2=0.95, weight_decay=decay, warmup_steps=warmup
    )
    optimizer.build([variable])
    update = tf.function(lambda g: optimizer.apply([g], [variable]), autograph=False)
    expected = defined(start, gradients, 0.1, 0.8, 0.95, decay or 0.0, warmup)
    for gradient, (x, y, z) in zip(gradients, expected, strict=True):
        update(tf.constant(gradient))
        own = optimizer._momentums[0].numpy()
        np.testing.assert_allclose(own, z, rtol=0, atol=1e-12)
        np.testing.assert_allclose(variable.numpy(), y, rtol=0, atol=1e-12)
        np.testing.assert_allclose((variable.numpy() - 0.2 * own) / 0.8, x, rtol=0, atol=1e-12)


def test_a_sparse_gradient_is_as_a_dense_one():
    set_precision("float64")
    results = []
    for sparse in (False, True):
        variable = keras.Variable(np.ones((4, 2)))
        optimizer = AdamWScheduleFree(0.1)
        optimizer.build([variable])
        rows = tf.IndexedSlices(tf.ones([2, 2], tf.float64), tf.constant([1, 1]), [4, 2])
        optimizer.apply([rows if sparse else tf.convert_to_tensor(rows)], [variable])
        results.append(variable.numpy())
    np.testing.assert_array_equal(*results)


def test_kerass_is_refused():
    """Keras reads z after it has changed it; when this fails, Keras has mended it."""
    set_precision("float64")

    class Own(keras.optimizers.ScheduleFreeAdamW):
        pass

    for refused in (keras.optimizers.ScheduleFreeAdamW(), Own()):
        with pytest.raises(ConfigError, match="replaced by ddl's AdamWScheduleFree"):
            check_optimizer(refused)
    with pytest.raises(ConfigError, match="beta_1 must be between 0 and 1"):
        AdamWScheduleFree(beta_1=0.0).build([keras.Variable(1.0)])
    start, gradients = np.ones(3), np.random.default_rng(0).normal(size=(3, 3))
    variable = keras.Variable(start)
    optimizer = keras.optimizers.ScheduleFreeAdamW(0.1, beta_1=0.8)
    optimizer.build([variable])
    for gradient in gradients:
        optimizer.apply([tf.constant(gradient)], [variable])
    _, y, _ = defined(start, gradients, 0.1, 0.8, 0.999, 0.0, 0)[-1]
    assert np.abs(variable.numpy() - y).max() > 1e-3
