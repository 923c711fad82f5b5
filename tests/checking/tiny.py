"""A tiny task to plant mistakes in, and its trainer."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import ddl

layers = keras.layers
BATCH = 16


def data() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "x": random.normal(size=(60, 6)),
        "label": random.integers(0, 3, 60),
        "y": random.normal(size=60),
        "words": random.integers(0, 7, (60, 5)),
        "length": random.integers(1, 6, 60),
    }


def classifier(*hidden: Any, **options: Any) -> keras.Model:
    first = layers.Dense(8, "tanh", name="first", **options)
    return keras.Sequential([keras.Input((6,)), first, *hidden, layers.Dense(3, name="last")])


def cross_entropy(features: dict[str, Any], logits: tf.Tensor) -> tf.Tensor:
    return tf.nn.sparse_softmax_cross_entropy_with_logits(features["label"], logits)


class Tiny:
    """Three classes; a mistake overrides one of its parts."""

    def __init__(self, *hidden: Any, **options: Any) -> None:
        self.model = classifier(*hidden, **options)

    def inputs(self, x: tf.Tensor) -> tf.Tensor:
        return x

    def changed(self, loss: tf.Tensor, features: dict[str, Any]) -> tf.Tensor:
        return loss

    def per_example(self, features: dict[str, Any], training: bool) -> ddl.PerExample:
        logits = self.model(self.inputs(features["x"]), training=training)
        return ddl.PerExample(self.changed(cross_entropy(features, logits), features))


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.05, momentum=0.9)


def trainer(task: Any, optimizer: Any = None, **arguments: Any) -> ddl.Trainer:
    """Makes the trainer of a task; it reads only the features that the task needs."""
    given = {"train_data": data(), "global_batch_size": BATCH, "seed": 3} | arguments
    return ddl.Trainer(task, optimizer or sgd(), **given)
