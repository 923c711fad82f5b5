"""The mean of a function of the examples over the global batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.errors import ConfigError
from ddl.precision import set_precision
from tests.conftest import make_strategy


class Means:
    """Keeps a mean of its features."""

    def __init__(self, function):
        self.model = keras.Sequential([keras.Input((2, 3)), keras.layers.Dense(1)])
        self.kept = tf.Variable(tf.zeros([2, 3], tf.float64), trainable=False)
        self.weight = tf.Variable(0.0, trainable=False, dtype=tf.float64)
        self.function = function

    def per_example(self, features, training):
        return ddl.PerExample(self.model(features["x"])[:, 0, 0])

    def values(self, features, training):
        return self.function(features["x"])

    def ones(self, features, training):
        return tf.ones([features["x"].shape[0]], tf.float64)

    def step(self, update, batch):
        self.kept.assign(update.mean(self.values, batch))
        self.weight.assign(update.sum(self.ones, batch))
        update.minimize(self.per_example, batch)


X = np.random.default_rng(0).normal(size=(11, 2, 3))
WEIGHT = np.array([1, 2, 0, 1, 1, 3, 1, 1, 2, 1, 0.5], "f4")


def build(function, where):
    set_precision("float64")
    strategy, replicas, microbatches = where
    with make_strategy(strategy, replicas).scope():
        return ddl.Trainer(
            Means(function),
            keras.optimizers.SGD(0.1),
            {"x": X, "weight": WEIGHT},
            global_batch_size=8,
            accumulation_steps=microbatches,
            shuffle=False,
        )


def test_of_a_full_and_of_a_padded_batch():
    trainer = build(lambda x: x**2, ("mirrored", 2, 2))
    for rows in (slice(0, 8), slice(8, 11)):
        trainer.train(1)
        expected = np.average(X[rows] ** 2, axis=0, weights=WEIGHT[rows])
        for copy in trainer.strategy.experimental_local_results(trainer.task.kept):
            np.testing.assert_allclose(copy.numpy(), expected, rtol=0, atol=1e-12)
        assert trainer.task.weight.numpy() == pytest.approx(WEIGHT[rows].sum())


@pytest.mark.parametrize(
    ("precision", "rows", "value"),
    [("float16", 70_000, 0.5), ("bfloat16", 257, 3.0)],
)
def test_half_precision_holds_neither_the_sum_nor_the_count(precision, rows, value):
    """A mean is rounded once; a sum is float32."""

    class Halves:
        def __init__(self):
            self.model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
            self.kept = tf.Variable(tf.zeros([2]), trainable=False)

        def per_example(self, features, training):
            return ddl.PerExample(self.model(features["x"])[:, 0])

        def values(self, features, training):
            return tf.cast(features["x"][:, 0], precision)

        def step(self, update, batch):
            mean, total = update.mean(self.values, batch), update.sum(self.values, batch)
            assert (mean.dtype, total.dtype) == (precision, tf.float32)
            self.kept.assign([tf.cast(mean, tf.float32), total])
            update.minimize(self.per_example, batch)

    set_precision("float32")
    with make_strategy("mirrored", 2).scope():
        trainer = ddl.Trainer(
            Halves(),
            keras.optimizers.SGD(1e-9),
            {"x": np.full([rows + rows % 2, 1], value, "f4")},
            global_batch_size=rows + rows % 2,
            loss_scale=ddl.LossScale(2.0),
        )
    trainer.train(1)
    assert int(trainer.state.step) == 1
    assert trainer.task.kept.numpy().tolist() == [value, value * (rows + rows % 2)]


@pytest.fixture(scope="module", autouse=True)
def _rows_checked_once():
    """Checks in each test: the tasks of `test_refuses` differ in a function alone."""


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (lambda x: tf.reduce_mean(x), "must return a float tensor with the batch first"),
        (lambda x: tf.cast(x, tf.int32), "must return a float tensor"),
        (lambda x: x - tf.reduce_mean(x, axis=0, keepdims=True), "other examples"),
    ],
    ids=["a scalar", "integers", "other rows"],
)
def test_refuses(function, match):
    with pytest.raises(ConfigError, match=match):
        build(function, ("mirrored", 2, 1)).trace()
