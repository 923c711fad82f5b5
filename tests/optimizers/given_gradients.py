"""Updates of a small model by gradients that a test gives, as the trainer makes them."""

import keras
import numpy as np
import tensorflow as tf

from ddl.optimizers.fused import by_kernels
from ddl.precision import set_precision
from ddl.step import gradients as gradient_path

SHAPES = [(3, 2), (2,), (2, 4), (4,)]  # kernel, bias, kernel, bias


def drawn(updates, seed=0):
    """Weights, and gradients for each update, float64."""
    random = np.random.default_rng(seed)
    weights = [random.normal(size=shape) for shape in SHAPES]
    return weights, [[random.normal(size=shape) for shape in SHAPES] for _ in range(updates)]


def updated(strategy, make_optimizer, weights, gradients, precision="float64"):
    """The weights after each update, as every replica has them, and the optimizer."""
    set_precision(precision)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(2, name="one"), keras.layers.Dense(4)]
        )
        optimizer = make_optimizer()
    variables = model.trainable_variables
    gradient_path.prepare_optimizer(optimizer, variables, strategy)
    for variable, value in zip(variables, weights, strict=True):
        variable.assign(value)

    @tf.function(autograph=False)
    def update(*given):
        with by_kernels([optimizer]):
            strategy.run(lambda: optimizer.apply(list(given), variables))

    after = []
    for each in gradients:
        update(*(tf.constant(g, v.dtype) for g, v in zip(each, variables, strict=True)))
        copies = [strategy.experimental_local_results(v.value) for v in variables]
        for own in copies:
            for copy in own[1:]:
                np.testing.assert_array_equal(copy.numpy(), own[0].numpy())
        after.append([own[0].numpy() for own in copies])
    return after, optimizer


def assert_close(ours, expected, atol=1e-13):
    for one, other in zip(ours, expected, strict=True):
        for value, reference in zip(one, other, strict=True):
            np.testing.assert_allclose(value, reference, rtol=0, atol=atol)
