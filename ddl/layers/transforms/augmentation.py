"""Image augmentations that draw by position in the global batch.

Each layer maps images [batch, height, width, channels] of any numeric dtype to the same shape and
dtype. Each image is augmented independently. Outside training the images pass through unchanged.
"""

from typing import Any

import keras
import tensorflow as tf

import ddl.random
from ddl.errors import ConfigError

register = keras.saving.register_keras_serializable("ddl")


class Augmentation(keras.layers.Layer):
    """Base of the augmentations: holds the seed and changes images only in training."""

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

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns `input_shape`."""
        return input_shape


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
        batch, height, width, channels = keras.ops.shape(images)
        rows, columns = height + 2 * self.height, width + 2 * self.width
        margins = [[0, 0], [self.height] * 2, [self.width] * 2, [0, 0]]
        values = images
        if images.dtype.is_integer:  # TensorFlow cannot gather all integers on GPUs
            values = tf.cast(images, tf.float32 if images.dtype.size == 1 else tf.float64)
        values = tf.pad(values, margins)
        # Places of pixels among those of all padded images, which are next to each other.
        drawn = ddl.random.uniform(self, [batch, 2])
        shift = _int64(tf.floor(drawn * [2.0 * self.height + 1, 2.0 * self.width + 1]))
        corner = tf.reduce_sum(shift * tf.stack([_int64(columns), _int64(1)]), axis=1)
        corner += tf.range(_int64(batch)) * _int64(rows * columns)
        within = tf.range(_int64(height))[:, tf.newaxis] * _int64(columns) + tf.range(_int64(width))
        pixels = tf.reshape(values, [-1, channels])
        moved = tf.gather(pixels, corner[:, tf.newaxis, tf.newaxis] + within)
        return tf.cast(tf.reshape(moved, [batch, height, width, channels]), images.dtype)


def _int64(values: Any) -> tf.Tensor:
    """Returns numbers as int64; TensorFlow computes with int32 on the host."""
    return tf.cast(values, tf.int64)
