import keras
import numpy as np
import pytest

import ddl
from ddl.errors import ConfigError
from tests.conftest import make_strategy

TARGETS = np.random.default_rng(0).normal(1.0, 0.3, size=8)


class Quadratic:
    """Minimizes (w - m)² + v: gradient descent diverges above a rate of 1."""

    def __init__(self):
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", dtype="float64")
        self.model = keras.Sequential([keras.Input((1,)), dense])

    def per_example(self, features, training):
        distance = self.model(features["x"], training=training)[:, 0] - features["y"]
        return ddl.PerExample(loss=distance * distance)


def trainer_with(optimizer, strategy=None):
    data = {"x": np.ones((8, 1)), "y": TARGETS}
    with (strategy or make_strategy("one_device", 1)).scope():
        return ddl.Trainer(Quadratic(), optimizer(), data, global_batch_size=8)


@pytest.fixture(scope="module")
def trainer():
    return trainer_with(lambda: keras.optimizers.SGD(0.1))


def test_the_suggested_rate_lies_below_the_divergence(trainer):
    found = ddl.find_learning_rate(trainer, 1e-4, 100.0, steps=121)
    assert len(found.rates) == len(found.losses) == len(found.smoothed) < 121
    # Each update multiplies the distance by 1 - 2 · rate, and the loss is that before it.
    rates = found.rates[:-1].astype("f4").astype("f8")  # Keras keeps the rate in float32
    distances = TARGETS.mean() * np.cumprod(np.concatenate([[1.0], 1 - 2 * rates]))
    # Near a rate of 0.5 the distance vanishes, and rates above it enlarge what rounding left.
    few = np.searchsorted(rates, 0.4)
    np.testing.assert_allclose(found.losses[:few], (distances**2 + TARGETS.var())[:few], rtol=1e-9)
    assert 0.01 < found.suggested < 0.1


@pytest.mark.parametrize("replicas", [1, 2])
def test_training_continues_as_if_there_had_been_no_test(replicas):
    """On several replicas, with a loss that was not finite, in the middle of a training."""
    results = []
    for tested in (False, True):
        strategy = make_strategy("mirrored" if replicas > 1 else "one_device", replicas)
        trainer = trainer_with(lambda: keras.optimizers.Adam(0.125, epsilon=1e-3), strategy)
        trainer.train(2)
        if tested:
            found = ddl.find_learning_rate(trainer, 1e-3, 1e30, steps=30)
            assert np.isfinite(found.losses).all()
        assert (trainer.step, trainer.learning_rates["learning_rate"]) == (2, 0.125)
        trainer.train(3)
        results.append([*trainer.model.get_weights(), *map(np.array, trainer.optimizer.variables)])
    for expected, got in zip(*results, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_a_divergence_at_once_asks_for_a_lower_start(trainer):
    with pytest.raises(ConfigError, match="Lower `lowest`"):
        ddl.find_learning_rate(trainer, 1e100, 1e200, steps=20)
    assert trainer.step == 0


def test_a_schedule_is_refused():
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)
    with pytest.raises(ConfigError, match="a number, .*got 1 optimizers and CosineDecay"):
        ddl.find_learning_rate(trainer_with(lambda: keras.optimizers.SGD(schedule)))
