import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.optimizers.schedules import PolynomialDecay

import ddl
from ddl.optimizers.loss_weight import LossWeight, loss_weights
from tests.contract.builders import make_trainer


class Weighted:
    """A task whose metric is its loss weight."""

    def __init__(self, schedule):
        self.model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        self.kl = LossWeight(schedule)

    def per_example(self, features, training):
        own = self.model(features["x"], training=training)[:, 0]
        weight = self.kl()
        return ddl.PerExample(weight * own**2, {"weight": tf.fill(own.shape, weight)})


def test_it_follows_the_step_within_one_trace():
    make = lambda: Weighted(PolynomialDecay(0.0, 4, 1.0)), keras.optimizers.SGD
    options = {"policy": "float32", "accumulation_steps": 2, "steps_per_loop": 2}
    data = {"x": np.ones([8, 2], np.float32)}
    trainer = make_trainer(make, data, eval_data=data, **options)
    weights = [trainer.train(1)["weight"] for _ in range(6)]
    assert weights == pytest.approx([0, 0.25, 0.5, 0.75, 1, 1])
    assert trainer._runner.loop._loop.experimental_get_tracing_count() == 1
    assert loss_weights(trainer.task, 3) == {"loss_weight/kl": 0.5}
    assert loss_weights(trainer.task, 0) == {"loss_weight/kl": 0.0}
    assert trainer.evaluate()["weight"] == 1
