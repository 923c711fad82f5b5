import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.optimizers.schedules import CosineDecay, PiecewiseConstantDecay, PolynomialDecay

import ddl
from ddl.errors import ConfigError
from ddl.optimizers.loss_weight import LossWeight, loss_weights
from ddl.optimizers.plateau import ReduceOnPlateau
from tests.conftest import make_strategy


class Weighted:
    """A task whose metric is its loss weight."""

    def __init__(self, schedule):
        self.model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        self.kl = LossWeight(schedule)

    def per_example(self, features, training):
        own = self.model(features["x"], training=training)[:, 0]
        weight = self.kl()
        return ddl.PerExample(weight * own**2, {"weight": tf.fill(own.shape, weight)})


def trainer_of(schedule, kind="one_device", replicas=1, **options):
    strategy = make_strategy(kind, replicas)
    with strategy.scope():
        task, optimizer = Weighted(schedule), keras.optimizers.SGD(0.01)
    data = {"x": np.ones([8, 2], np.float32)}
    sizes = {"global_batch_size": 8, "eval_data": data, "strategy": strategy}
    return ddl.Trainer(task, optimizer, data, **sizes, **options)


def test_it_follows_the_step_within_one_trace():
    schedule = PolynomialDecay(0.0, 4, 1.0)
    trainer = trainer_of(schedule, "mirrored", 2, accumulation_steps=2, steps_per_loop=2)
    weights = [trainer.train(1)["weight"] for _ in range(6)]
    assert weights == pytest.approx([0, 0.25, 0.5, 0.75, 1, 1])
    assert trainer.trace_count == 1
    assert loss_weights(trainer.task, 3) == {"loss_weight/kl": 0.5}
    assert loss_weights(trainer.task, 0) == {"loss_weight/kl": 0.0}
    assert trainer.evaluate()["weight"] == 1


def test_schedules_and_numbers():
    step = functools.partial(tf.constant, dtype=tf.int64)
    assert LossWeight(0.3)(step(7)) == np.float32(0.3)
    curriculum = LossWeight(PiecewiseConstantDecay([10], [0.0, 2.0]))
    assert [float(curriculum(step(at))) for at in (10, 11)] == [0, 2]
    cosine = LossWeight(CosineDecay(1.0, 10))
    assert float(cosine(step(5))) == pytest.approx(0.5)
    assert LossWeight(1)(step(0)).dtype == tf.float32


def test_nested_tasks_are_searched():
    outer = Weighted(0.5)
    outer.task, outer._hidden = Weighted(1.0), LossWeight(2.0)
    outer.task.task = outer
    assert loss_weights(outer, 1) == {"loss_weight/kl": 0.5, "loss_weight/hidden": 2.0}


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("0.5", "must be a number or a schedule"),
        (PolynomialDecay, "with parentheses"),
        (float("nan"), "got nan"),
        (ReduceOnPlateau(0.1), "schedule of the step"),
    ],
    ids=["text", "class", "nan", "plateau"],
)
def test_others_are_refused(schedule, message):
    with pytest.raises(ConfigError, match=message):
        LossWeight(schedule)


def test_without_a_step_it_is_refused():
    with pytest.raises(ConfigError, match=r"pass update\.step"):
        LossWeight(1.0)()
