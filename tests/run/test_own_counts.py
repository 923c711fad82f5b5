"""Whole runs of a step whose optimizers count their own updates."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.optimizers.learning_rate import LearningRate
from ddl.optimizers.schedules import StepDecay
from ddl.precision import set_precision
from tests.conftest import make_strategy
from tests.run.small import lines

STEPS = 24
ONES = {"one": np.ones([8, 1])}


def network():
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    return keras.Sequential([keras.Input((1,)), dense])


class Counting:
    """Two weights whose gradients are 1, so that SGD subtracts the rates that it uses."""

    def __init__(self):
        self.often, self.seldom = network(), network()

    def of_often(self, features, training):
        return ddl.PerExample(self.often(features["one"], training=training)[:, 0])

    def of_seldom(self, features, training):
        return ddl.PerExample(self.seldom(features["one"], training=training)[:, 0])

    def evaluate(self, features):
        return ddl.PerExample(tf.ones_like(features["one"][:, 0]))

    def step(self, update, batch):
        for _ in range(3):
            update.minimize(self.of_often, batch, self.often, optimizer="often")
        update.when(
            update.step % 2 == 1,
            lambda: update.minimize(self.of_seldom, batch, self.seldom, optimizer="seldom"),
        )


def of_often(update):
    """The rate of an update of `often`, which makes three in a step."""
    warm = min(update / 10, 1)
    return 0.1 * warm * 0.95 ** max(update - 10, 0)


def of_seldom(update):
    """The rate of an update of `seldom`, which makes one in each odd step."""
    return 0.5 * 0.1 ** sum(update >= boundary for boundary in (3, 7))


def run(folder, train_steps):
    """Returns the variables at the end of a run."""
    set_precision("float64")
    with make_strategy("one_device", 1).scope():
        decay = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.95)
        rates = {"often": LearningRate(decay, warmup_steps=10), "seldom": StepDecay(0.5, [3, 7])}
        optimizers = {name: keras.optimizers.SGD(rate) for name, rate in rates.items()}
        trainer = ddl.Trainer(Counting(), optimizers, ONES, global_batch_size=4, eval_data=ONES)
    plan = {"eval_every": 4, "checkpoint_every": 9, "log_every": 1, "progress": False}
    ddl.fit(trainer, folder, train_steps=train_steps, **plan)
    counts = [rule.iterations for rule in optimizers.values()]
    return [trainer.task.often.get_weights(), trainer.task.seldom.get_weights(), counts]


def test_each_optimizer_follows_its_own_count_and_is_resumed_to_the_bit(tmp_path):
    """Rates are logged and used; the runs end at a step between two evaluations."""
    straight = run(tmp_path / "straight", STEPS)
    logged = lines(tmp_path / "straight", ["train"])
    assert [line["step"] for line in logged] == list(range(1, STEPS + 1))
    for line in logged:
        step = line["step"]
        often, seldom = of_often(3 * step - 1), of_seldom(max(step // 2 - 1, 0))
        assert line["learning_rate/often"] == pytest.approx(often, rel=1e-12)
        assert line["learning_rate/seldom"] == pytest.approx(seldom, rel=1e-12)
    used = sum(map(of_often, range(3 * STEPS))), sum(map(of_seldom, range(STEPS // 2)))
    assert np.ravel(straight[:2]) == pytest.approx(np.negative(used), rel=1e-12)
    run(tmp_path / "resumed", 9)
    for ours, theirs in zip(run(tmp_path / "resumed", STEPS), straight, strict=True):
        np.testing.assert_array_equal(ours, theirs)
