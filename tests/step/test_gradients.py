import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.errors import TrainingDiverged
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
    scale = ddl.LossScale(1.0, growth_interval=None)
    with make_strategy("mirrored", 2).scope():
        task, words = HugeRows(), {"words": np.ones([2, 2], "i8")}
        options = {"global_batch_size": 2, "loss_scale": scale, "max_skipped_updates": 1}
        trainer = ddl.Trainer(task, keras.optimizers.SGD(1.0), words, **options)
    before = task.model.weights[0].numpy()
    with pytest.raises(TrainingDiverged):
        trainer.train(1)
    np.testing.assert_array_equal(task.model.weights[0].numpy(), before)
