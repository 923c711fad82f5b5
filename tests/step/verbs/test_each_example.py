"""Gradients of single examples (DP-SGD), against a loop over the examples."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ddl
from ddl.errors import ConfigError
from ddl.precision import set_precision
from tests.conftest import make_strategy
from tests.step.verbs.own_steps import data

LIMIT = 0.3


class Clipped:
    """Tokens with an embedding, weights of the data and of the task."""

    def __init__(self):
        self.model = keras.Sequential(
            [
                keras.Input((5,), dtype="int32"),
                keras.layers.Embedding(7, 4),
                keras.layers.Dense(3),
            ]
        )

    def per_example(self, features, training):
        logits = self.model(features["token"], training=training)
        label = tf.tile(features["label"][:, tf.newaxis], [1, 5])
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(label, logits)
        return ddl.PerExample(loss, weight=tf.cast(features["token"] > 1, loss.dtype))

    def each(self, gradients):
        norm = tf.linalg.global_norm(gradients)
        return [g * tf.minimum(tf.constant(1.0, g.dtype), LIMIT / norm) + 0.01 for g in gradients]

    def step(self, update, batch):
        update.apply(update.gradients(self.per_example, batch, each=self.each))


def values():
    random = np.random.default_rng(1)
    return {
        "token": random.integers(0, 7, (11, 5)).astype("i4"),
        "label": random.integers(0, 3, 11),
        "weight": random.uniform(0.5, 2, 11).astype("f4"),
    }


def test_what_a_loop_over_the_examples_computes():
    """Padding adds nothing, although `each` adds something to each gradient.

    The loss of an example is the mean of its losses by the task's weights, times the weight of the
    data; the sum is divided by the weights of the data. A loss scale is taken out before: clipping
    what is scaled would clip everything.
    """
    set_precision("float64")
    options = {"global_batch_size": 8, "accumulation_steps": 2, "shuffle": False}
    options["loss_scale"] = ddl.LossScale(4096.0)
    keras.utils.set_random_seed(7)
    with make_strategy("mirrored", 2).scope():
        trainer = ddl.Trainer(Clipped(), keras.optimizers.SGD(0.5), values(), **options)
    keras.utils.set_random_seed(7)
    task, optimizer, every = Clipped(), keras.optimizers.SGD(0.5), values()
    trained = task.model.trainable_variables
    for batch in (slice(0, 8), slice(8, 11)):
        rows = {name: value[batch] for name, value in every.items()}
        weights = rows.pop("weight").astype("f8")
        total = [tf.zeros_like(v) for v in trained]
        for place, weight in enumerate(weights):
            own = {name: value[place : place + 1] for name, value in rows.items()}
            with tf.GradientTape() as tape:
                output = task.per_example(own, True)
                mean = tf.reduce_sum(output.loss * output.weight) / tf.reduce_sum(output.weight)
                loss = mean * weight
            gradients = [tf.convert_to_tensor(g) for g in tape.gradient(loss, trained)]
            total = [a + b for a, b in zip(total, task.each(gradients), strict=True)]
        optimizer.apply([g / weights.sum() for g in total], trained)
    trainer.train(2)
    for one, other in zip(trainer.model.variables, task.model.variables, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=0, atol=1e-10)


class Given:
    """A classifier with a given layer and `each`."""

    def __init__(self, each, *layers):
        self.model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(3)])
        self.each = each

    def per_example(self, features, training):
        logits = tf.cast(self.model(features["x"], training=training), tf.float32)
        return ddl.PerExample(tf.reduce_sum(logits, axis=1) * 1e6)

    def step(self, update, batch):
        update.apply(update.gradients(self.per_example, batch, each=self.each))


def given(each, *layers, **arguments):
    rows = {"x": data(48)["x"].astype("f4")}
    with make_strategy("mirrored", 2).scope():
        task, optimizer = Given(each, *layers), keras.optimizers.SGD(0.1)
        return ddl.Trainer(task, optimizer, rows, global_batch_size=16, **arguments)


def test_refuses_normalization_over_the_batch_and_other_shapes():
    normalized = given(lambda own: own, keras.layers.BatchNormalization())
    with pytest.raises(ConfigError, match="does not go with BatchNormalization"):
        normalized.trace()
    with pytest.raises(ConfigError, match="a tensor of the same shape for each"):
        given(lambda own: [tf.reduce_sum(g) for g in own]).trace()


def test_an_overflow_that_the_function_hides_skips_the_update():
    """tf.clip_by_value makes an infinity a 1."""
    set_precision("mixed_float16")
    clip = lambda own: [tf.clip_by_value(g, -1.0, 1.0) for g in own]  # noqa: E731
    trainer = given(clip, loss_scale=ddl.LossScale(1024.0), max_skipped_updates=3)
    trainer.trace()
    state = trainer._runner.loop.run(trainer.state, 1)
    assert int(state.batches) - int(state.step) > 0
