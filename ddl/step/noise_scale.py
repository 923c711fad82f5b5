"""The gradient noise scale: an estimate, from the gradients, of the batch size worth using.

McCandlish et al. 2018, "An Empirical Model of Large-Batch Training". With G the true gradient and Σ
the covariance of one example's gradient, the noise scale is tr Σ / |G|². For batches well below the
noise scale, doubling the batch nearly halves the updates needed; well above it, doubling saves
hardly any.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
import tensorflow as tf

from ddl.errors import ConfigError
from ddl.figures import GRADIENT_NOISE_SCALE
from ddl.optimizers.named import figure
from ddl.optimizers.rows.duplicates import merge_duplicates
from ddl.step.gradients import Gradient, squared_norm


@dataclasses.dataclass(frozen=True)
class GradientNoiseScale:
    """The estimator of the noise scale of McCandlish et al. 2018, appendix A.1.

    A small batch is one replica's microbatch: B/P rows of a global batch of B, with
    P = replicas × microbatches. With s the mean of the squared gradient norms of the small batches
    and g the squared norm of the reduced gradient,

        |G|² ≈ (P·g - s) / (P - 1)        tr Σ ≈ (s - g)·B / (P - 1)

    Both estimates are unbiased. Each is averaged over updates, average ← d·average + (1 - d)·new.
    The noise scale, in examples, is the ratio of the averages.

    The estimate costs one norm per microbatch and no communication. The rows of a small batch are
    consecutive in the global batch, so the estimate depends only on P, not on how P splits into
    replicas and microbatches. For another P the estimate differs by chance. The gradients are those
    of the loss, before regularization and clipping; in a step of one's own, those that
    `update.gradients` returns. Batches with padding and skipped updates do not count. The estimator
    assumes independent gradients, which is false where examples share statistics
    (BatchNormalization).

    Attributes:
      decay: d above, at least 0 and below 1.

    Raises:
      ConfigError: If `decay` is out of range.
    """

    decay: float = 0.99

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ConfigError(
                f"GradientNoiseScale.decay must be at least 0 and below 1, got {self.decay}."
            )

    def check(self, parts: int, weights_are_given: bool) -> None:
        """Raises ConfigError if the noise scale cannot be estimated.

        Args:
          parts: P above.
          weights_are_given: Whether data or task give weights to the examples.
        """
        if parts < 2:
            raise ConfigError(
                "The gradient noise scale needs at least two parts of a batch, but one replica "
                "computes the whole batch at once. Set ACCUMULATION_STEPS to 2 or more, which "
                "does not change the updates, or use several replicas."
            )
        if weights_are_given:
            raise ConfigError(
                "The gradient noise scale requires equally weighted examples, but these have "
                "weights (a feature 'weight', or weights from the task). Remove "
                "gradient_noise_scale."
            )

    def next(self, averages: tf.Tensor, new: tf.Tensor) -> tf.Tensor:
        """Returns the averages after a gradient: float64 [2].

        Args:
          averages: Averages of |G|² and tr Σ, float64 [2]; zeros at first. The zeros bias both
            averages by the same factor, which cancels in their ratio.
          new: The estimates of the gradient, float64 [2]. If they or the averages after them are
            not finite, the averages stay.
        """
        after = averages + (1 - self.decay) * (new - averages)
        return tf.where(tf.reduce_all(tf.math.is_finite(after)), after, averages)


def estimates(small: tf.Tensor, large: tf.Tensor, parts: int, batch: int) -> tf.Tensor:
    """Returns the estimates of |G|² and tr Σ from one gradient: float64 [2].

    Args:
      small: s above, float64 [].
      large: g above, float64 [].
      parts: P above.
      batch: B above.
    """
    return tf.stack([parts * large - small, (small - large) * batch]) / (parts - 1)


def of_sums(
    sums: tf.Tensor,
    large: tf.Tensor,
    parts: int,
    batch: int,
    entries: Sequence[int],
    scale: tf.Tensor | None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the sums of an update but for the last, and the estimates, which are NaN in part.

    Args:
      sums: Σ weight, other sums, and last the sum of the squared norms of the parts: float64 [n].
      large: g above, float64 [].
      parts: P above.
      batch: B above.
      entries: Number of losses of an example, and how many of them its gradient adds up.
      scale: The loss scale, []; None: 1.
    """
    # A part's gradient is a sum over B/P examples divided by B, so 1/P of their mean. The mean
    # over P parts is s = P² · sums[-1] / P.
    noise = estimates(parts * sums[-1], large, parts, batch)
    of_each, added = entries
    if scale is not None or added > 1:  # a mean over the entries is meant
        scale = tf.ones([]) if scale is None else scale
        noise /= (tf.cast(scale, tf.float64) * added) ** 2
    return sums[:-1], tf.where(tf.equal(sums[0], batch * of_each), noise, np.nan)


def squared_norm_of(gradients: Sequence[Gradient]) -> tf.Tensor:
    """Returns the squared global norm, float64 []; sparse gradients may repeat rows."""
    merged = [merge_duplicates(gradient) for gradient in gradients]
    return tf.cast(squared_norm(merged), tf.float64)


def by_optimizer(averages: tf.Tensor, optimizers: Iterable[str]) -> dict[str, tf.Tensor]:
    """Returns the averages of each optimizer, float64 [2], by its name; see `figures`."""
    return dict(zip(optimizers, tf.unstack(tf.reshape(averages, [-1, 2])), strict=True))


def figures(averages: tf.Tensor, optimizers: Iterable[str]) -> dict[str, float]:
    """Returns the noise scales, in examples, by the names of their figures.

    The unbiased estimates may be negative by chance; an optimizer with such an average is left out.

    Args:
      averages: Averages of |G|² and tr Σ of each optimizer, float64 [2 · optimizers].
      optimizers: Names of the optimizers, in the order of the averages.
    """
    pairs = zip(optimizers, averages.numpy().reshape(-1, 2).tolist(), strict=True)
    return {
        figure(GRADIENT_NOISE_SCALE, name): variance / squared_gradient
        for name, (squared_gradient, variance) in pairs
        if squared_gradient > 0 and variance > 0
    }
