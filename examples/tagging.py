"""Sequence labelling: finds the letters of a line that were capitals before it was lowered.

Loss, accuracy and F-score are means over the letters; padding counts nowhere.
"""

from typing import Any, Literal

import gin
import keras
import numpy as np
import tensorflow as tf

import ddl


@gin.register
class Capitals:
    """Gives each letter of a padded line the probability that it was a capital."""

    def __init__(self, width: int = 32) -> None:
        layers = keras.layers
        self.model = keras.Sequential(
            [
                keras.Input((None,), dtype="int64"),
                layers.Embedding(128, width, mask_zero=True),
                layers.Bidirectional(layers.GRU(width, return_sequences=True)),
                layers.Dense(1, "sigmoid", dtype=keras.config.floatx()),
            ]
        )
        self.f1 = ddl.metrics.KerasMetric("F1Score", {"threshold": 0.5, "average": "micro"})

    def per_example(self, features: dict[str, Any], training: bool) -> ddl.PerExample:
        """One loss for each letter, [batch, letters]; padding has weight 0."""
        letters, capital = features["letter"], features["capital"][..., tf.newaxis]
        found = self.model(letters, training=training)
        right = tf.cast((found > 0.5) == (capital > 0.5), found.dtype)[..., 0]
        metrics = {"accuracy": right, "f1": self.f1(capital, found)}
        loss = keras.losses.binary_crossentropy(capital, found)
        return ddl.PerExample(loss, metrics, weight=tf.cast(letters > 0, found.dtype))

    def predict(self, features: dict[str, Any]) -> tf.Tensor:
        """Returns the probabilities, [batch, letters]."""
        return self.model(features["letter"], training=False)[..., 0]


@gin.register
def lines_of_the_play(split: Literal["train", "test"], length: int) -> dict[str, np.ndarray]:
    """Returns lines of "Romeo and Juliet", lowered, and which letters were capitals.

    Args:
      split: "train" or "test".
      length: Letters of a line; shorter ones are padded with 0, longer ones are cut.
    """
    windows = ddl.data.play(split, 64)
    text = windows.rows(np.arange(len(windows)))["token"].astype("uint8").tobytes()
    lines = [line[:length].ljust(length, b"\0") for line in text.split(b"\n") if line.strip()]
    letters = np.frombuffer(b"".join(lines), np.uint8).reshape(-1, length)
    capital = (letters >= ord("A")) & (letters <= ord("Z"))
    lowered = np.where(capital, letters + 32, letters) & 127
    return {"letter": lowered.astype("int64"), "capital": capital.astype("float32")}
