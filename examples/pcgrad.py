"""PCGrad (Yu et al. 2020, "Gradient surgery for multi-task learning") on two tasks."""

from typing import Any

import gin
import keras
import tensorflow as tf

import ddl


def without(one: ddl.Gradients, other: ddl.Gradients) -> ddl.Gradients:
    """Removes from a gradient what points against another one."""
    against = tf.minimum(one.dot(other), 0.0)
    return one - other * tf.math.divide_no_nan(against, other.dot(other))


@gin.register
class PCGrad:
    """Learns which digit an image shows and whether it is even: one body, two heads."""

    def __init__(self, body: keras.Model, project: bool = True) -> None:
        self.body, self.project = body, project
        dense, floatx = keras.layers.Dense, keras.config.floatx()
        self.digit_head = dense(10, dtype=floatx, name="digit")
        self.even_head = dense(1, dtype=floatx, name="even")
        hidden = keras.layers.ReLU()(body.output)
        heads = {"digit": self.digit_head(hidden), "even": self.even_head(hidden)}
        self.model = keras.Model(body.input, heads)

    def digit(self, features: dict[str, Any], training: bool) -> ddl.PerExample:
        """The first task's loss, and its accuracy."""
        logits = self.model(features["image"], training=training)["digit"]
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(features["label"], logits)
        right = tf.argmax(logits, axis=-1) == features["label"]
        return ddl.PerExample(loss, {"digit_accuracy": tf.cast(right, loss.dtype)})

    def even(self, features: dict[str, Any], training: bool) -> ddl.PerExample:
        """The second task's loss, and its accuracy."""
        logits = self.model(features["image"], training=training)["even"][:, 0]
        is_even = features["label"] % 2 == 0
        loss = tf.nn.sigmoid_cross_entropy_with_logits(tf.cast(is_even, logits.dtype), logits)
        right = (logits > 0) == is_even
        return ddl.PerExample(loss, {"even_accuracy": tf.cast(right, loss.dtype)})

    def evaluate(self, features: dict[str, Any]) -> ddl.PerExample:
        """The sum of both losses, and both accuracies."""
        digit, even = self.digit(features, training=False), self.even(features, training=False)
        return ddl.PerExample(digit.loss + even.loss, {**digit.metrics, **even.metrics})

    def step(self, update: ddl.Update, batch: ddl.StepBatch) -> None:
        """Updates the body by the projected gradients, and each head by its own."""
        shared = self.body.trainable_variables
        digit = update.gradients(self.digit, batch, [*shared, *self.digit_head.trainable_variables])
        even = update.gradients(self.even, batch, [*shared, *self.even_head.trainable_variables])
        one, other = digit.of(self.body), even.of(self.body)
        if self.project:
            one, other = without(one, other), without(other, one)
        heads = digit.of(self.digit_head).and_of(even.of(self.even_head))
        update.apply((one + other).and_of(heads))
