"""Image augmentations that draw by position in the global batch.

Layers from images [batch, height, width, channels], of any number type, to the same shape and
dtype; they change images in training alone. Each example draws for itself.
"""

from typing import Any, Literal, get_args

import keras
import tensorflow as tf

import ddl.random
from ddl.errors import ConfigError, check_choice

FlipMode = Literal["horizontal", "vertical", "horizontal_and_vertical"]

register = keras.saving.register_keras_serializable("ddl")


class _Augmentation(keras.layers.Layer):
    """What the augmentations share: a seed, and leaving images alone outside of training."""

    def __init__(self, seed: int | None = None, **kwargs: Any):
        # Nothing here is computed in the precision of the model: bytes stay bytes.
        super().__init__(autocast=False, **kwargs)
        self.seed = seed
        self.seed_generator = keras.random.SeedGenerator(seed)

    draws_by_position = True

    def call(self, images: tf.Tensor, training: bool = False) -> tf.Tensor:
        """From [batch, height, width, channels] to the same."""
        return self.augmented(images) if training else images

    def augmented(self, images: tf.Tensor) -> tf.Tensor:
        """The images, each changed by what is drawn for it."""
        raise NotImplementedError

    def uniform(self, images: tf.Tensor, count: int, low: float, high: float) -> list[tf.Tensor]:
        """`count` tensors of numbers in [low, high), float32 [batch], for these images."""
        values = ddl.random.uniform(self, [keras.ops.shape(images)[0], count], seed=self.seed)
        return tf.unstack(low + (high - low) * values, axis=1)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """The same."""
        return input_shape

    def get_config(self) -> dict[str, Any]:
        """See Keras."""
        config = {name: getattr(self, name) for name in self.arguments}
        return {**super().get_config(), "seed": self.seed, **config}

    arguments: tuple[str, ...] = ()
    """Names of a layer's own arguments, which are attributes too."""


@register
class RandomFlip(_Augmentation):
    """Mirrors half of the images, chosen at random."""

    arguments = ("mode",)

    def __init__(self, mode: FlipMode = "horizontal", seed: int | None = None, **kwargs: Any):
        """Takes the direction; with "horizontal_and_vertical" each is drawn by itself."""
        super().__init__(seed, **kwargs)
        check_choice("RandomFlip's mode", mode, get_args(FlipMode))
        self.mode = mode

    def augmented(self, images: tf.Tensor) -> tf.Tensor:
        """See `RandomFlip`."""
        across, down = self.uniform(images, 2, 0, 1)
        if "horizontal" in self.mode:
            images = tf.where(_of_image(across) < 0.5, tf.reverse(images, [2]), images)
        if "vertical" in self.mode:
            images = tf.where(_of_image(down) < 0.5, tf.reverse(images, [1]), images)
        return images


@register
class RandomShift(_Augmentation):
    """Moves each image by whole pixels; what comes in is zero.

    The same as padding by so many pixels and cropping at random (He et al. 2015, section 4.2).
    """

    arguments = ("height", "width")

    def __init__(self, height: int, width: int, seed: int | None = None, **kwargs: Any):
        """Takes the largest shifts in pixels, each way."""
        super().__init__(seed, **kwargs)
        if height < 0 or width < 0:
            raise ConfigError(f"RandomShift by {height} and {width} pixels: they are 0 or more")
        self.height = height
        self.width = width

    def augmented(self, images: tf.Tensor) -> tf.Tensor:
        """See `RandomShift`."""
        down, across = self.uniform(images, 2, 0, 1)
        zero, one = tf.zeros_like(down), tf.ones_like(down)
        down = tf.floor(down * (2 * self.height + 1)) - self.height
        across = tf.floor(across * (2 * self.width + 1)) - self.width
        # Where each pixel comes from: (x + across, y + down).
        source = tf.stack([one, zero, across, zero, one, down, zero, zero], axis=1)
        return tf.raw_ops.ImageProjectiveTransformV3(
            images=images,
            transforms=source,
            output_shape=tf.shape(images)[1:3],
            fill_value=0.0,
            interpolation="NEAREST",
            fill_mode="CONSTANT",
        )


@register
class Cutout(_Augmentation):
    """Sets a square of each image to zero, its centre anywhere in the image.

    DeVries and Taylor 2017, "Improved regularization of convolutional neural networks with
    cutout".
    """

    arguments = ("size",)

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
            for center, length in zip(self.uniform(images, 2, 0, 1), (height, width), strict=True)
        ]
        square = inside[0][:, :, tf.newaxis, tf.newaxis] & inside[1][:, tf.newaxis, :, tf.newaxis]
        return tf.where(square, tf.zeros([], images.dtype), images)

    def _covered(self, center: tf.Tensor, length: Any) -> tf.Tensor:
        """Which of `length` pixels the square covers: bool [batch, length]."""
        first = tf.cast(center * tf.cast(length, tf.float32), tf.int32) - self.size // 2
        pixel = tf.range(length) - first[:, tf.newaxis]
        return (pixel >= 0) & (pixel < self.size)


@register
class RandomBrightness(_Augmentation):
    """Adds one number to all of an image, drawn from [-delta, delta)."""

    arguments = ("delta",)

    def __init__(self, delta: float, seed: int | None = None, **kwargs: Any):
        """Takes the largest change, in the units of the images."""
        super().__init__(seed, **kwargs)
        self.delta = delta

    def augmented(self, images: tf.Tensor) -> tf.Tensor:
        """See `RandomBrightness`."""
        (change,) = self.uniform(images, 1, -self.delta, self.delta)
        values = _floats(images)
        return _like(values + tf.cast(_of_image(change), values.dtype), images)


@register
class RandomContrast(_Augmentation):
    """Multiplies each image's distance from its own mean by a number from [1 - f, 1 + f)."""

    arguments = ("factor",)

    def __init__(self, factor: float, seed: int | None = None, **kwargs: Any):
        """Takes f, between 0 and 1."""
        super().__init__(seed, **kwargs)
        if not 0 <= factor <= 1:
            raise ConfigError(f"RandomContrast's factor is {factor}; it lies between 0 and 1")
        self.factor = factor

    def augmented(self, images: tf.Tensor) -> tf.Tensor:
        """See `RandomContrast`."""
        (contrast,) = self.uniform(images, 1, 1 - self.factor, 1 + self.factor)
        values = _floats(images)
        mean = tf.reduce_mean(values, axis=[1, 2], keepdims=True)
        contrast = tf.cast(_of_image(contrast), values.dtype)
        return _like(mean + contrast * (values - mean), images)


def _of_image(values: tf.Tensor) -> tf.Tensor:
    """[batch] as [batch, 1, 1, 1]."""
    return tf.reshape(values, [-1, 1, 1, 1])


def _floats(images: tf.Tensor) -> tf.Tensor:
    return images if images.dtype.is_floating else tf.cast(images, tf.float32)


def _like(values: tf.Tensor, images: tf.Tensor) -> tf.Tensor:
    """Back to the dtype of the images; integers are kept within its range, as a camera does."""
    if images.dtype.is_integer:
        values = tf.round(values)
    return tf.saturate_cast(values, images.dtype)
