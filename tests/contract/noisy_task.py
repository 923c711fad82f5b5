"""A noisy task with its data, for Python and configs, and the callbacks of clusters."""

import json
import os
import signal
from pathlib import Path

import gin
import keras
import numpy as np
import tensorflow as tf

import ddl


@gin.register
def few_examples():
    """20 examples: the last batch of an epoch has four."""
    x = np.random.default_rng(0).normal(size=(20, 3))
    return {"x": x, "label": (x.sum(1) > 0).astype("int32")}


@gin.register
class NoisyTask:
    """A classifier of noisy examples whose first weights are always the same."""

    def __init__(self):
        layers, random = keras.layers, np.random.default_rng(1)
        hidden = [layers.Dense(4, "tanh"), layers.BatchNormalization(), layers.Dropout(0.2)]
        self.model = keras.Sequential([keras.Input((3,)), *hidden, layers.Dense(2)])
        for variable in self.model.trainable_variables:
            variable.assign(random.normal(size=variable.shape))

    def per_example(self, features, training):
        x = features["x"]
        if training:
            x += tf.cast(ddl.random.normal(self, x.shape), x.dtype)
        logits = tf.cast(self.model(x, training=training), x.dtype)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(features["label"], logits)
        right = tf.argmax(logits, -1, tf.int32) == features["label"]
        return ddl.PerExample(losses, {"accuracy": right})


class Averaging(NoisyTask):
    """The noisy task with a step and two states of its own: a target network and a count."""

    def __init__(self):
        super().__init__()
        self.target = keras.models.clone_model(self.model)
        self.count = tf.Variable(0, dtype=tf.int64)

    def step(self, update, batch):
        self.count.assign_add(1)
        update.minimize(self.per_example, batch)
        update.average(self.target, of=self.model, decay=0.5)


@gin.register
class DieOnce:
    """Sends the second worker a signal, unless there is no file or one that is not empty."""

    def __init__(self, file, number=signal.SIGKILL):
        self.file, self.number = Path(file), number

    def __call__(self, event):
        task = json.loads(os.environ["TF_CONFIG"])["task"]
        if task["index"] == 1 and self.file.exists() and not self.file.read_text():
            self.file.write_text("died")
            os.kill(os.getpid(), self.number)
