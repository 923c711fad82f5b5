import keras
import numpy as np
import pytest

import ddl
from ddl.errors import ConfigError
from ddl.run.range_test import RangeTest, smooth
from tests.conftest import for_every_strategy
from tests.optimizers.test_learning_rate import constant_gradient

TARGETS = np.random.default_rng(0).normal(1.0, 0.3, size=8).astype("f4")


def quadratic():
    """A trainer that minimizes (w - m)² + v: gradient descent diverges above a rate of 1."""
    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    )

    class Task:
        def __init__(self):
            self.model = model

        def per_example(self, features, training):
            distance = model(features["x"], training=training)[:, 0] - features["y"]
            return ddl.PerExample(loss=distance * distance)

    data = {"x": np.ones((8, 1), "f4"), "y": TARGETS}
    return ddl.Trainer(Task(), keras.optimizers.SGD(0.1), data, global_batch_size=8)


def test_a_quadratic():
    result = RangeTest(1e-4, 100.0, steps=121).run(quadratic())
    assert result.diverged
    assert len(result.rates) == len(result.losses) == len(result.smoothed) < 121
    np.testing.assert_allclose(result.rates, 1e-4 * 10 ** (np.arange(len(result.rates)) / 20))
    # Each update multiplies the distance by 1 - 2 · rate, and the loss is that before it.
    distances = TARGETS.mean() * np.cumprod(np.concatenate([[1.0], 1 - 2 * result.rates[:-1]]))
    before = result.rates < 1
    expected = distances[before] ** 2 + TARGETS.var()
    np.testing.assert_allclose(result.losses[before], expected, rtol=1e-5)
    assert 0.01 < result.steepest < 0.1
    assert result.steepest < result.at_least_loss < result.rates[-1]


def test_it_ends_at_the_largest_rate():
    result = RangeTest(1e-4, 0.05, steps=40).run(quadratic())
    assert not result.diverged
    assert len(result.rates) == 40
    assert result.rates[-1] == pytest.approx(0.05)


def test_nothing_is_suggested_where_nothing_falls():
    assert RangeTest(1e-9, 1e-8, steps=20).run(quadratic()).steepest is None


def test_a_trainer_that_has_trained():
    trainer = quadratic()
    trainer.train(1)
    with pytest.raises(
        ConfigError, match="needs a trainer with fresh weights, got one that has made 1 updates"
    ):
        RangeTest().run(trainer)


def test_a_divergence_at_once():
    with pytest.raises(ConfigError, match="Lower RangeTest.smallest"):
        RangeTest(10.0, 1000.0, steps=20).run(quadratic())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"smallest": 0.0}, "got smallest = 0 and largest = 10"),
        (
            {"smallest": 1.0, "largest": 0.1},
            "needs 0 < smallest < largest < inf, got smallest = 1 and largest = 0.1",
        ),
        ({"largest": float("inf")}, "largest = inf"),
        ({"steps": 5}, "RangeTest.steps must be at least 10, got 5"),
        ({"smoothing": 0.0}, "RangeTest.smoothing must be greater than 0 .*, got 0.0"),
    ],
)
def test_refuses(arguments, message):
    with pytest.raises(ConfigError, match=message):
        RangeTest(**arguments)


def test_smoothing_has_no_lag():
    line = np.arange(100.0)
    np.testing.assert_allclose(smooth(line, 4.0)[20:80], line[20:80], rtol=1e-6)
    step = smooth((line >= 50).astype(float), 4.0)
    assert step[49] == pytest.approx(1 - step[50])
    np.testing.assert_allclose(smooth(np.full(9, 2.5), 3.0), 2.5)


@for_every_strategy
def test_it_works_on_replicas(strategy):
    trainer, _ = constant_gradient(lambda: keras.optimizers.SGD(0.1), strategy)
    assert len(RangeTest(1e-3, 1e-1, steps=10).run(trainer).losses) == 10
