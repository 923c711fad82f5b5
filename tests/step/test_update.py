"""Gradients of rows that are finite alone, and not together."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.errors import TrainingDiverged
from ddl.precision import set_precision
from tests.conftest import make_strategy


class HugeRows:
    """An embedding whose row gets two gradients, each finite, that are not so together."""

    def __init__(self):
        words = keras.Input((2,), dtype="int64")
        self.model = keras.Model(words, keras.layers.Embedding(3, 1, name="table")(words))

    def per_example(self, features, training):
        y = self.model(features["words"], training=training)
        return ddl.PerExample(tf.reduce_sum(y, [1, 2]) * 3e38)


def test_rows_are_added_before_they_are_asked_to_be_finite():
    set_precision("float32")
    strategy = make_strategy("mirrored", 2)
    with strategy.scope():
        task, optimizer = HugeRows(), keras.optimizers.SGD(1.0)
    trainer = ddl.Trainer(
        task,
        optimizer,
        {"words": np.ones([2, 2], "i8")},
        global_batch_size=2,
        strategy=strategy,
        loss_scale=ddl.LossScale(1.0, growth_interval=None),
        max_skipped_updates=1,
    )
    before = task.model.weights[0].numpy()
    with pytest.raises(TrainingDiverged):
        trainer.train(1)
    np.testing.assert_array_equal(task.model.weights[0].numpy(), before)
