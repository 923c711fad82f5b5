"""The mean of a function of the examples; tests/contract/test_own_steps.py shows its weights."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.errors import ConfigError
from tests.conftest import make_strategy


class Means:
    """Keeps a mean and a sum of a function of its features."""

    def __init__(self, function):
        self.model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        self.kept = tf.Variable(tf.zeros([2]), trainable=False)
        self.function = function

    def per_example(self, features, training):
        return ddl.PerExample(self.model(features["x"])[:, 0])

    def values(self, features, training):
        return self.function(features["x"])

    def step(self, update, batch):
        # A lambda has no name of its own.
        mean = update.mean(lambda f, **given: self.values(f, **given), batch, name="mean")
        total = update.sum(lambda f, **given: self.values(f, **given), batch, name="total")
        self.kept.assign([tf.cast(mean, tf.float32), total])
        update.minimize(self.per_example, batch)


def build(function, x):
    with make_strategy("mirrored", 2).scope():
        options = {"global_batch_size": len(x), "loss_scale": ddl.LossScale(2.0)}
        return ddl.Trainer(Means(function), keras.optimizers.SGD(1e-9), {"x": x}, **options)


HALF = [("float16", 70_000, 0.5), ("bfloat16", 258, 3.0)]


@pytest.mark.parametrize(("precision", "rows", "value"), HALF)
def test_half_precision_holds_neither_the_sum_nor_the_count(precision, rows, value):
    """A mean is rounded once; a sum is float32."""
    x = np.full([rows, 1], value, "f4")
    trainer = build(lambda x: tf.cast(x[:, 0], precision), x)
    trainer.train(1)
    assert trainer.step == 1
    assert trainer.task.kept.numpy().tolist() == [value, value * rows]


def test_a_function_of_other_rows_is_refused():
    with pytest.raises(ConfigError, match="other examples"):
        build(lambda x: x[:, 0] - tf.reduce_mean(x), np.arange(8, dtype="f4")[:, None])
