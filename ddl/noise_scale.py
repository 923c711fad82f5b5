"""The gradient noise scale: which batch size is worth using, asked of the gradients themselves.

McCandlish et al. 2018, "An Empirical Model of Large-Batch Training". With G the true gradient and Σ
the covariance of one example's, the noise scale is tr Σ / |G|². Well below it, doubling the batch
nearly halves the updates needed; well above it, it hardly saves any.
"""

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from ddl.errors import ConfigError
from ddl.gradients import Gradient, merge_duplicates, squared_norm


@dataclasses.dataclass(frozen=True)
class GradientNoiseScale:
    """How the noise scale is estimated: McCandlish et al. 2018, appendix A.1.

    The small batches are what a replica computes at once: B/P rows of a global batch of B, with
    P = replicas × microbatches. With s the mean of their squared norms and g the squared norm of
    the reduced gradient,

        |G|² ≈ (P·g - s) / (P - 1)        tr Σ ≈ (s - g)·B / (P - 1)

    both unbiased. Each is averaged over updates, average ← d·average + (1 - d)·new, and the ratio
    of the averages is the noise scale, in examples.

    It costs a norm for each microbatch and no communication. The rows of a small batch follow one
    another in the global batch, so that the number is the same for any replicas × microbatches
    that make the same P; for another P it differs by chance. The gradients are those of the loss,
    before regularization and clipping. A batch with padding and a skipped update do not count.
    Where examples share statistics (BatchNormalization), their gradients are not independent, as
    the estimate takes them to be.

    Attributes:
      decay: d above.
    """

    decay: float = 0.99

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ConfigError(f"the decay of the noise scale is {self.decay}; 0 ≤ decay < 1")

    def check(self, parts: int, weights_are_given: bool) -> None:
        """Raises ConfigError if the noise scale cannot be estimated.

        Args:
          parts: P above.
          weights_are_given: Whether examples have weights, by the data or the task.
        """
        if parts < 2:
            raise ConfigError(
                "the gradient noise scale compares the gradients of parts of a batch, and here one "
                "replica computes it at once. Give ACCUMULATION_STEPS 2 or more (which changes no "
                "update), or use several replicas."
            )
        if weights_are_given:
            raise ConfigError(
                "the gradient noise scale takes examples that count alike, and these have weights "
                "(a feature 'weight', or weights from the task). Leave gradient_noise_scale out."
            )

    def next(
        self, averages: tf.Tensor, small: tf.Tensor, large: tf.Tensor, parts: int, batch: int
    ) -> tf.Tensor:
        """The averages after an update.

        Args:
          averages: Of |G|² and tr Σ, float64 [2]; zeros at first. What is missing there is missing
            in both, and does not show in their ratio.
          small: s above, float64 [].
          large: g above, float64 [].
          parts: P above.
          batch: B above.
        """
        new = tf.stack([parts * large - small, (small - large) * batch]) / (parts - 1)
        return averages + (1 - self.decay) * (new - averages)


def squared_norm_of(gradients: Sequence[Gradient]) -> tf.Tensor:
    """The square of the joint norm; sparse gradients may repeat rows: float64 []."""
    merged = [merge_duplicates(gradient) for gradient in gradients]
    return tf.cast(squared_norm(merged), tf.float64)


def figures(averages: tf.Tensor) -> dict[str, float]:
    """The noise scale by its name; nothing as long as chance makes an average negative, or zero."""
    squared_gradient, variance = averages.numpy().tolist()
    if squared_gradient > 0 and variance > 0:
        return {"gradient_noise_scale": variance / squared_gradient}
    return {}
