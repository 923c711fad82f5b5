"""Random changes of the colours of images, by position in the global batch."""

from typing import Any

import keras
import tensorflow as tf

from ddl.errors import ConfigError
from ddl.layers.broadcasting import with_rank
from ddl.layers.transforms.augmentation import Augmentation

_RED, _GREEN, _BLUE = 0.299, 0.587, 0.114
"""Parts of the luma of ITU-R BT.601."""


@keras.saving.register_keras_serializable("ddl")
class ColorJitter(Augmentation):
    """Changes brightness, contrast, saturation and hue of each image, in this order.

    Howard 2013, "Some Improvements on Deep Convolutional Neural Network Based Image
    Classification"; with hue in Chen et al. 2020, "A Simple Framework for Contrastive Learning of
    Visual Representations" (SimCLR), whose strengths are (0.8, 0.8, 0.8, 0.2). These papers draw
    the order, too. A factor is uniform in [1 - strength, 1 + strength), but at least 0:

        brightness   factor · image
        contrast     mean of the luma + factor · (image - mean)
        saturation   luma + factor · (image - luma)
        hue          turned by a part of the circle, uniform in [-strength, strength)

    Values are clipped to their range after each change.
    """

    def __init__(
        self,
        brightness: float = 0.4,
        contrast: float = 0.4,
        saturation: float = 0.4,
        hue: float = 0.1,
        value_range: tuple[float, float] = (0, 255),
        seed: int | None = None,
        **kwargs: Any,
    ):
        """Initializes the layer.

        Args:
          brightness: Strength, at least 0.
          contrast: Strength, at least 0.
          saturation: Strength, at least 0; no effect on grey images.
          hue: Strength, from 0 to 0.5; no effect on grey images.
          value_range: Smallest and largest pixel value.
          seed: Seed of the draws; a ddl trainer combines it with the seed of the run.
          **kwargs: Further arguments of `keras.layers.Layer`.

        Raises:
          ConfigError: If a strength is out of range.
        """
        super().__init__(seed, **kwargs)
        if min(brightness, contrast, saturation) < 0 or not 0 <= hue <= 0.5:
            raise ConfigError(
                "The strengths of ColorJitter must be at least 0, and that of hue at most 0.5, got "
                f"{brightness}, {contrast}, {saturation} and {hue}."
            )
        self.brightness = brightness
        self.contrast = contrast
        self.saturation = saturation
        self.hue = hue
        self.value_range = value_range

    def augmented(self, images: tf.Tensor) -> tf.Tensor:
        """Changes the colours, in float32 or for float64 images in float64; integers are rounded.

        Args:
          images: [batch, height, width, 3], or 1 channel for grey images.
        """
        channels = images.shape[-1]
        if channels not in (1, 3):
            raise ConfigError(
                f"ColorJitter takes images of 1 or 3 channels, got {channels}. Pass the channels "
                "of colour alone, or leave ColorJitter out."
            )
        low, high = self.value_range
        dtype = tf.float64 if images.dtype == tf.float64 else tf.float32
        drawn = [with_rank(tf.cast(2 * each - 1, dtype), 4) for each in self.uniform(images, 4)]
        values = (tf.cast(images, dtype) - low) * (1 / (high - low))
        strengths = (self.brightness, self.contrast, self.saturation)
        factors = [
            tf.maximum(1 + strength * each, 0.0)
            for strength, each in zip(strengths, drawn[:3], strict=True)
        ]
        if self.brightness:
            values = tf.clip_by_value(values * factors[0], 0.0, 1.0)
        if self.contrast:
            mean = tf.reduce_mean(luma(values), axis=[1, 2, 3], keepdims=True)
            values = tf.clip_by_value(mean + factors[1] * (values - mean), 0.0, 1.0)
        if self.saturation and channels == 3:
            grey = luma(values)
            values = tf.clip_by_value(grey + factors[2] * (values - grey), 0.0, 1.0)
        if self.hue and channels == 3:
            values = _turned(values, self.hue * drawn[3][..., 0])
        values = low + (high - low) * values
        if images.dtype.is_integer:
            return tf.saturate_cast(tf.round(values), images.dtype)
        return tf.cast(values, images.dtype)


def luma(values: tf.Tensor) -> tf.Tensor:
    """Returns the luma of colours, float [batch, height, width, 1]; of grey images the values."""
    if values.shape[-1] == 1:
        return values
    red, green, blue = tf.split(values, 3, axis=-1)
    return _RED * red + _GREEN * green + _BLUE * blue


def _turned(values: tf.Tensor, turn: tf.Tensor) -> tf.Tensor:
    """Turns the hue of colours from 0 to 1 by a part of the circle, float32 [batch, 1, 1]."""
    hue, saturation, value = tf.unstack(tf.image.rgb_to_hsv(values), axis=-1)
    turned = hue + turn
    return tf.image.hsv_to_rgb(tf.stack([turned - tf.floor(turned), saturation, value], axis=-1))
