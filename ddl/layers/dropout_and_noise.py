"""Keras's dropout and noise layers, drawing by position in the global batch.

Each layer subclasses the Keras layer of the same name and keeps its arguments and config. Outside
a ddl trainer it draws like Keras. In a trainer the draws are bit-identical for any number of
replicas and microbatches, in every precision.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

import ddl.random
from ddl.layers.by_position import ByPosition
from ddl.layers.masking import kept_or_zero

register = keras.saving.register_keras_serializable("ddl")


@register
class Dropout(ByPosition, keras.layers.Dropout):
    """Drops a fraction `rate` of the input in training and scales the rest by 1 / (1 - rate).

    The rate is rounded to a multiple of 2⁻¹⁶; the scale uses the rounded rate.

    Srivastava et al. 2014, "Dropout: a simple way to prevent neural networks from overfitting".
    """

    def drawn(self, inputs: tf.Tensor) -> tf.Tensor:
        """Drops entries of `inputs`, float [batch, …]; see `Dropout`."""
        return _dropped(self, inputs, self.noise_shape)


class _SpatialDropout(ByPosition):
    """Drops whole feature maps. Tompson et al. 2015, "Efficient object localization"."""

    def drawn(self, inputs: tf.Tensor) -> tf.Tensor:
        """Drops feature maps of `inputs`, float [batch, …, channels]; see `Dropout`."""
        return _dropped(self, inputs, (None, *self._get_noise_shape(inputs)[1:]))


@register
class SpatialDropout1D(_SpatialDropout, keras.layers.SpatialDropout1D):
    """Drops whole channels of [batch, steps, channels]; see `Dropout`."""


@register
class SpatialDropout2D(_SpatialDropout, keras.layers.SpatialDropout2D):
    """Drops whole channels of [batch, height, width, channels]; see `Dropout`."""


@register
class SpatialDropout3D(_SpatialDropout, keras.layers.SpatialDropout3D):
    """Drops whole channels of [batch, depth, height, width, channels]; see `Dropout`."""


@register
class GaussianDropout(ByPosition, keras.layers.GaussianDropout):
    """Multiplies by normal noise of mean 1 and variance rate / (1 - rate) in training."""

    def drawn(self, inputs: tf.Tensor) -> tf.Tensor:
        """Multiplies `inputs`, float [batch, …], by the noise."""
        noise = ddl.random.normal(self, _shape(inputs))
        deviation = (self.rate / (1 - self.rate)) ** 0.5
        return inputs * tf.cast(1 + deviation * noise, inputs.dtype)


@register
class GaussianNoise(ByPosition, keras.layers.GaussianNoise):
    """Adds normal noise of standard deviation `stddev` in training."""

    def drawn(self, inputs: tf.Tensor) -> tf.Tensor:
        """Adds the noise to `inputs`, float [batch, …]."""
        return inputs + tf.cast(self.stddev * ddl.random.normal(self, _shape(inputs)), inputs.dtype)


@register
class AlphaDropout(ByPosition, keras.layers.AlphaDropout):
    """Dropout that preserves the mean and variance of SELU activations.

    Klambauer et al. 2017, "Self-Normalizing Neural Networks".
    """

    def drawn(self, inputs: tf.Tensor) -> tf.Tensor:
        """Sets dropped entries of `inputs`, float [batch, …], to the saturation value."""
        # Limit of SELU at -∞: -scale · alpha in the notation of the paper.
        saturated = -1.7580993408473766
        rate = 1 - ddl.random.as_drawn(1 - self.rate)
        if rate == 1:
            return tf.zeros_like(inputs)
        factor = ((1 - rate) * (1 + rate * saturated**2)) ** -0.5
        dropped = tf.where(_kept(self, inputs, self.noise_shape), inputs, saturated)
        return factor * dropped - factor * saturated * rate


def _dropped(layer: Any, inputs: tf.Tensor, noise_shape: Sequence[int | None] | None) -> tf.Tensor:
    share = ddl.random.as_drawn(1 - layer.rate)
    if share == 1:
        ddl.random.leave_out(layer)
        return inputs
    kept = _kept(layer, inputs, noise_shape)
    scale = tf.constant(1 / share if share else 0.0, inputs.dtype)
    return kept_or_zero(inputs, kept, scale)


def _kept(layer: Any, inputs: tf.Tensor, noise_shape: Sequence[int | None] | None) -> tf.Tensor:
    """Draws the entries to keep: bool of the noise shape."""
    given = noise_shape or [None] * len(inputs.shape)
    shape = [d if n is None else n for n, d in zip(given, _shape(inputs), strict=True)]
    # An explicit first dimension of 1 in the noise shape means one mask for the whole batch.
    return ddl.random.bernoulli(layer, shape, 1 - layer.rate, shared=given[0] == 1)


def _shape(inputs: tf.Tensor) -> list[Any]:
    """Returns the shape, with Python integers for static dimensions."""
    return list(keras.ops.shape(inputs))
