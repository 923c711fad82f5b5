"""Transforms of images by position in the global batch: shifts, crops, Mixup and CutMix.

The layers map images [batch, height, width, channels] of any numeric dtype to the same dtype, each
image by its own random draw.

Mixup and CutMix mix the rows 2k and 2k + 1 of a global batch. The data are shuffled in another
order in each epoch, so a neighbour is as random as any other row; and no replica needs the rows of
another. An example whose partner is padding or has weight 0 stays as it is.
"""

import math
from typing import Any, NamedTuple

import keras
import tensorflow as tf

import ddl.random
from ddl import microbatch
from ddl.errors import ConfigError
from ddl.layers.broadcasting import with_rank

register = keras.saving.register_keras_serializable("ddl")

_TRIES = 10
"""Tries for a crop that fits into the image; if none does, the first one is cut to the image."""


class _Drawing(keras.layers.Layer):
    """Base of all transforms: holds the seed."""

    def __init__(self, seed: int | None, **kwargs: Any):
        # The model's mixed-precision policy does not apply here: bytes stay bytes.
        super().__init__(autocast=False, **kwargs)
        self.seed = seed
        self.seed_generator = keras.random.SeedGenerator(seed)


@register
class RandomShift(_Drawing):
    """Shifts each image by a random number of whole pixels and fills with zeros.

    This equals zero padding followed by a random crop (He et al. 2015, "Deep residual learning",
    section 4.2). Keras's `RandomTranslation` shifts by fractions of a pixel.
    """

    def __init__(self, height: int, width: int, seed: int | None = None, **kwargs: Any):
        """Initializes the layer.

        Args:
          height: Largest vertical shift in pixels, up or down.
          width: Largest horizontal shift in pixels, left or right.
          seed: Seed of the draws; None takes that of the trainer.
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
        self.height, self.width = height, width

    def call(self, images: tf.Tensor, training: bool = False) -> tf.Tensor:
        """Shifts images [batch, height, width, channels] in training; shape and dtype stay."""
        if not training:
            return images
        batch, height, width, channels = keras.ops.shape(images)
        rows, columns = height + 2 * self.height, width + 2 * self.width
        margins = [[0, 0], [self.height] * 2, [self.width] * 2, [0, 0]]
        values = tf.pad(images, margins)
        # Places of pixels among those of all padded images, which are next to each other.
        drawn = ddl.random.uniform(self, [batch, 2])
        shift = _int64(tf.floor(drawn * [2.0 * self.height + 1, 2.0 * self.width + 1]))
        corner = tf.reduce_sum(shift * tf.stack([_int64(columns), _int64(1)]), axis=1)
        corner += tf.range(_int64(batch)) * _int64(rows * columns)
        within = tf.range(_int64(height))[:, tf.newaxis] * _int64(columns) + tf.range(_int64(width))
        places = corner[:, tf.newaxis, tf.newaxis] + within
        moved = _taken(tf.reshape(values, [-1, channels]), places)
        return tf.reshape(moved, [batch, height, width, channels])

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns `input_shape`."""
        return input_shape


def _int64(values: Any) -> tf.Tensor:
    """Returns numbers as int64; TensorFlow computes with int32 on the host."""
    return tf.cast(values, tf.int64)


@register
class RandomResizedCrop(_Drawing):
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
          seed: Seed of the draws; None takes that of the trainer.
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
        self.height, self.width = height, width
        self.scale, self.ratio = tuple(scale), tuple(ratio)

    def call(self, images: tf.Tensor, training: bool = False) -> tf.Tensor:
        """Maps [batch, …, channels] to [batch, height, width, channels]; integers are rounded."""
        if training:
            return self._resized(images, *self._crops(images))
        if images.shape[1:3] == (self.height, self.width):
            return images
        batch, height, width, _ = keras.ops.shape(images)
        whole = (0.0, 0.0, _float(height), _float(width))
        return self._resized(images, *(tf.fill([batch], end) for end in whole))

    def _crops(self, images: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """Draws top, left, height and width of a crop of each image, float32 [batch] each."""
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
        return top, left, rows, columns

    def _resized(
        self, images: tf.Tensor, top: tf.Tensor, left: tf.Tensor, rows: Any, columns: Any
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
    share = with_rank(share if axis == 1 else share[:, tf.newaxis], 4)
    below, above = (
        tf.gather(values, tf.cast(first + each, tf.int64), axis=axis, batch_dims=1)
        for each in (lower, upper)
    )
    return below + (above - below) * share


class Mixed(NamedTuple):
    """Mixed images and their labels: the loss is share·L(labels) + (1 - share)·L(partner_labels).

    Attributes:
      images: [batch, …], in the dtype of the given images.
      labels: The given labels.
      partner_labels: The labels of the images that were mixed in, in the form of `labels`.
      share: float32 [batch], the part of each image that is its own; 1 where nothing was mixed in.
    """

    images: tf.Tensor
    labels: tf.Tensor
    partner_labels: tf.Tensor
    share: tf.Tensor

    def mean(self, own: tf.Tensor, of_partner: tf.Tensor) -> tf.Tensor:
        """Returns share·own + (1 - share)·of_partner, such as of two losses.

        Args:
          own: float [batch, …], for the labels.
          of_partner: The same for the labels of the partners.
        """
        share = with_rank(tf.cast(self.share, own.dtype), len(own.shape))
        return share * own + (1 - share) * of_partner


def partners(
    images: tf.Tensor, labels: tf.Tensor, asking: str
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns images and labels of the partner of each row, and which rows have one.

    Replica context. A row has none, bool [rows], if its partner is padding or has weight 0, or if
    it is the last of an odd number.

    Args:
      images: [rows, …], with one row for each row of the microbatch.
      labels: [rows, …].
      asking: Name of the layer, for the error.

    Raises:
      ConfigError: If the number of rows is not that of the microbatch, or is odd on one of several
        replicas or microbatches.
    """
    current, rows = microbatch.current(), images.shape[0]
    expected = rows if current is None else current.rows
    if rows is None or not expected == rows == labels.shape[0]:
        raise ConfigError(
            f"{asking} must get one row for each of the {expected} examples, got the shapes "
            f"{images.shape} and {labels.shape}. Mix before the model splits examples into parts."
        )
    # Of a single microbatch on a single replica, the first row is known to be 0.
    first_row = 0 if current is None else current.first_row
    if rows % 2 and not (isinstance(first_row, int) and first_row == 0):
        raise ConfigError(
            f"{asking} mixes the rows 2k and 2k + 1 of a batch, so each replica must have an even "
            f"number of rows in a microbatch, got {rows}. Set Trainer.global_batch_size to a "
            "multiple of 2 × replicas × accumulation_steps."
        )
    order = tf.constant([min(row ^ 1, rows - 1) for row in range(rows)], tf.int64)
    has_partner = tf.constant([(row ^ 1) < rows for row in range(rows)])
    if current is not None and current.mask is not None:
        has_partner &= tf.gather(current.mask, order)
    found = [_taken(images, order), _taken(labels, order), has_partner]
    if current is not None and current.held is not None:
        found = current.held(found, True)
    return found[0], found[1], found[2]


def _taken(values: tf.Tensor, order: tf.Tensor) -> tf.Tensor:
    if values.dtype.size > 2 or not values.dtype.is_integer:
        return tf.gather(values, order)
    # Small integers, which TensorFlow cannot gather on GPUs.
    return tf.cast(tf.gather(tf.cast(values, tf.float32), order), values.dtype)


class _Mixing(_Drawing):
    """Base of the layers that mix: draws the shares and finds the partners."""

    def __init__(
        self, alpha: float = 1.0, probability: float = 1.0, seed: int | None = None, **kwargs: Any
    ):
        """Initializes the layer.

        Args:
          alpha: Both parameters of the Beta distribution of the shares; greater than 0.
          probability: Part of the examples that are mixed, from 0 to 1; the others stay.
          seed: Seed of the draws; None takes that of the trainer.
          **kwargs: Further arguments of `keras.layers.Layer`.

        Raises:
          ConfigError: If an argument is out of range.
        """
        super().__init__(seed, **kwargs)
        name = type(self).__name__
        if not 0 < alpha < math.inf:
            raise ConfigError(f"{name}.alpha must be greater than 0, got {alpha}.")
        if not 0 <= probability <= 1:
            raise ConfigError(f"{name}.probability must be from 0 to 1, got {probability}.")
        self.alpha, self.probability = alpha, probability

    def call(self, images: tf.Tensor, labels: tf.Tensor, training: bool = True) -> Mixed:
        """Mixes images [batch, height, width, channels] with their partners. Replica context.

        Args:
          images: Images of any numeric dtype. The mean of integers is rounded.
          labels: [batch, …].
          training: False returns the images as they are, with share 1.

        Raises:
          ConfigError: If a replica has an odd number of rows in one of several microbatches, or
            beside other replicas.
        """
        if not training:
            share = tf.ones(keras.ops.shape(images)[:1])
            return Mixed(images, labels, labels, share)
        asking, rows = f"ddl.layers.{type(self).__name__}", images.shape[0]
        other, partner_labels, mixes = partners(images, labels, asking)
        if self.probability < 1:
            mixes &= ddl.random.uniform(self, [rows]) < self.probability
        drawn = keras.random.beta(
            (rows,), self.alpha, self.alpha, dtype="float32", seed=self.seed_generator
        )
        share = tf.where(mixes, drawn, tf.ones([]))
        mixed, share = self.mixed(images, other, share)
        return Mixed(mixed, labels, partner_labels, share)

    def mixed(
        self, images: tf.Tensor, other: tf.Tensor, share: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Mixes images with others by shares, float32 [batch]; returns images and final shares."""
        raise NotImplementedError


@register
class Mixup(_Mixing):
    """Replaces each image by a weighted mean of itself and another image of the batch.

    Zhang et al. 2018, "mixup: Beyond Empirical Risk Minimization". The share of the image itself
    is drawn from Beta(alpha, alpha), for each example; the paper's code draws one for a batch. The
    paper takes alpha from 0.1 to 0.4 on ImageNet, and 1 on CIFAR.
    """

    def __init__(
        self, alpha: float = 0.2, probability: float = 1.0, seed: int | None = None, **kwargs: Any
    ):
        """Initializes the layer; see `_Mixing`."""
        super().__init__(alpha, probability, seed, **kwargs)

    def mixed(
        self, images: tf.Tensor, other: tf.Tensor, share: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Takes the weighted mean in float32, or in float64 for float64 images."""
        dtype = tf.float64 if images.dtype == tf.float64 else tf.float32
        own_share = with_rank(tf.cast(share, dtype), len(images.shape))
        values = tf.cast(images, dtype) * own_share + tf.cast(other, dtype) * (1 - own_share)
        if images.dtype.is_integer:
            return tf.saturate_cast(tf.round(values), images.dtype), share
        return tf.cast(values, images.dtype), share


@register
class CutMix(_Mixing):
    """Replaces a rectangle of each image by that of another image of the batch.

    Yun et al. 2019, "CutMix: Regularization Strategy to Train Strong Classifiers with Localizable
    Features". The rectangle has the proportions of the image and 1 - λ of its area, λ drawn from
    Beta(alpha, alpha); its centre is a random pixel, and it is clipped at the border. The share is
    1 minus the part of the area that is replaced. The paper takes alpha = 1, probability = 1 on
    ImageNet and 0.5 on CIFAR. Its code draws one rectangle for a batch; here each example has its
    own.
    """

    def mixed(
        self, images: tf.Tensor, other: tf.Tensor, share: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Pastes the rectangles; see the class."""
        rows, height, width, _ = keras.ops.shape(images)
        drawn = tf.unstack(ddl.random.uniform(self, [rows, 2]), axis=1)
        side = tf.sqrt(1 - share)
        inside, area = [], tf.ones([])
        for length, middle in zip((height, width), drawn, strict=True):
            size = tf.cast(length, tf.float32)  # TensorFlow computes with int32 on the host
            reach = tf.floor(tf.floor(size * side) / 2)
            centre = tf.floor(middle * size)
            first, end = tf.maximum(centre - reach, 0.0), tf.minimum(centre + reach, size)
            places = tf.range(size)
            inside.append((places >= first[:, tf.newaxis]) & (places < end[:, tf.newaxis]))
            area *= (end - first) / size
        down, across = inside
        replaced = down[:, :, tf.newaxis, tf.newaxis] & across[:, tf.newaxis, :, tf.newaxis]
        return tf.where(replaced, other, images), 1 - area
