import re

import keras
import numpy as np
import pytest
from absl import logging

import ddl
from ddl.errors import ConfigError
from ddl.tasks.parts import layers_of
from ddl.training.checks.model import (
    check_created_in_scope,
    computes_in_float16,
    warn_of_batch_moments,
)
from tests.conftest import make_strategy


def test_variables_must_be_made_in_the_scope():
    strategy = make_strategy("mirrored", 2)
    outside = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    with pytest.raises(ConfigError, match="created outside the strategy's scope"):
        check_created_in_scope(outside.trainable_variables, strategy)
    with strategy.scope():
        inside = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    check_created_in_scope(inside.trainable_variables, strategy)


def test_float16_is_seen():
    assert not computes_in_float16([keras.Sequential([keras.layers.Dense(1)])])
    assert not computes_in_float16(
        [keras.Sequential([keras.layers.Dense(1, dtype="mixed_bfloat16")])]
    )
    inner = keras.Sequential([keras.layers.Dense(1, dtype="mixed_float16")])
    assert computes_in_float16([keras.Sequential([keras.Input([1])]), keras.Sequential([inner])])


@pytest.mark.parametrize(
    ("replicas", "microbatches", "batch_moments", "said"),
    [
        (2, 1, "global", []),
        (1, 1, "per_replica", []),
        (2, 1, "per_replica", ["norm take moments of each replica's rows"]),
        (1, 2, "global", ["norm compute their moments on each microbatch.*ACCUMULATION_STEPS = 2"]),
    ],
)
def test_moments_that_depend_on_replicas_or_microbatches_are_told(
    replicas, microbatches, batch_moments, said, monkeypatch
):
    warnings = []
    monkeypatch.setattr(logging, "warning", lambda text, *args: warnings.append(text % args))
    layers = [keras.layers.BatchNormalization(name="norm"), keras.layers.Dense(2)]
    strategy = make_strategy("mirrored" if replicas > 1 else "one_device", replicas)
    warn_of_batch_moments(layers, strategy, microbatches, batch_moments)
    assert len(warnings) == len(said)
    assert all(map(re.search, said, warnings))


class Distilled(ddl.Classification):
    """A task with a teacher, which is called as the test says."""

    def __init__(self, model, teacher, teacher_trains):
        super().__init__(model)
        self.teacher = teacher
        self.teacher_trains = teacher_trains

    def per_example(self, features, training):
        own = super().per_example(features, training)
        taught = self.teacher(features["image"], training=training and self.teacher_trains)
        return ddl.PerExample(own.loss + keras.ops.mean(taught, -1), own.metrics)


@pytest.mark.parametrize("teacher_trains", [False, True])
def test_a_teacher_in_inference_mode_is_no_layer_of_training(teacher_trains):
    strategy = make_strategy("mirrored", 2)
    with strategy.scope():
        layers = [keras.layers.Flatten()]
        layers.append(keras.layers.BatchNormalization(name="norm"))
        teacher = keras.Sequential([keras.Input((6, 6, 1)), *layers])
        for variable in teacher.variables:
            variable.trainable = False
        task = Distilled(ddl.models.mlp((6, 6, 1), 2, dropout=0.0), teacher, teacher_trains)
        data = (np.zeros([8, 6, 6, 1], "f4"), np.arange(8) % 2)
        trainer = ddl.Trainer(task, keras.optimizers.SGD(0.1), data, global_batch_size=8)
    names = {layer.name for layer in trainer.training_layers}
    assert names >= {layer.name for layer in task.model.layers}
    assert ("norm" in names) == teacher_trains


class Holding:
    __slots__ = ("inner",)


class Wrapped(Holding):
    """A task around another, with slots."""

    __slots__ = ("model",)

    def __init__(self, inner):
        self.inner, self.model = inner, inner.model

    def per_example(self, features, training):
        return self.inner.per_example(features, training)


def test_layers_that_the_task_holds_are_found_too():
    flip, noise = keras.layers.RandomFlip(), keras.layers.GaussianNoise(0.1)
    task = ddl.Classification(ddl.models.mlp((6, 6, 1), 2, dropout=0.1), augmentations=[flip])
    task.by_name = {"noise": (noise,), 3: None}
    found = layers_of(task)
    assert flip in found
    assert noise in found
    assert any(isinstance(layer, keras.layers.Dropout) for layer in found)
    assert set(map(id, found)) <= set(map(id, layers_of(Wrapped(task))))
    assert len({id(layer) for layer in found}) == len(found)
