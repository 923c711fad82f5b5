"""CLIP (Radford et al. 2021) on toy pairs: the left half of each digit belongs to its right half.

Two encoders learn vectors of which those of a pair are near each other, and far from all others.
"""

from typing import Any

import gin
import keras
import tensorflow as tf

import ddl


def encoder(name: str, hidden: int, width: int) -> keras.Model:
    """Returns a network that maps half images to vectors."""
    layers = keras.layers
    hidden_layers = [layers.Rescaling(1 / 16), layers.Flatten(), layers.Dense(hidden, "relu")]
    head = layers.Dense(width, dtype=keras.config.floatx())
    return keras.Sequential([keras.Input((8, 4, 1)), *hidden_layers, head], name=name)


@gin.register
class Clip:
    """Finds the right half of an image among those of the batch, and the left half of a right."""

    def __init__(self, width: int = 32, hidden: int = 128, temperature: float = 0.1) -> None:
        self.temperature = temperature
        image = keras.Input((8, 8, 1), name="image")
        left, right = (keras.layers.Cropping2D(((0, 0), columns)) for columns in ((0, 4), (4, 0)))
        halves = {"left": left(image), "right": right(image)}
        self.exported_models = {name: encoder(name, hidden, width) for name in halves}
        outputs = [self.exported_models[name](half) for name, half in halves.items()]
        self.model = keras.Model(image, outputs)

    def per_example(self, features: dict[str, Any], training: bool) -> ddl.PerExample:
        """The mean cross-entropy of both directions, and how often the right half is found."""
        outputs = self.model(features["image"], training=training)
        left, right = (tf.math.l2_normalize(x, axis=-1) for x in outputs)
        batch = ddl.gather((left, right))

        def logits(own: tf.Tensor, others: tf.Tensor) -> tf.Tensor:
            similar = own @ tf.transpose(others) / self.temperature
            return tf.where(batch.mask, similar, similar.dtype.min)  # padding is no negative

        to_right, to_left = logits(left, batch.rows[1]), logits(right, batch.rows[0])
        cross_entropy = tf.nn.sparse_softmax_cross_entropy_with_logits
        loss = (cross_entropy(batch.own, to_right) + cross_entropy(batch.own, to_left)) / 2
        found = tf.cast(tf.argmax(to_right, axis=1) == batch.own, loss.dtype)
        return ddl.PerExample(loss, {"found": found})
