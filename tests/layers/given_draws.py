"""Draws that a test chooses, in place of `ddl.random`, to compare a layer with a reference."""

import keras
import numpy as np
import tensorflow as tf

import ddl.random


class GivenDraws:
    """Records the draws of a layer, in the order of its calls.

    Attributes:
      drawn: The draws, float32.
    """

    def __init__(self, monkeypatch, seed: int = 0):
        self.drawn: list[np.ndarray] = []
        random = np.random.default_rng(seed)

        def draw(function):
            def drawn(owner, shape):
                self.drawn.append(function(random, shape).astype(np.float32))
                return tf.constant(self.drawn[-1])

            return drawn

        def uniform(random, shape):
            return random.integers(0, 2**23, shape) / 2**23

        monkeypatch.setattr(ddl.random, "uniform", draw(uniform))

        def beta(shape, alpha, beta, dtype, seed):
            return draw(lambda r, _: r.beta(alpha, beta, shape))(None, shape)

        monkeypatch.setattr(ddl.random, "normal", draw(lambda r, shape: r.normal(size=shape)))
        monkeypatch.setattr(keras.random, "beta", beta)
