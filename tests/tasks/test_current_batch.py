"""What a loss sees of its batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.errors import ConfigError
from ddl.precision import set_precision
from tests.conftest import make_strategy


class Seeing:
    """Reports what it sees as metrics."""

    def __init__(self):
        self.model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        self.modes = []

    def per_example(self, features, training):
        seen = ddl.current_batch()
        self.modes.append((training, seen.training))
        loss = self.model(features["x"])[:, 0]

        def metric(value):
            return tf.cast(tf.broadcast_to(value, loss.shape), loss.dtype)

        numbers = seen.positions % 4 + 1
        return ddl.PerExample(
            loss * 0,
            {
                "position": metric(seen.positions),
                "weight": metric(seen.weight),
                "mask": metric(seen.mask),
                "updates": metric(seen.step),
                "number": metric(numbers) / tf.cast(numbers, loss.dtype),
            },
        )


@pytest.mark.parametrize("where", [("one_device", 1, 1), ("mirrored", 2, 1), ("mirrored", 2, 2)])
def test_a_loss_sees_mask_weights_positions_and_step(where):
    set_precision("float64")
    strategy, replicas, microbatches = where
    weight = np.array([1, 3, 0, 1, 1, 1, 1, 1, 2, 2, 2], "f4")
    values = {"x": np.ones((11, 2)), "weight": weight}
    with make_strategy(strategy, replicas).scope():
        trainer = ddl.Trainer(
            Seeing(),
            keras.optimizers.SGD(0.1),
            values,
            eval_data=values,
            global_batch_size=8,
            accumulation_steps=microbatches,
            shuffle=False,
        )
    first, second = trainer.train(1), trainer.train(1)
    own, rest = weight[:8], weight[8:]
    assert first["position"] == pytest.approx(np.average(np.arange(8), weights=own))
    assert first["weight"] == pytest.approx(np.average(own, weights=own))
    assert first["mask"] == second["mask"] == 1  # what has no weight counts in no mean
    assert second["position"] == pytest.approx(np.average(np.arange(3), weights=rest))
    assert (first["updates"], second["updates"]) == (0, 1)
    assert trainer.evaluate()["updates"] == 2
    assert set(trainer.task.modes) == {(False, False), (True, True)}


def test_a_mask_is_false_for_padding():
    set_precision("float64")

    class Counting(Seeing):
        def __init__(self):
            super().__init__()
            self.rows = tf.Variable(tf.zeros([8], tf.bool), trainable=False)

        def per_example(self, features, training):
            mask = ddl.current_batch().mask
            if training and not tf.executing_eagerly():
                self.rows.assign(mask)
            return ddl.PerExample(self.model(features["x"])[:, 0])

    task = Counting()
    trainer = ddl.Trainer(
        task, keras.optimizers.SGD(0.1), {"x": np.ones((3, 2))}, global_batch_size=8
    )
    trainer.train(1)
    assert task.rows.numpy().tolist() == [True] * 3 + [False] * 5


def test_refused_outside_of_a_trainer():
    with pytest.raises(ConfigError, match="must be called in a loss that a ddl.Trainer runs"):
        ddl.current_batch()


def test_refused_in_a_step():
    """It has no rows."""

    class Step(Seeing):
        def step(self, update, batch):
            ddl.current_batch()

    with pytest.raises(ConfigError, match="In a step, use update.step"):
        ddl.Trainer(Step(), keras.optimizers.SGD(0.1), {"x": np.ones((8, 2))}, global_batch_size=8)
