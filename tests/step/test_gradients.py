import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.errors import ConfigError, TrainingDiverged
from ddl.step import gradients as gradient_path
from tests.conftest import make_strategy


def test_refuses_an_optimizer_made_outside_the_scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    given = keras.optimizers.SGD(0.1), model.trainable_variables, make_strategy("mirrored", 2)
    with pytest.raises(ConfigError, match="outside the strategy's scope"):
        gradient_path.prepare_optimizer(*given)


def test_apply_takes_gradients_as_they_are(strategy):
    """Holds Keras's private hook: were it renamed, `apply` would sum over replicas again."""
    with strategy.scope():
        variables = [keras.Variable(np.ones(3)), keras.Variable(np.ones([2, 2]))]
        optimizer = keras.optimizers.SGD(0.25)
    gradient_path.prepare_optimizer(optimizer, variables, strategy)

    @tf.function(autograph=False)
    def update():
        strategy.run(lambda: optimizer.apply([tf.ones(v.shape) for v in variables], variables))

    update()
    for variable in variables:
        np.testing.assert_array_equal(variable.numpy(), np.full(variable.shape, 0.75))


class HugeRows:
    """An embedding whose row gets two gradients, each finite, that are not so together."""

    def __init__(self):
        words = keras.Input((2,), dtype="int64")
        self.model = keras.Model(words, keras.layers.Embedding(3, 1, name="table")(words))

    def per_example(self, features, training):
        y = self.model(features["words"], training=training)
        return ddl.PerExample(tf.reduce_sum(y, [1, 2]) * 3e38)


def test_rows_are_added_before_they_are_asked_to_be_finite():
    scale = ddl.LossScale(1.0, growth_interval=None)
    with make_strategy("mirrored", 2).scope():
        task, words = HugeRows(), {"words": np.ones([2, 2], "i8")}
        options = {"global_batch_size": 2, "loss_scale": scale, "max_skipped_updates": 1}
        trainer = ddl.Trainer(task, keras.optimizers.SGD(1.0), words, **options)
    before = task.model.weights[0].numpy()
    with pytest.raises(TrainingDiverged):
        trainer.train(1)
    np.testing.assert_array_equal(task.model.weights[0].numpy(), before)
