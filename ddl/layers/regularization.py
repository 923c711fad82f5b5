"""Keras's dropout and noise layers, drawing by position in the global batch.

Each is Keras's layer of the same name, with its arguments, its config and, outside of a ddl
trainer, its draws. In a trainer N replicas and microbatches draw bit for bit what one device
does, in every precision.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

import ddl.random
from ddl import microbatch

register = keras.saving.register_keras_serializable("ddl")


@register
class Dropout(keras.layers.Dropout):
    """Drops a share `rate` of its input in training and scales the rest by 1 / (1 - rate).

    Srivastava et al. 2014, "Dropout: a simple way to prevent neural networks from overfitting".
    """

    draws_by_position = True

    def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        """From float [batch, …] to the same."""
        if not _draws(self, training):
            return super().call(inputs, training=training)
        return _dropped(self, inputs, self.noise_shape)


class _SpatialDropout(keras.layers.Layer):
    """Drops whole feature maps. Tompson et al. 2015, "Efficient object localization"."""

    draws_by_position = True

    def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        """From float [batch, …, channels] to the same."""
        if not _draws(self, training):
            return super().call(inputs, training=training)
        return _dropped(self, inputs, (None, *self._get_noise_shape(inputs)[1:]))


@register
class SpatialDropout1D(_SpatialDropout, keras.layers.SpatialDropout1D):
    """As `Dropout`, but whole channels of [batch, steps, channels]."""


@register
class SpatialDropout2D(_SpatialDropout, keras.layers.SpatialDropout2D):
    """As `Dropout`, but whole channels of [batch, height, width, channels]."""


@register
class SpatialDropout3D(_SpatialDropout, keras.layers.SpatialDropout3D):
    """As `Dropout`, but whole channels of [batch, depth, height, width, channels]."""


@register
class GaussianDropout(keras.layers.GaussianDropout):
    """Multiplies by normal noise of mean 1 and variance rate / (1 - rate) in training."""

    draws_by_position = True

    def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        """From float [batch, …] to the same."""
        if not _draws(self, training):
            return super().call(inputs, training=training)
        noise = ddl.random.normal(self, _shape(inputs), seed=self.seed)
        deviation = (self.rate / (1 - self.rate)) ** 0.5
        return inputs * tf.cast(1 + deviation * noise, inputs.dtype)


@register
class GaussianNoise(keras.layers.GaussianNoise):
    """Adds normal noise of standard deviation `stddev` in training."""

    draws_by_position = True

    def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        """From float [batch, …] to the same."""
        if not microbatch.current() or not training or not self.stddev:
            return super().call(inputs, training=training)
        noise = ddl.random.normal(self, _shape(inputs), seed=self.seed)
        return inputs + tf.cast(self.stddev * noise, inputs.dtype)


@register
class AlphaDropout(keras.layers.AlphaDropout):
    """Dropout that keeps mean and variance of SELU activations.

    Klambauer et al. 2017, "Self-Normalizing Neural Networks".
    """

    draws_by_position = True

    def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        """From float [batch, …] to the same."""
        if not _draws(self, training):
            return super().call(inputs, training=training)
        # What the SELU saturates to: -scale · alpha of that paper.
        saturated = -1.7580993408473766
        keep = 1 - self.rate
        factor = (keep * (1 + self.rate * saturated**2)) ** -0.5
        dropped = tf.where(_kept(self, inputs, self.noise_shape), inputs, saturated)
        return factor * dropped - factor * saturated * self.rate


def _draws(layer: Any, training: bool) -> bool:
    """Whether the layer drops at random, by position; Keras's own call does all else."""
    return microbatch.current() is not None and training and 0 < layer.rate < 1


def _dropped(layer: Any, inputs: tf.Tensor, noise_shape: Sequence[int | None] | None) -> tf.Tensor:
    scaled = inputs * tf.cast(1 / (1 - layer.rate), inputs.dtype)
    return tf.where(_kept(layer, inputs, noise_shape), scaled, tf.zeros([], inputs.dtype))


def _kept(layer: Any, inputs: tf.Tensor, noise_shape: Sequence[int | None] | None) -> tf.Tensor:
    """Which entries stay: bool of the noise shape."""
    given = noise_shape or [None] * len(inputs.shape)
    shape = [d if n is None else n for n, d in zip(given, _shape(inputs), strict=True)]
    # A first dimension of one, asked for by name, is one mask for the whole batch.
    values = ddl.random.uniform(layer, shape, seed=layer.seed, shared=given[0] == 1)
    return values >= layer.rate


def _shape(inputs: tf.Tensor) -> list[Any]:
    """The shape as Python integers where it is static."""
    return list(keras.ops.shape(inputs))
