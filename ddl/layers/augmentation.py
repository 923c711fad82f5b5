"""Image augmentations that draw by position in the global batch.

Layers from images [batch, height, width, channels], of any number type, to the same shape and
dtype; they change images in training alone. Each example draws for itself.
"""

from typing import Any, Literal, get_args

import keras
import tensorflow as tf

import ddl.random
from ddl.broadcasting import with_rank
from ddl.errors import ConfigError, check_choice

FlipMode = Literal["horizontal", "vertical", "horizontal_and_vertical"]

register = keras.saving.register_keras_serializable("ddl")


class _Augmentation(keras.layers.Layer):
    """What the augmentations share: a seed, and leaving images alone outside of training."""

    draws_by_position = True

    def __init__(self, seed: int | None = None, **kwargs: Any):
        # Nothing here is computed in the precision of the model: bytes stay bytes.
        super().__init__(autocast=False, **kwargs)
        self.seed = seed
        self.seed_generator = keras.random.SeedGenerator(seed)

    def call(self, images: tf.Tensor, training: bool = False) -> tf.Tensor:
        """From [batch, height, width, channels] to the same."""
        return self.augmented(images) if training else images

    def augmented(self, images: tf.Tensor) -> tf.Tensor:
        """The images, each changed by what is drawn for it."""
        raise NotImplementedError

    def uniform(self, images: tf.Tensor, count: int) -> list[tf.Tensor]:
        """`count` tensors of numbers in [0, 1), float32 [batch], for these images."""
        return tf.unstack(ddl.random.uniform(self, [keras.ops.shape(images)[0], count]), axis=1)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """The same."""
        return input_shape


@register
class RandomFlip(_Augmentation):
    """Mirrors half of the images, chosen at random, as Keras's layer of this name does."""

    def __init__(
        self, mode: FlipMode = "horizontal_and_vertical", seed: int | None = None, **kwargs: Any
    ):
        """Takes the direction; with "horizontal_and_vertical" each is drawn by itself."""
        super().__init__(seed, **kwargs)
        check_choice("RandomFlip's mode", mode, get_args(FlipMode))
        self.mode = mode

    def augmented(self, images: tf.Tensor) -> tf.Tensor:
        """See `RandomFlip`."""
        across, down = self.uniform(images, 2)
        if "horizontal" in self.mode:
            images = tf.where(with_rank(across < 0.5, 4), tf.reverse(images, [2]), images)
        if "vertical" in self.mode:
            images = tf.where(with_rank(down < 0.5, 4), tf.reverse(images, [1]), images)
        return images


@register
class RandomShift(_Augmentation):
    """Moves each image by whole pixels; what comes in is zero.

    The same as padding by so many pixels and cropping at random (He et al. 2015, "Deep residual
    learning", section 4.2). Keras's RandomTranslation moves by fractions of a pixel.
    """

    def __init__(self, height: int, width: int, seed: int | None = None, **kwargs: Any):
        """Takes the largest shifts in pixels, each way."""
        super().__init__(seed, **kwargs)
        if height < 0 or width < 0:
            raise ConfigError(f"RandomShift by {height} and {width} pixels: they are 0 or more")
        self.height = height
        self.width = width

    def augmented(self, images: tf.Tensor) -> tf.Tensor:
        """See `RandomShift`."""
        down, across = self.uniform(images, 2)
        zero, one = tf.zeros_like(down), tf.ones_like(down)
        down = tf.floor(down * (2 * self.height + 1)) - self.height
        across = tf.floor(across * (2 * self.width + 1)) - self.width
        # Where each pixel comes from: (x + across, y + down).
        source = tf.stack([one, zero, across, zero, one, down, zero, zero], axis=1)
        # The operation knows few types; float32 holds the values of the small ones.
        known = images.dtype.is_floating or images.dtype.name in ("uint8", "int32", "int64")
        shifted = tf.raw_ops.ImageProjectiveTransformV3(
            images=images if known else tf.cast(images, tf.float32),
            transforms=source,
            output_shape=tf.shape(images)[1:3],
            fill_value=0.0,
            interpolation="NEAREST",
            fill_mode="CONSTANT",
        )
        return tf.cast(shifted, images.dtype)


@register
class Cutout(_Augmentation):
    """Sets a square of each image to zero, its centre anywhere in the image.

    DeVries and Taylor 2017, "Improved regularization of convolutional neural networks with
    cutout". Keras's RandomErasing takes rectangles of random sizes.
    """

    def __init__(self, size: int, seed: int | None = None, **kwargs: Any):
        """Takes the side of the square in pixels."""
        super().__init__(seed, **kwargs)
        if size < 1:
            raise ConfigError(f"Cutout of {size} pixels: it is 1 or more")
        self.size = size

    def augmented(self, images: tf.Tensor) -> tf.Tensor:
        """See `Cutout`."""
        _, height, width, _ = keras.ops.shape(images)
        inside = [
            self._covered(center, length)
            for center, length in zip(self.uniform(images, 2), (height, width), strict=True)
        ]
        square = inside[0][:, :, tf.newaxis, tf.newaxis] & inside[1][:, tf.newaxis, :, tf.newaxis]
        return tf.where(square, tf.zeros([], images.dtype), images)

    def _covered(self, center: tf.Tensor, length: Any) -> tf.Tensor:
        """Which of `length` pixels the square covers: bool [batch, length]."""
        first = tf.cast(center * tf.cast(length, tf.float32), tf.int32) - self.size // 2
        pixel = tf.range(length) - first[:, tf.newaxis]
        return (pixel >= 0) & (pixel < self.size)


class _WithinRange(_Augmentation):
    """What changes values by a factor drawn for each image, and keeps them within a range."""

    def __init__(
        self,
        factor: float,
        value_range: tuple[float, float] = (0, 255),
        seed: int | None = None,
        **kwargs: Any,
    ):
        """Takes the largest change, a share between 0 and 1, and the range of the values."""
        super().__init__(seed, **kwargs)
        if not 0 <= factor <= 1:
            raise ConfigError(
                f"{type(self).__name__}'s factor is {factor}; it lies between 0 and 1"
            )
        self.factor = factor
        self.value_range = value_range

    def augmented(self, images: tf.Tensor) -> tf.Tensor:
        """Images whose values were changed, rounded where they are integers."""
        (drawn,) = self.uniform(images, 1)
        values = _floats(images)
        factor = with_rank(tf.cast((2 * drawn - 1) * self.factor, values.dtype), 4)
        values = tf.clip_by_value(self.changed(values, factor), *self.value_range)
        return tf.cast(tf.round(values) if images.dtype.is_integer else values, images.dtype)

    def changed(self, values: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
        """The values changed by a factor from [-self.factor, self.factor), [batch, 1, 1, 1]."""
        raise NotImplementedError


@register
class RandomBrightness(_WithinRange):
    """Adds one number to all of an image, as Keras's layer of this name does.

    It is drawn from [-factor, factor) times the width of the value range.
    """

    def changed(self, values: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
        """See `RandomBrightness`."""
        low, high = self.value_range
        return values + factor * (high - low)


@register
class RandomContrast(_WithinRange):
    """Multiplies each image's distance from its own mean, as Keras's layer of this name does.

    By a number from [1 - factor, 1 + factor).
    """

    def changed(self, values: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
        """See `RandomContrast`."""
        mean = tf.reduce_mean(values, axis=[1, 2], keepdims=True)
        return mean + (1 + factor) * (values - mean)


def _floats(images: tf.Tensor) -> tf.Tensor:
    return images if images.dtype.is_floating else tf.cast(images, tf.float32)
