"""SimCLR (Chen et al. 2020): learns from images without labels, by contrast with all others."""

from typing import Any

import gin
import keras
import tensorflow as tf

import ddl


@gin.register
class SimClr:
    """Finds the second view of an image among both views of all other images of the batch."""

    def __init__(self, encoder: keras.Model, width: int = 32, temperature: float = 0.2) -> None:
        layers, self.temperature = keras.layers, temperature
        hidden = layers.Dense(64, "relu")(layers.ReLU()(encoder.output))
        head = layers.Dense(width, dtype=keras.config.floatx(), name="head")
        self.model = keras.Model(encoder.input, head(hidden))
        self.views = [
            ddl.layers.RandomShift(1, 1),
            keras.layers.RandomErasing(1.0, scale=(0.1, 0.15), fill_value=0.0),
        ]
        self.exported_models = {"encoder": encoder}

    def view(self, images: tf.Tensor, training: bool) -> tf.Tensor:
        """Returns unit vectors of augmented images; each call draws anew."""
        for layer in self.views:
            images = layer(images, training=training)
        return tf.math.l2_normalize(self.model(images, training=training), axis=-1)

    def per_example(self, features: dict[str, Any], training: bool) -> ddl.PerExample:
        """NT-Xent: the cross-entropy of both views, and how often the other view is nearest."""
        one, two = (self.view(features["image"], training) for _ in range(2))
        batch = ddl.gather((one, two))
        ones, twos = batch.rows
        itself = tf.one_hot(batch.own, ones.shape[0], True, False, dtype=tf.bool)

        def contrast(
            view: tf.Tensor, others: tf.Tensor, same: tf.Tensor
        ) -> tuple[tf.Tensor, tf.Tensor]:
            to_others, to_same = (view @ tf.transpose(x) / self.temperature for x in (others, same))
            none = to_others.dtype.min
            to_others = tf.where(batch.mask, to_others, none)  # padding is no negative
            to_same = tf.where(batch.mask & ~itself, to_same, none)
            logits = tf.concat([to_others, to_same], axis=1)
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(batch.own, logits)
            return loss, tf.cast(tf.argmax(logits, axis=1) == batch.own, loss.dtype)

        (loss, found), (other_loss, _) = contrast(one, twos, ones), contrast(two, ones, twos)
        return ddl.PerExample((loss + other_loss) / 2, {"found": found})
