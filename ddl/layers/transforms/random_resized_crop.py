"""Random crops that are resized to one shape, by position in the global batch."""

import math
from typing import Any

import keras
import tensorflow as tf

import ddl.random
from ddl.errors import ConfigError
from ddl.layers.transforms.augmentation import Augmentation

_TRIES = 10
"""Tries for a crop that fits into the image; if none does, the first one is cut to the image."""


@keras.saving.register_keras_serializable("ddl")
class RandomResizedCrop(Augmentation):
    """Crops a random part of each image and resizes it to one shape.

    Szegedy et al. 2015, "Going Deeper with Convolutions", section 6. Area and aspect ratio are
    drawn for each image: the area uniformly from `scale`, the logarithm of the ratio uniformly from
    that of `ratio`. Interpolation is bilinear, without antialiasing, as in `tf.image.resize`.
    Outside of training images are resized whole, and stay as they are if they have the shape.
    """

    def __init__(
        self,
        height: int,
        width: int,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        seed: int | None = None,
        **kwargs: Any,
    ):
        """Initializes the layer.

        Args:
          height: Height of the results, in pixels.
          width: Width of the results, in pixels.
          scale: Smallest and largest area of a crop, as parts of the image's.
          ratio: Smallest and largest width of a crop divided by its height.
          seed: Seed of the draws; a ddl trainer combines it with the seed of the run.
          **kwargs: Further arguments of `keras.layers.Layer`.

        Raises:
          ConfigError: If an argument is out of range.
        """
        super().__init__(seed, **kwargs)
        if height < 1 or width < 1:
            raise ConfigError(
                "The height and width of RandomResizedCrop must be at least 1 pixel, got "
                f"{height} and {width}."
            )
        if not 0 < scale[0] <= scale[1] <= 1:
            raise ConfigError(
                f"RandomResizedCrop.scale must be two rising parts from 0 to 1, got {scale}."
            )
        if not 0 < ratio[0] <= ratio[1]:
            raise ConfigError(
                f"RandomResizedCrop.ratio must be two rising positive numbers, got {ratio}."
            )
        self.height = height
        self.width = width
        self.scale = tuple(scale)
        self.ratio = tuple(ratio)

    def call(self, images: tf.Tensor, training: bool = False) -> tf.Tensor:
        """Maps [batch, …, channels] to [batch, height, width, channels] of the same dtype."""
        if training:
            return self.augmented(images)
        if images.shape[1:3] == (self.height, self.width):
            return images
        batch, height, width, _ = keras.ops.shape(images)
        whole = (0.0, 0.0, _float(height), _float(width))
        return self._resized(images, *(tf.fill([batch], end) for end in whole))

    def augmented(self, images: tf.Tensor) -> tf.Tensor:
        """Crops and resizes images; integers are rounded."""
        batch, *sizes, _ = keras.ops.shape(images)
        height, width = (tf.convert_to_tensor(_float(size)) for size in sizes)
        drawn = ddl.random.uniform(self, [batch, _TRIES, 4])
        area, ratio, top, left = tf.unstack(drawn, axis=-1)  # [batch, tries]
        (smallest, largest), ends = self.scale, [math.log(end) for end in self.ratio]
        area = (smallest + (largest - smallest) * area) * (height * width)
        # In float64: the last bit of a float32 depends on the number of rows of a replica.
        area, ratio = tf.cast(area, tf.float64), tf.cast(ratio, tf.float64)
        ratio = tf.exp(ends[0] + (ends[1] - ends[0]) * ratio)
        rows, columns = (
            tf.cast(tf.round(tf.sqrt(each)), tf.float32) for each in (area / ratio, area * ratio)
        )
        fits = (rows >= 1) & (columns >= 1) & (rows <= height) & (columns <= width)
        first = tf.argmax(tf.cast(fits, tf.float32), axis=1)  # 0 if none fits
        tries = tf.stack([rows, columns, top, left], axis=-1)
        rows, columns, top, left = tf.unstack(tf.gather(tries, first, batch_dims=1), axis=1)
        rows, columns = tf.clip_by_value(rows, 1, height), tf.clip_by_value(columns, 1, width)
        top, left = tf.floor(top * (height - rows + 1)), tf.floor(left * (width - columns + 1))
        return self._resized(images, top, left, rows, columns)

    def _resized(
        self,
        images: tf.Tensor,
        top: tf.Tensor,
        left: tf.Tensor,
        rows: tf.Tensor,
        columns: tf.Tensor,
    ) -> tf.Tensor:
        """Resizes the crops that begin at (top, left), float32 [batch] each, in whole pixels."""
        dtype = tf.float64 if images.dtype == tf.float64 else tf.float32
        values = tf.cast(images, dtype)
        values = _interpolated(values, top, rows, self.height, axis=1)
        values = _interpolated(values, left, columns, self.width, axis=2)
        if images.dtype.is_integer:
            values = tf.round(values)
        return tf.cast(values, images.dtype)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns [batch, height, width, channels]."""
        return (input_shape[0], self.height, self.width, input_shape[3])


def _float(size: int | tf.Tensor) -> float | tf.Tensor:
    """Returns a size as a float32; TensorFlow computes with int32 on the host."""
    return float(size) if isinstance(size, int) else tf.cast(size, tf.float32)


def _interpolated(
    values: tf.Tensor, first: tf.Tensor, size: tf.Tensor, count: int, axis: int
) -> tf.Tensor:
    """Samples `count` places of each image along an axis, between pixels of its crop.

    Args:
      values: float [batch, height, width, channels].
      first: First pixel of the crop, float32 [batch].
      size: Pixels of the crop, float32 [batch].
      count: Number of places, at the centres of as many equal parts of the crop.
      axis: 1 or 2.
    """
    first, size = first[:, tf.newaxis], size[:, tf.newaxis]
    # In float64, since TensorFlow's graphs change the order of products with constants.
    parts = (tf.range(count, dtype=tf.float64) + 0.5) / count
    places = tf.cast(parts * tf.cast(size, tf.float64) - 0.5, tf.float32)
    places = tf.clip_by_value(places, 0.0, size - 1)
    lower = tf.floor(places)
    upper = tf.minimum(lower + 1, size - 1)
    share = tf.cast(places - lower, values.dtype)
    share = (
        share[:, :, tf.newaxis, tf.newaxis] if axis == 1 else share[:, tf.newaxis, :, tf.newaxis]
    )
    below, above = (
        tf.gather(values, tf.cast(first + each, tf.int64), axis=axis, batch_dims=1)
        for each in (lower, upper)
    )
    return below + (above - below) * share
