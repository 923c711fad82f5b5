"""Batch-hard triplets (Hermans et al. 2017): vectors that are near for images of one class."""

from typing import Any

import gin
import keras
import tensorflow as tf

import ddl


@gin.register
class Triplets:
    """Compares each image with the farthest one of its class and the nearest one of the others."""

    def __init__(self, model: keras.Model) -> None:
        self.model = model

    def per_example(self, features: dict[str, Any], training: bool) -> ddl.PerExample:
        """The soft margin of each image, and whether its nearest neighbour has its class."""
        outputs = self.model(features["image"], training=training)
        vectors = tf.math.l2_normalize(tf.cast(outputs, keras.config.floatx()), axis=-1)
        batch = ddl.gather((vectors, features["label"]))
        others, labels = batch.rows
        # Not squared: near zero, the gradient of a square vanishes, and all vectors stay one.
        distances = tf.sqrt(2 - 2 * vectors @ tf.transpose(others) + 1e-3)
        itself = tf.one_hot(batch.own, labels.shape[0], True, False, dtype=tf.bool)
        same = features["label"][:, tf.newaxis] == labels
        positive, negative = same & ~itself & batch.mask, ~same & batch.mask
        farthest = tf.reduce_max(tf.where(positive, distances, 0.0), axis=1)
        nearest = tf.reduce_min(tf.where(negative, distances, 2.0), axis=1)
        nearest_positive = tf.reduce_min(tf.where(positive, distances, 2.0), axis=1)
        loss = tf.nn.softplus(8 * (farthest - nearest))
        return ddl.PerExample(loss, {"found": tf.cast(nearest_positive < nearest, loss.dtype)})
