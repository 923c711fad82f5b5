"""Weights under another name than "weight", which would have no effect."""

import keras
import numpy as np
import pytest

import ddl
from ddl.errors import DataError

DATA = {"x": np.ones((8, 3), "f4"), "y": np.ones(8, "f4")}


class Regression:
    def __init__(self):
        self.model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])

    def per_example(self, features, training):
        output = self.model(features["x"], training=training)[:, 0]
        return ddl.PerExample((output - features["y"]) ** 2)


@pytest.mark.parametrize(
    ("name", "rank", "shown"),
    [("sample_weight", 1, "sample_weight"), ("weight", 2, "entry_weight")],
)
def test_a_weight_that_the_task_does_not_read_is_refused(name, rank, shown):
    data = {**DATA, name: np.ones([8, 3][:rank], "f4")}
    with pytest.raises(DataError, match=f"feature '{shown}' that Regression does not read"):
        ddl.Trainer(Regression(), "sgd", data, global_batch_size=4)


class TwoLosses(Regression):
    def weighted(self, features, training):
        return self.per_example(features, training)._replace(weight=features["sample_weight"])

    def step(self, update, batch):
        plain = update.gradients(self.per_example, batch)
        update.apply(plain + update.gradients(self.weighted, batch))


def test_a_weight_that_one_of_several_losses_reads_is_taken():
    data = {**DATA, "sample_weight": np.ones(8, "f4")}
    ddl.Trainer(TwoLosses(), "sgd", data, global_batch_size=4)
