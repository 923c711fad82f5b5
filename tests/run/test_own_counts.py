"""Whole runs of a step whose optimizers count their own updates."""

import keras
import numpy as np
import pytest

from ddl import config
from ddl.distribution.communication import Communication
from ddl.run import train
from tests.conftest import make_strategy
from tests.run.whole_runs import lines, tensors

STEPS = 24

TASK = '''
import ddl
import gin
import keras
import numpy as np
import tensorflow as tf


@gin.register
class Counting:
    """Two weights whose gradients are 1, so that SGD subtracts the rates that it uses."""

    def __init__(self):
        self.often, self.seldom = (
            keras.Sequential(
                [
                    keras.Input((1,)),
                    keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
                ],
                name=name,
            )
            for name in ("often", "seldom")
        )

    def of_often(self, features, training):
        return ddl.PerExample(self.often(features["one"], training=training)[:, 0])

    def of_seldom(self, features, training):
        return ddl.PerExample(self.seldom(features["one"], training=training)[:, 0])

    def evaluate(self, features):
        return ddl.PerExample(tf.ones_like(features["one"][:, 0]))  # never gets better

    def step(self, update, batch):
        for _ in range(3):
            update.minimize(self.of_often, batch, self.often, optimizer="often")
        update.when(
            update.step % 2 == 1,
            lambda: update.minimize(self.of_seldom, batch, self.seldom, optimizer="seldom"),
        )


@gin.register
def ones():
    return {"one": np.ones([8, 1])}
'''

GIN = """
import counting

include 'standard.gin'

SEED = 0
GLOBAL_BATCH_SIZE = 4
TRAIN_STEPS = 24
EVAL_EVERY = 4
CHECKPOINT_EVERY = 9
LOG_EVERY = 1
PRECISION = 'float64'

Trainer.task = @Counting()
Trainer.train_data = @ones()
Trainer.eval_data = @ones()
Trainer.optimizer = {'often': @often/SGD(), 'seldom': @seldom/SGD()}
often/SGD.learning_rate = @often/LearningRate()
often/LearningRate.schedule = @ExponentialDecay()
often/LearningRate.warmup_steps = 10
ExponentialDecay.initial_learning_rate = 0.1
ExponentialDecay.decay_steps = 1
ExponentialDecay.decay_rate = 0.95
seldom/SGD.learning_rate = @StepDecay()
StepDecay.initial_learning_rate = 0.5
StepDecay.boundaries = [3, 7]
StepDecay.factor = 0.1
"""


def of_often(update):
    """The rate of an update of `often`, which makes three in a step."""
    warm = min(update / 10, 1)
    return 0.1 * warm * 0.95 ** max(update - 10, 0)


def of_seldom(update):
    """The rate of an update of `seldom`, which makes one in each odd step."""
    return 0.5 * 0.1 ** sum(update >= boundary for boundary in (3, 7))


@pytest.fixture
def run(tmp_path, monkeypatch):
    folder = tmp_path / "config"
    folder.mkdir()
    (folder / "counting.py").write_text(TASK)
    (folder / "counting.gin").write_text(GIN)
    monkeypatch.syspath_prepend(str(folder))

    def run(model_dir, *params, strategy=("one_device", 1)):
        keras.utils.clear_session()
        config.load([str(folder / "counting.gin")], list(params))
        train.run(train.Placement(make_strategy(*strategy), Communication()), str(model_dir))
        return model_dir

    return run


def weight(model_dir, name):
    key = {"often": "model/0000", "seldom": "model/0001"}[name]
    return float(np.squeeze(tensors(model_dir)[key]))


def test_each_optimizer_follows_its_own_count_and_is_resumed_to_the_bit(run, tmp_path):
    """Rates are logged and used; the runs end at a step between two evaluations."""
    straight = run(tmp_path / "straight")
    logged = [line for line in lines(straight) if line["split"] == "train"]
    assert [line["step"] for line in logged] == list(range(1, STEPS + 1))
    for line in logged:
        step = line["step"]
        often, seldom = of_often(3 * step - 1), of_seldom(max(step // 2 - 1, 0))
        assert line["learning_rate/often"] == pytest.approx(often, rel=1e-12)
        assert line["learning_rate/seldom"] == pytest.approx(seldom, rel=1e-12)
    used = {"often": map(of_often, range(3 * STEPS)), "seldom": map(of_seldom, range(STEPS // 2))}
    for name, rates in used.items():
        assert weight(straight, name) == pytest.approx(-sum(rates), rel=1e-12)
    resumed = tmp_path / "resumed"
    run(resumed, "TRAIN_STEPS = 9")
    run(resumed)
    ours, theirs = tensors(resumed), tensors(straight)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)
    assert lines(resumed)[-2:] == lines(straight)[-2:]
