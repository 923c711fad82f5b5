"""VICReg (Bardes et al. 2022): learns from images without labels, and without negatives.

Two views of an image get near vectors. The variances and covariances of the whole batch keep all
images from getting the same one.
"""

from typing import Any

import gin
import keras
import tensorflow as tf

import ddl


@gin.register
class VicReg:
    """Invariance of each image; variance and covariance of the batch."""

    def __init__(self, encoder: keras.Model, width: int = 64, weight: float = 25.0) -> None:
        layers, self.weight = keras.layers, weight
        hidden = layers.Dense(128, "relu")(layers.ReLU()(encoder.output))
        head = layers.Dense(width, dtype=keras.config.floatx(), name="head")
        self.model = keras.Model(encoder.input, head(hidden))
        self.views = [
            ddl.layers.RandomShift(1, 1),
            keras.layers.RandomErasing(1.0, scale=(0.1, 0.15), fill_value=0.0),
        ]
        self.exported_models = {"encoder": encoder}

    def view(self, images: tf.Tensor, training: bool) -> tf.Tensor:
        """Returns vectors of augmented images; each call draws anew."""
        for layer in self.views:
            images = layer(images, training=training)
        return self.model(images, training=training)

    def per_example(self, features: dict[str, Any], training: bool) -> ddl.PerExample:
        """The three terms; those of the batch are the same for each example."""
        one, two = (self.view(features["image"], training) for _ in range(2))
        batch = ddl.gather((one, two))
        invariance = tf.reduce_mean(tf.square(one - two), axis=-1)
        variances, covariances = zip(*(moments(x, batch.mask) for x in batch.rows), strict=True)
        variance = tf.fill(invariance.shape, tf.add_n(variances) / 2)
        loss = self.weight * (invariance + variance) + tf.add_n(covariances)
        return ddl.PerExample(loss, {"invariance": invariance, "variance": variance})


def moments(rows: tf.Tensor, mask: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the terms of variance and covariance of vectors [batch, width], without padding."""
    counts = tf.cast(mask, rows.dtype)[:, tf.newaxis]
    number = tf.reduce_sum(counts)
    centred = counts * (rows - tf.reduce_sum(counts * rows, axis=0) / number)
    covariances = tf.transpose(centred) @ centred / tf.maximum(number - 1, 1)
    variances = tf.linalg.diag_part(covariances)
    others = tf.linalg.set_diag(covariances, tf.zeros_like(variances))
    spread = tf.reduce_mean(tf.nn.relu(1 - tf.sqrt(variances + 1e-4)))
    return spread, tf.reduce_sum(tf.reduce_mean(tf.square(others), axis=0))
