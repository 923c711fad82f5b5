"""Two tasks on one network, each with a data set of its own: few digits with labels, all without.

The second task is to tell by how much an image was rotated (Gidaris et al. 2018, "Unsupervised
representation learning by predicting image rotations").
"""

from typing import Any

import gin
import keras
import tensorflow as tf

import ddl


@gin.register
class MultiTask:
    """Learns digits from the source "labelled" and rotations from the source "unlabelled"."""

    def __init__(self, body: keras.Model, weight: float = 1.0) -> None:
        self.body, self.weight = body, weight
        dense, floatx = keras.layers.Dense, keras.config.floatx()
        self.digit_head = dense(10, dtype=floatx, name="digit")
        self.rotation_head = dense(4, dtype=floatx, name="rotation")
        hidden = keras.layers.ReLU()(body.output)
        heads = {"digit": self.digit_head(hidden), "rotation": self.rotation_head(hidden)}
        self.model = keras.Model(body.input, heads)

    def per_example(self, features: dict[str, Any], training: bool) -> ddl.PerExample:
        """The loss and the accuracy of digits."""
        logits = self.model(features["image"], training=training)["digit"]
        return classified(logits, features["label"], "accuracy")

    def rotation(self, features: dict[str, Any], training: bool) -> ddl.PerExample:
        """The loss and the accuracy of rotations."""
        images = features["image"]
        turns = tf.cast(keras.random.uniform(images.shape[:1]) * 4, tf.int32)
        turned = tf.stack([tf.image.rot90(images, k) for k in range(4)], axis=1)
        images = tf.gather(turned, turns, axis=1, batch_dims=1)
        logits = self.model(images, training=training)["rotation"]
        return classified(logits, turns, "rotation_accuracy")

    def step(self, update: ddl.Update, batch: dict[str, ddl.StepBatch]) -> None:
        """Updates the body by both losses, and each head by its own."""
        shared = self.body.trainable_variables
        heads = self.digit_head.trainable_variables, self.rotation_head.trainable_variables
        digit = update.gradients(self.per_example, batch["labelled"], [*shared, *heads[0]])
        turned = update.gradients(self.rotation, batch["unlabelled"], [*shared, *heads[1]])
        turned *= self.weight
        both = digit.of(self.body) + turned.of(self.body)
        update.apply(both.and_of(digit.of(self.digit_head)).and_of(turned.of(self.rotation_head)))


def classified(logits: tf.Tensor, labels: tf.Tensor, name: str) -> ddl.PerExample:
    """Returns the cross-entropy of each example, and whether it is classified correctly."""
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    right = tf.argmax(logits, axis=-1) == tf.cast(labels, tf.int64)
    return ddl.PerExample(loss, {name: tf.cast(right, loss.dtype)})
