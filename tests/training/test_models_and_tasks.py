"""Each model with its task: the same on several replicas and microbatches, and resumed."""

import inspect
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.precision import set_precision
from tests.conftest import make_strategy
from tests.training import model_cases
from tests.training.model_cases import (
    CASES,
    OnOneDevice,
    assert_close,
    assert_same,
    make_trainer,
    resumed,
    straight,
)


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory):
    return OnOneDevice(tmp_path_factory.mktemp("one"))


@pytest.mark.usefixtures("rows_checked_on_one_device")
@pytest.mark.parametrize("name", CASES)
def test_replicas_compute_what_one_device_computes(name, on_one_device, tmp_path):
    """Also if they resume, to the bit, and if one device resumes what they saved."""
    expected = on_one_device.results(name)
    trainer = make_trainer(name, make_strategy("mirrored", 2))
    found = straight(trainer, tmp_path)
    assert_close(found, expected)
    assert_same(resumed(trainer, tmp_path), found)
    assert_close(on_one_device.resumed(name, tmp_path), expected)


def test_every_model_and_task_has_a_case():
    source = inspect.getsource(model_cases)
    models = {*re.findall(r"ddl\.models\.(\w+)\(", source)}
    assert models == {*ddl.models.__all__} - {"generate", "load_exported"}
    tasks = {*re.findall(r"ddl\.(\w+)\(", source)}
    assert tasks >= {*ddl.tasks.__all__}


class OfTokens:
    """A loss for each of several tokens of an example, without weights."""

    def __init__(self):
        self.model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])

    def per_example(self, features, training):
        outputs = self.model(features["x"], training=training)
        return ddl.PerExample(tf.square(outputs - features["y"]))


@pytest.mark.parametrize("where", [("one_device", 1, 1), ("mirrored", 2, 2)])
def test_losses_of_tokens_are_divided_by_the_number_of_tokens(where):
    """As a loop without ddl computes it: parity between devices cannot show a common factor."""
    set_precision("float64")
    examples = 19  # the third batch has padding
    random = np.random.default_rng(0)
    data = {"x": random.normal(size=(examples, 3)), "y": random.normal(size=(examples, 4))}
    keras.utils.set_random_seed(1)
    with make_strategy(*where[:2]).scope():
        trainer = ddl.Trainer(
            OfTokens(),
            keras.optimizers.SGD(0.5),
            data,
            global_batch_size=8,
            accumulation_steps=where[2],
            shuffle=False,
        )
    keras.utils.set_random_seed(1)
    task, optimizer = OfTokens(), keras.optimizers.SGD(0.5)
    for first in range(0, examples, 8):
        rows = {name: values[first : first + 8] for name, values in data.items()}
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(task.per_example(rows, True).loss)
        variables = task.model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
    trainer.train(-(-examples // 8))
    for one, other in zip(trainer.model.variables, task.model.variables, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=0, atol=1e-12)
