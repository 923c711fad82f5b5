"""Models whose parts are computed again: functional, sequential, subclassed."""

import keras
import numpy as np
import tensorflow as tf

_RANDOM = np.random.default_rng(0)
DATA = {
    "image": _RANDOM.integers(0, 256, (70, 6, 6, 1)).astype("u1"),
    "label": _RANDOM.integers(0, 3, 70),
}


def residual(blocks: int = 3) -> keras.Model:
    """Blocks of a branch with synchronized normalization and dropout, beside a shortcut."""
    image = keras.Input((6, 6, 1), name="image")
    x = keras.layers.Rescaling(1 / 255, name="scale")(image)
    x = keras.layers.Conv2D(3, 3, padding="same", name="stem")(x)
    for number in range(blocks):
        branch = keras.layers.Conv2D(3, 3, padding="same", name=f"block{number}_conv")(x)
        branch = keras.layers.BatchNormalization(name=f"block{number}_norm")(branch)
        branch = keras.layers.Activation("gelu", name=f"block{number}_gelu")(branch)
        branch = keras.layers.Dropout(0.3, name=f"block{number}_dropout")(branch)
        x = keras.layers.Add(name=f"block{number}_add")([x, branch])
    x = keras.layers.Flatten(name="flatten")(x)
    return keras.Model(image, keras.layers.Dense(3, name="logits")(x), name="residual")


def sequential() -> keras.Model:
    """A chain with Keras's own dropout, whose draws have no position."""
    layers = [keras.layers.Rescaling(1 / 255), keras.layers.Flatten()]
    for number in range(6):
        layers.append(keras.layers.Dense(5, activation="tanh", name=f"dense_{number}"))
        layers.append(keras.layers.Dropout(0.2, seed=number, name=f"dropout_{number}"))
    layers.append(keras.layers.Dense(3, name="logits"))
    return keras.Sequential([keras.Input((6, 6, 1)), *layers])


class Branch(keras.layers.Layer):
    """A layer without an argument `training`, which its dropout reads from the call around it."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.dense = keras.layers.Dense(8, activation="gelu")
        self.normalization = keras.layers.BatchNormalization()
        self.dropout = keras.layers.Dropout(0.3)

    def call(self, x, scale=1.0):
        # Draws twice.
        x = self.normalization(self.dropout(self.dense(self.dropout(x))))
        return {"x": x * scale}


class Subclassed(keras.Model):
    """A model of layers that its code calls, with a keyword argument that is a tensor."""

    def __init__(self):
        super().__init__(name="subclassed")
        self.first = keras.layers.Dense(8, name="first")
        self.branches = [Branch(name=f"branch_{number}") for number in range(2)]
        self.logits = keras.layers.Dense(3, name="logits")

    def call(self, image):
        x = self.first(tf.cast(tf.reshape(image, [-1, 36]), self.compute_dtype) / 255)
        for branch in self.branches:
            x = branch(x, scale=1.0 + tf.reduce_mean(x, -1, keepdims=True))["x"]
        return self.logits(x)
