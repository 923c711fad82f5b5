"""Image augmentations that draw by position in the global batch.

Each layer maps images [batch, height, width, channels] of any numeric dtype to the same shape and
dtype. Each image is augmented independently. Outside training the images pass through unchanged.
"""

from typing import Any, Literal, get_args

import keras
import tensorflow as tf

import ddl.random
from ddl.errors import ConfigError, check_choice
from ddl.layers.broadcasting import with_rank

FlipMode = Literal["horizontal", "vertical", "horizontal_and_vertical"]

register = keras.saving.register_keras_serializable("ddl")


class Augmentation(keras.layers.Layer):
    """Base of the augmentations: holds the seed and changes images only in training."""

    draws_by_position = True

    def __init__(self, seed: int | None = None, **kwargs: Any):
        # The model's mixed-precision policy does not apply here: bytes stay bytes.
        super().__init__(autocast=False, **kwargs)
        self.seed = seed
        self.seed_generator = keras.random.SeedGenerator(seed)

    def call(self, images: tf.Tensor, training: bool = False) -> tf.Tensor:
        """Augments images [batch, height, width, channels] in training; shape and dtype stay."""
        return self.augmented(images) if training else images

    def augmented(self, images: tf.Tensor) -> tf.Tensor:
        """Augments each image [batch, height, width, channels] by its own random draw."""
        raise NotImplementedError

    def uniform(self, images: tf.Tensor, count: int) -> list[tf.Tensor]:
        """Draws `count` tensors, float32 [batch], uniform in [0, 1), one number per image."""
        return tf.unstack(ddl.random.uniform(self, [keras.ops.shape(images)[0], count]), axis=1)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns `input_shape`."""
        return input_shape


@register
class RandomFlip(Augmentation):
    """Mirrors each image with probability 1/2, like `keras.layers.RandomFlip`."""

    def __init__(
        self, mode: FlipMode = "horizontal_and_vertical", seed: int | None = None, **kwargs: Any
    ):
        """Initializes the layer.

        Args:
          mode: Direction of the flip; "horizontal_and_vertical" draws each direction independently.
          seed: Seed of the draws; a ddl trainer combines it with the seed of the run.
          **kwargs: Further arguments of `keras.layers.Layer`.

        Raises:
          ConfigError: If `mode` is unknown.
        """
        super().__init__(seed, **kwargs)
        check_choice("RandomFlip.mode", mode, get_args(FlipMode))
        self.mode = mode

    def augmented(self, images: tf.Tensor) -> tf.Tensor:
        """Flips images [batch, height, width, channels]."""
        across, down = self.uniform(images, 2)
        values = _as_bytes(images)
        if "horizontal" in self.mode:
            values = tf.where(with_rank(across < 0.5, 4), tf.reverse(values, [2]), values)
        if "vertical" in self.mode:
            values = tf.where(with_rank(down < 0.5, 4), tf.reverse(values, [1]), values)
        return _from_bytes(values, images)


@register
class RandomShift(Augmentation):
    """Shifts each image by a random number of whole pixels and fills with zeros.

    This equals zero padding followed by a random crop (He et al. 2015, "Deep residual learning",
    section 4.2). Keras's `RandomTranslation` shifts by fractions of a pixel.
    """

    def __init__(self, height: int, width: int, seed: int | None = None, **kwargs: Any):
        """Initializes the layer.

        Args:
          height: Largest vertical shift in pixels, up or down.
          width: Largest horizontal shift in pixels, left or right.
          seed: Seed of the draws; a ddl trainer combines it with the seed of the run.
          **kwargs: Further arguments of `keras.layers.Layer`.

        Raises:
          ConfigError: If a shift is negative.
        """
        super().__init__(seed, **kwargs)
        if height < 0 or width < 0:
            raise ConfigError(
                f"The height and width of RandomShift must be at least 0 pixels, got {height} and "
                f"{width}."
            )
        self.height = height
        self.width = width

    def augmented(self, images: tf.Tensor) -> tf.Tensor:
        """Shifts images [batch, height, width, channels]."""
        batch, height, width, _ = keras.ops.shape(images)
        rows, columns = height + 2 * self.height, width + 2 * self.width
        margins = [[0, 0], [self.height] * 2, [self.width] * 2, [0, 0]]
        values = tf.pad(_as_bytes(images), margins)
        if values.dtype.is_integer:  # of 8 bits, which TensorFlow cannot gather on GPUs
            values = tf.cast(values, tf.float32)
        # Places of pixels among those of all padded images, which are next to each other.
        drawn = ddl.random.uniform(self, [batch, 2])
        shift = _int64(tf.floor(drawn * [2.0 * self.height + 1, 2.0 * self.width + 1]))
        corner = tf.reduce_sum(shift * tf.stack([_int64(columns), _int64(1)]), axis=1)
        corner += tf.range(_int64(batch)) * _int64(rows * columns)
        within = tf.range(_int64(height))[:, tf.newaxis] * _int64(columns) + tf.range(_int64(width))
        channels = keras.ops.shape(values)[3]
        pixels = tf.reshape(values, [-1, channels])
        moved = tf.gather(pixels, corner[:, tf.newaxis, tf.newaxis] + within)
        return _from_bytes(tf.reshape(moved, [batch, height, width, channels]), images)


def _int64(values: Any) -> tf.Tensor:
    """Returns numbers as int64; TensorFlow computes with int32 on the host."""
    return tf.cast(values, tf.int64)


def _as_bytes(images: tf.Tensor) -> tf.Tensor:
    """Returns wide integers as bytes, uint8 [batch, height, width, channels · size].

    TensorFlow moves bytes on GPUs, but not all wide integers. The bits of an integer as a float
    would be moved, too, but may be a NaN, which tf.debugging.enable_check_numerics reports.

    Args:
      images: [batch, height, width, channels]; returned unchanged unless they are integers of
        several bytes.
    """
    if not _is_wide(images.dtype):
        return images
    *sizes, channels = keras.ops.shape(images)
    return tf.reshape(tf.bitcast(images, tf.uint8), [*sizes, channels * images.dtype.size])


def _from_bytes(values: tf.Tensor, images: tf.Tensor) -> tf.Tensor:
    """Returns values of `_as_bytes` in shape and dtype of the images."""
    if not _is_wide(images.dtype):
        return tf.cast(values, images.dtype)
    sizes = [*keras.ops.shape(images), images.dtype.size]
    return tf.bitcast(tf.reshape(tf.cast(values, tf.uint8), sizes), images.dtype)


def _is_wide(dtype: tf.DType) -> bool:
    return dtype.is_integer and dtype.size > 1


@register
class Cutout(Augmentation):
    """Zeroes a square of each image, centred on a random pixel and clipped at the border.

    DeVries and Taylor 2017, "Improved regularization of convolutional neural networks with
    cutout". Keras's `RandomErasing` erases rectangles of random size.
    """

    def __init__(self, size: int, seed: int | None = None, **kwargs: Any):
        """Initializes the layer.

        Args:
          size: Side of the square in pixels.
          seed: Seed of the draws; a ddl trainer combines it with the seed of the run.
          **kwargs: Further arguments of `keras.layers.Layer`.

        Raises:
          ConfigError: If `size` is less than 1.
        """
        super().__init__(seed, **kwargs)
        if size < 1:
            raise ConfigError(f"Cutout.size must be at least 1 pixel, got {size}.")
        self.size = size

    def augmented(self, images: tf.Tensor) -> tf.Tensor:
        """Zeroes a square in each of the images [batch, height, width, channels]."""
        batch, height, width, _ = keras.ops.shape(images)
        # In float32, since TensorFlow computes with int32 on the host. Halves are exact.
        drawn = ddl.random.uniform(self, [batch, 2])
        lengths = tf.stack([tf.cast(length, tf.float32) for length in (height, width)])
        reach = (self.size - 1) / 2
        middle = tf.floor(drawn * lengths) + (reach - self.size // 2)
        down, across = (
            tf.abs(tf.range(length) - center[:, tf.newaxis]) <= reach
            for length, center in zip(tf.unstack(lengths), tf.unstack(middle, axis=1), strict=True)
        )
        square = down[:, :, tf.newaxis, tf.newaxis] & across[:, tf.newaxis, :, tf.newaxis]
        return tf.where(square, tf.zeros([], images.dtype), images)


class _WithinRange(Augmentation):
    """Changes pixel values by a factor drawn for each image, and clips them to a range.

    The arithmetic is in float32, or in float64 for float64 images. In float16 the mean of an image
    would overflow.
    """

    def __init__(
        self,
        factor: float,
        value_range: tuple[float, float] = (0, 255),
        seed: int | None = None,
        **kwargs: Any,
    ):
        """Initializes the layer.

        Args:
          factor: Largest relative change, from 0 to 1.
          value_range: Smallest and largest pixel value; the results are clipped to it.
          seed: Seed of the draws; a ddl trainer combines it with the seed of the run.
          **kwargs: Further arguments of `keras.layers.Layer`.

        Raises:
          ConfigError: If `factor` is not between 0 and 1.
        """
        super().__init__(seed, **kwargs)
        if not 0 <= factor <= 1:
            raise ConfigError(f"{type(self).__name__}.factor must be from 0 to 1, got {factor}.")
        self.factor = factor
        self.value_range = value_range

    def augmented(self, images: tf.Tensor) -> tf.Tensor:
        """Changes the images; integer images are rounded and saturated to their dtype."""
        (drawn,) = self.uniform(images, 1)
        values = tf.cast(images, tf.float64 if images.dtype == tf.float64 else tf.float32)
        factor = with_rank(tf.cast((2 * drawn - 1) * self.factor, values.dtype), 4)
        values = tf.clip_by_value(self.changed(values, factor), *self.value_range)
        if images.dtype.is_integer:
            return tf.saturate_cast(tf.round(values), images.dtype)
        return tf.cast(values, images.dtype)

    def changed(self, values: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
        """Changes the values by a factor [batch, 1, 1, 1] in [-self.factor, self.factor)."""
        raise NotImplementedError


@register
class RandomBrightness(_WithinRange):
    """Adds one random number to all pixels of an image, like `keras.layers.RandomBrightness`.

    The number is uniform in [-factor, factor), times the width of the value range.
    """

    def changed(self, values: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
        """Adds `factor` times the width of the value range."""
        low, high = self.value_range
        return values + factor * (high - low)


@register
class RandomContrast(_WithinRange):
    """Scales the deviation of each channel from its mean, like `keras.layers.RandomContrast`.

    The scale is drawn per image, uniform in [1 - factor, 1 + factor).
    """

    def changed(self, values: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
        """Scales the deviation from the mean of each image and channel by `1 + factor`."""
        mean = tf.reduce_mean(values, axis=[1, 2], keepdims=True)
        return mean + (1 + factor) * (values - mean)
