"""Mixup and CutMix: layers that mix each image with another one of the batch, by position.

The partner of a row is its neighbour in the shuffled batch (`ddl.layers.transforms.partners`). An
example whose partner is padding or has weight 0 stays as it is.
"""

import math
from typing import Any, NamedTuple

import keras
import tensorflow as tf

import ddl.random
from ddl.errors import ConfigError
from ddl.layers.broadcasting import with_rank
from ddl.layers.transforms.partners import partners

register = keras.saving.register_keras_serializable("ddl")

_TRIES = 16
"""Tries of a rejection that accepts at least 95% of them: all 16 fail for one number in 10²⁰."""

_SMALLEST = 2.0**-24


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
        share = tf.where(mixes, beta(self, rows, self.alpha), tf.ones([]))
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


def beta(owner: Any, rows: int, alpha: float) -> tf.Tensor:
    """Draws numbers of the distribution Beta(alpha, alpha), float32 [rows], by position.

    Two numbers of Gamma distributions x, y give x / (x + y). They are kept as logarithms, since for
    a small alpha both would be 0 in float32.

    Args:
      owner: As in `ddl.random.uniform`.
      rows: Rows of the microbatch.
      alpha: Greater than 0.
    """
    if alpha == 1:
        return ddl.random.uniform(owner, [rows])
    first, second = tf.unstack(_log_gamma(owner, rows, alpha), axis=1)
    return tf.cast(tf.sigmoid(first - second), tf.float32)


def _log_gamma(owner: Any, rows: int, alpha: float) -> tf.Tensor:
    """Draws logarithms of numbers of the distribution Gamma(alpha), float64 [rows, 2].

    In float32, the last bit of a logarithm depends on the place of a number in its tensor, and so
    on the number of replicas.

    Marsaglia and Tsang 2000, "A simple method for generating gamma variables": a rejection, of
    which the first accepted try counts. Below 1, Gamma(alpha) is Gamma(alpha + 1) · U^(1 / alpha).
    """
    normal = tf.cast(ddl.random.normal(owner, [rows, 2, _TRIES]), tf.float64)
    uniform = tf.cast(ddl.random.uniform(owner, [rows, 2, _TRIES + 1]), tf.float64)
    uniform = 1 - uniform  # in (0, 1]
    shape = alpha if alpha >= 1 else alpha + 1
    d = shape - 1 / 3
    cube = (1 + normal / math.sqrt(9 * d)) ** 3
    log_cube = tf.math.log(tf.maximum(cube, _SMALLEST))
    limit = normal**2 / 2 + d * (1 - cube + log_cube)
    accepted = (cube > 0) & (tf.math.log(uniform[..., 1:]) < limit)
    # The first accepted try: its place is the number of tries before it, all rejected.
    before = tf.cumsum(tf.cast(accepted, tf.float32), axis=-1, exclusive=True)
    first = accepted & (before == 0)
    zero = tf.zeros([], tf.float64)
    found = math.log(d) + tf.reduce_sum(tf.where(first, log_cube, zero), axis=-1)
    return found if alpha >= 1 else found + tf.math.log(uniform[..., 0]) / alpha
