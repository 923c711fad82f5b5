"""Mixup and CutMix: layers that mix each image with another one of the batch, by position.

The rows 2k and 2k + 1 of a global batch are each other's partners. The data are shuffled in another
order in each epoch, so a neighbour is as random as any other row; and no replica needs the rows of
another. An example whose partner is padding or has weight 0 stays as it is.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

import ddl.random
from ddl import microbatch
from ddl.errors import ConfigError
from ddl.layers.broadcasting import with_rank

register = keras.saving.register_keras_serializable("ddl")


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


class Partners(NamedTuple):
    """The partners of the rows of a microbatch.

    Attributes:
      values: The values of the partners, each tensor [rows, …].
      mask: bool [rows], False for a row whose partner is padding or has weight 0, and for a last
        row without a partner.
    """

    values: list[tf.Tensor]
    mask: tf.Tensor


def partners(values: Sequence[tf.Tensor], asking: str) -> Partners:
    """Returns the values of the partner of each row. Replica context.

    Args:
      values: Tensors [rows, …], with one row for each row of the microbatch.
      asking: Name of the layer, for the error.

    Raises:
      ConfigError: If the number of rows is not static, is not that of the microbatch, or is odd on
        one of several replicas or microbatches.
    """
    current = microbatch.current()
    rows = values[0].shape[0]
    if rows is None or any(each.shape[0] != rows for each in values):
        raise ConfigError(
            f"{asking} takes tensors of one static number of rows, got the shapes "
            f"{', '.join(str(each.shape) for each in values)}. Keep one row for each example, and "
            "set a shape that is lost by tf.ensure_shape."
        )
    if current is None:
        return _neighbours(values, None)
    if current.rows != rows:
        raise ConfigError(
            f"{asking} must get one row for each of the {current.rows} examples, got {rows} rows. "
            "Mix before the model splits examples into parts."
        )
    # Of a single microbatch on a single replica, the first row is known to be 0.
    if rows % 2 and not (isinstance(current.first_row, int) and current.first_row == 0):
        raise ConfigError(
            f"{asking} mixes the rows 2k and 2k + 1 of a batch, so each replica must have an even "
            f"number of rows in a microbatch, got {rows}. Set GLOBAL_BATCH_SIZE to a multiple of "
            f"2 × replicas × ACCUMULATION_STEPS."
        )
    if current.pairing is not None:
        return current.pairing(values, current.mask)
    return _neighbours(values, current.mask)


class HeldPartners:
    """Finds partners in one pass, and gives the same to later passes, whatever they compute.

    Attributes:
      found: The partners that each call got, in the order of the calls.
    """

    def __init__(self, found: Sequence[Partners] | None = None):
        """Takes what to give.

        Args:
          found: `found` of an earlier pass; None to record.
        """
        self.found: list[Partners] = list(found or [])
        self._given = None if found is None else iter(found)

    def __call__(self, values: Sequence[tf.Tensor], mask: tf.Tensor | None) -> Partners:
        """Returns the given partners, or else finds and records them."""
        if self._given is not None:
            return next(self._given)
        self.found.append(_neighbours(values, mask))
        return self.found[-1]


def _neighbours(values: Sequence[tf.Tensor], mask: tf.Tensor | None) -> Partners:
    """Swaps the rows 2k and 2k + 1; an odd last row gets itself, and is masked."""
    rows = values[0].shape[0]
    order = tf.constant([min(row ^ 1, rows - 1) for row in range(rows)], tf.int64)
    found = [_taken(each, order) for each in values]
    has_partner = tf.constant([(row ^ 1) < rows for row in range(rows)])
    if mask is not None:
        has_partner &= tf.gather(mask, order)
    return Partners(found, has_partner)


def _taken(values: tf.Tensor, order: tf.Tensor) -> tf.Tensor:
    if values.dtype.size > 1 or not values.dtype.is_integer:
        return tf.gather(values, order)
    # Bytes, which TensorFlow cannot gather on GPUs.
    return tf.cast(tf.gather(tf.cast(values, tf.float32), order), values.dtype)


class _Mixing(keras.layers.Layer):
    """Base of the layers that mix: holds the seed, draws the shares and finds the partners."""

    def __init__(
        self, alpha: float, probability: float = 1.0, seed: int | None = None, **kwargs: Any
    ):
        """Initializes the layer.

        Args:
          alpha: Both parameters of the Beta distribution of the shares; greater than 0.
          probability: Part of the examples that are mixed, from 0 to 1; the others stay.
          seed: Seed of the draws; a ddl trainer combines it with the seed of the run.
          **kwargs: Further arguments of `keras.layers.Layer`.

        Raises:
          ConfigError: If an argument is out of range.
        """
        super().__init__(autocast=False, **kwargs)
        name = type(self).__name__
        if not 0 < alpha < math.inf:
            raise ConfigError(f"{name}.alpha must be greater than 0, got {alpha}.")
        if not 0 <= probability <= 1:
            raise ConfigError(f"{name}.probability must be from 0 to 1, got {probability}.")
        self.alpha = alpha
        self.probability = probability
        self.seed = seed
        self.seed_generator = keras.random.SeedGenerator(seed)

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
        found = partners([images, labels], f"ddl.layers.{type(self).__name__}")
        other, partner_labels = found.values
        rows = images.shape[0]
        mixes = found.mask
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

    def __init__(
        self, alpha: float = 1.0, probability: float = 1.0, seed: int | None = None, **kwargs: Any
    ):
        """Initializes the layer; see `_Mixing`."""
        super().__init__(alpha, probability, seed, **kwargs)

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
