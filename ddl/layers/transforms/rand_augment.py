"""RandAugment, by position in the global batch.

Each image gets operations of its own. All images of a batch pass through three computations, each
of which does nothing to an image that has drawn another operation: a table of 256 levels for each
channel, a blend with a grey or smoothed image, and a sampling of moved pixels.
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import ddl.random
from ddl.errors import ConfigError
from ddl.layers.broadcasting import with_rank
from ddl.layers.transforms.augmentation import Augmentation
from ddl.layers.transforms.image_operations import (
    as_float,
    autocontrast_table,
    counts_of_levels,
    equalizing_table,
    grey,
    looked_up,
    moved,
    smoothed,
)

OPERATIONS = (
    *("identity", "autocontrast", "equalize", "rotate", "solarize", "color", "posterize"),
    *("contrast", "brightness", "sharpness", "shear_x", "shear_y", "translate_x", "translate_y"),
)
"""The operations, in the order of the paper; each is drawn with the same probability."""

_MOST = 10
_DEGREES = 30
_SHEAR = 0.3
_TRANSLATION = 0.45
_FACTOR = 0.9
_BITS = 4


@keras.saving.register_keras_serializable("ddl")
class RandAugment(Augmentation):
    """Applies a few random operations of one magnitude to each image.

    Cubuk et al. 2020, "RandAugment: Practical automated data augmentation with a reduced search
    space", with its 14 operations. The paper takes (num_layers, magnitude) = (2, 9) for ResNet-50
    on ImageNet. At the largest magnitude, 10, and in proportion below:

        rotate                        by 30 degrees, about the centre
        shear_x, shear_y              by 0.3 pixels a pixel, from the upper left corner
        translate_x, translate_y      by 0.45 of the width or height
        color, contrast, brightness,  a factor of 1 ± 0.9 of the distance from the grey image, its
        sharpness                     mean, black, and the smoothed image
        posterize                     4 of the 8 bits are kept
        solarize                      all levels are inverted; below, those from the threshold on

    Directions, and the signs of the factors, are drawn. Moved pixels are the nearest ones; the
    pixels that come in have the middle level, 128. Results are rounded to levels.
    """

    def __init__(
        self,
        num_layers: int = 2,
        magnitude: float = 9,
        value_range: tuple[float, float] = (0, 255),
        seed: int | None = None,
        **kwargs: Any,
    ):
        """Initializes the layer.

        Args:
          num_layers: Number of operations that each image gets, one after the other.
          magnitude: Strength of all operations, from 0 to 10.
          value_range: Pixel values of the levels 0 and 255. Images are rounded to these 256 levels.
          seed: Seed of the draws; a ddl trainer combines it with the seed of the run.
          **kwargs: Further arguments of `keras.layers.Layer`.

        Raises:
          ConfigError: If an argument is out of range.
        """
        super().__init__(seed, **kwargs)
        if num_layers < 1:
            raise ConfigError(f"RandAugment.num_layers must be at least 1, got {num_layers}.")
        if not 0 <= magnitude <= _MOST:
            raise ConfigError(f"RandAugment.magnitude must be from 0 to 10, got {magnitude}.")
        self.num_layers = num_layers
        self.magnitude = magnitude
        self.value_range = value_range

    def augmented(self, images: tf.Tensor) -> tf.Tensor:
        """Applies the operations to images [batch, height, width, 1 or 3]."""
        if images.shape.rank != 4 or images.shape[-1] not in (1, 3):
            raise ConfigError(
                "RandAugment takes images [batch, height, width, channels] of 1 or 3 channels, got "
                f"{images.shape}. Pass the channels of colour alone, or leave RandAugment out."
            )
        low, high = self.value_range
        levels = tf.cast(images, tf.float32)
        if (low, high) != (0, 255):
            levels = (levels - low) * (255 / (high - low))
        levels = tf.clip_by_value(tf.round(levels), 0.0, 255.0)
        drawn = ddl.random.uniform(self, [keras.ops.shape(images)[0], 2 * self.num_layers])
        columns = tf.unstack(drawn, axis=1)
        for which, side in zip(columns[::2], columns[1::2], strict=True):
            operation = tf.floor(which * len(OPERATIONS))
            levels = self.applied(levels, operation, tf.where(side < 0.5, -1.0, 1.0))
        if (low, high) != (0, 255):
            levels = low + levels * ((high - low) / 255)
            levels = tf.round(levels) if images.dtype.is_integer else levels
        return tf.cast(levels, images.dtype)

    def applied(self, levels: tf.Tensor, operation: tf.Tensor, sign: tf.Tensor) -> tf.Tensor:
        """Applies an operation to each image.

        Args:
          levels: Whole numbers from 0 to 255, float32 [batch, height, width, channels].
          operation: Place of the operation in `OPERATIONS`, float32 [batch].
          sign: -1 or 1, float32 [batch].
        """
        part = self.magnitude / _MOST
        is_one = {name: tf.equal(operation, float(n)) for n, name in enumerate(OPERATIONS)}
        levels = looked_up(levels, self._table(levels, is_one, part))
        levels = self._blended(levels, is_one, 1 + sign * _FACTOR * part)
        height, width = (as_float(size) for size in keras.ops.shape(levels)[1:3])
        shear, angle = sign * _SHEAR * part, sign * float(np.deg2rad(_DEGREES * part))
        nothing = tf.zeros_like(sign)

        def only(name: str, value: tf.Tensor) -> tf.Tensor:
            return tf.where(is_one[name], value, nothing)

        turned = only("rotate", angle)
        # In float64: the last bit of a float32 depends on the number of rows of a replica.
        turned = tf.cast(turned, tf.float64)
        cosine, sine = tf.cast(tf.cos(turned), tf.float32), tf.cast(tf.sin(turned), tf.float32)
        # The pixel at (y, x) comes from (y_y · y + y_x · x + y_0, x_y · y + x_x · x + x_0).
        middle_y, middle_x = height / 2, width / 2
        return moved(
            levels,
            y_y=cosine,
            y_x=sine + only("shear_y", shear),
            y_0=middle_y
            - cosine * middle_y
            - sine * middle_x
            + only("translate_y", tf.round(sign * _TRANSLATION * part * height)),
            x_y=only("shear_x", shear) - sine,
            x_x=cosine,
            x_0=middle_x
            - cosine * middle_x
            + sine * middle_y
            + only("translate_x", tf.round(sign * _TRANSLATION * part * width)),
        )

    def _table(self, levels: tf.Tensor, is_one: dict[str, tf.Tensor], part: float) -> tf.Tensor:
        """Returns the new level for each level, float32 [batch, channels, 256]."""
        level = tf.range(256, dtype=tf.float32)
        counts = counts_of_levels(levels)
        step = 2.0 ** round(_BITS * part)
        tables = {
            "autocontrast": autocontrast_table(counts),
            "equalize": equalizing_table(counts),
            "solarize": tf.where(level < 256 * (1 - part), level, 255 - level),
            "posterize": tf.floor(level / step) * step,
        }
        table = level + tf.zeros_like(counts)
        for name, each in tables.items():
            table = tf.where(with_rank(is_one[name], 3), each, table)
        return table

    def _blended(
        self, levels: tf.Tensor, is_one: dict[str, tf.Tensor], factor: tf.Tensor
    ) -> tf.Tensor:
        """Moves images from, or towards, an image without colour, contrast, light or edges."""
        exact = tf.cast(grey(levels), tf.float64)
        mean = tf.round(tf.reduce_mean(exact, axis=[1, 2, 3], keepdims=True))
        mean = tf.cast(mean, tf.float32)
        others = {
            "color": grey(levels),
            "contrast": mean,
            "brightness": tf.zeros([]),
            "sharpness": smoothed(levels),
        }
        other = levels
        for name, each in others.items():
            other = tf.where(with_rank(is_one[name], 4), each, other)
        blended = other + with_rank(factor, 4) * (levels - other)
        return tf.clip_by_value(tf.round(blended), 0.0, 255.0)
