"""What `ddl.gather` and `ddl.current_batch` give a loss, and what they refuse."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.errors import ConfigError
from tests.contract.builders import make_trainer


class Seeing:
    """Reports what a loss sees of its batch."""

    def __init__(self):
        self.model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])

    def per_example(self, features, training):
        seen = ddl.current_batch()
        loss = self.model(features["x"], training=training)[:, 0] * 0
        values = {"position": seen.positions, "weight": seen.weight, "updates": seen.step}
        values |= {"mask": seen.mask, "training": tf.constant(seen.training)}
        return ddl.PerExample(
            loss,
            {k: tf.cast(tf.broadcast_to(v, loss.shape), loss.dtype) for k, v in values.items()},
        )


WEIGHT = np.array([1, 3, 0, 1, 1, 1, 1, 1, 2, 2, 2], "f4")


def trainer_of(task, where=("one_device", 1), **options):
    data = {"x": np.ones((11, 2)), "weight": WEIGHT}
    return make_trainer((task, keras.optimizers.SGD), data, where, eval_data=data, **options)


def test_a_loss_sees_mask_weights_positions_and_step():
    trainer = trainer_of(Seeing, ("mirrored", 2), accumulation_steps=2)
    own, rest = WEIGHT[:8], WEIGHT[8:]
    first, second = trainer.train(1), trainer.train(1)
    assert first["position"] == pytest.approx(np.average(np.arange(8), weights=own))
    assert first["weight"] == pytest.approx(np.average(own, weights=own))
    assert first["mask"] == second["mask"] == 1  # what has no weight counts in no mean
    assert second["position"] == pytest.approx(np.average(np.arange(3), weights=rest))
    assert (first["updates"], second["updates"], first["training"]) == (0, 1, 1)
    evaluated = trainer.evaluate()
    assert (evaluated["updates"], evaluated["training"]) == (2, 0)


class Gathering(Seeing):
    def gather(self, x):
        return ddl.gather(x).rows

    def per_example(self, features, training):
        z = self.model(features["x"], training=training)
        return ddl.PerExample(tf.reduce_sum((z - self.gather(z)[:1]) ** 2, 1))


class InStep(Gathering):
    def step(self, update, batch):
        ddl.gather(tf.ones([16]))


class InLoop(Gathering):
    def gather(self, x):
        return tf.map_fn(lambda row: ddl.gather(x).rows[0] + row, x)


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        (InStep, {}, "In a step, call it in the loss"),
        (InLoop, {}, "must not be called in a loop"),
        (Gathering, {"accumulation_steps": 2}, r"Gathering.per_example calls ddl.gather.*to 1;"),
    ],
)
def test_misuses_are_refused_at_the_start(task, options, message):
    with pytest.raises(ConfigError, match=message):
        trainer_of(task, **options).trace()
