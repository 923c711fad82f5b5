"""Weights under another name than "weight", and weights that leave nothing to average."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.errors import DataError
from ddl.tasks.task import names_resembling_weight
from tests.conftest import make_strategy

ROWS = 8
DATA = {
    "x": np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32),
    "y": np.ones(ROWS, np.float32),
}
ZEROS = np.zeros(ROWS, np.float32)
ONES = np.ones(ROWS, np.float32)


class Regression:
    """Weights the losses by a feature: always, or in training only."""

    def __init__(self, weight=None, in_training_only=False, task_weight=None):
        self.model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        self.weight = weight
        self.in_training_only = in_training_only
        self.task_weight = task_weight

    def per_example(self, features, training):
        loss = (self.model(features["x"], training=training)[:, 0] - features["y"]) ** 2
        if self.weight and (training or not self.in_training_only):
            loss *= features.pop(self.weight)
        weight = None if self.task_weight is None else tf.fill([loss.shape[0]], self.task_weight)
        return ddl.PerExample(loss, weight=weight)


def make_trainer(data, eval_data=None, strategy=("one_device", 1), **task):
    strategy = make_strategy(*strategy)
    with strategy.scope():
        made = Regression(**task)
        optimizer = keras.optimizers.SGD(0.01)
        arguments = {"eval_data": eval_data, "global_batch_size": 4, "shuffle": False}
        return ddl.Trainer(made, optimizer, data, **arguments)


def stream(**features) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices({**DATA, **features})


def test_names_that_mean_weights():
    names = ["weight", "weights", "sample_weight", "sampleWeights", "entry_weight"]
    others = ["body_weight", "weighting", "x", "class_weight", "sample"]
    assert names_resembling_weight([*names, *others]) == names[1:]


@pytest.mark.parametrize("name", ["sample_weight", "weights"])
def test_a_weight_under_another_name_is_refused(name):
    with pytest.raises(DataError, match=f"feature '{name}' that Regression does not read"):
        make_trainer({**DATA, name: ONES}, strategy=("mirrored", 2))


def test_weights_of_entries_that_a_task_does_not_read_are_refused():
    weight = np.ones((ROWS, 3), np.float32)
    with pytest.raises(DataError, match="'entry_weight' that Regression does not read"):
        make_trainer({**DATA, "weight": weight}).trace()


def test_in_the_evaluation_data_too():
    with pytest.raises(DataError, match="'sample_weight' that Regression does not read"):
        make_trainer(DATA, {**DATA, "sample_weight": ONES})


@pytest.mark.parametrize("in_training_only", [False, True])
def test_a_task_may_read_it(in_training_only):
    data = {**DATA, "sample_weight": 2 * ONES}
    trainer = make_trainer(data, data, weight="sample_weight", in_training_only=in_training_only)
    plain = make_trainer(DATA)
    for one, other in zip(trainer.model.variables, plain.model.variables, strict=True):
        other.assign(one)
    assert trainer.train(1)["loss"] == pytest.approx(2 * plain.train(1)["loss"])
    assert np.isfinite(trainer.evaluate()["loss"])


def test_streams_of_zeros_are_refused_at_the_first_reading():
    trainer = make_trainer(stream(weight=ZEROS), stream(weight=ZEROS))
    with pytest.raises(DataError, match="updates 1 to 3 have weight 0.*the mean loss is undefined"):
        trainer.train(3)
    with pytest.raises(DataError, match="0 for all examples of the evaluation data"):
        trainer.evaluate()


@pytest.mark.parametrize("task_weight", [None, 0.0])
def test_what_may_pass_is_logged(task_weight, caplog):
    weight = np.repeat(np.array([1, 0], np.float32), 4)
    trainer = make_trainer(stream(weight=weight), DATA, task_weight=task_weight)
    first = trainer.train(1)["loss"]
    assert np.isnan(first) if task_weight == 0 else np.isfinite(first)
    assert np.isnan(trainer.train(1)["loss"])
    assert "updates 2 to 2 have weight 0, so the mean loss is NaN" in caplog.text
    assert np.isnan(trainer.evaluate()["loss"]) == (task_weight == 0)
