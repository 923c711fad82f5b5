"""Result of `GlobalGradient`."""

from typing import Any, NamedTuple

import tensorflow as tf

from ddl.step.compiled.deferred import Deferred
from ddl.step.sharding.in_shares import InShares


class Reduced(NamedTuple):
    """A gradient of the global batch, with what was summed along with it.

    Attributes:
      values: One per variable, equal on all replicas, or in shares; divided by Σ weight and
        unscaled.
      finite: Whether all values are finite, bool []; None without loss scaling.
      sums: The loss's metric sums of the global batch, float64 [size of its `MetricSums`].
      noise: Estimates of |G|² and tr Σ (`ddl.step.noise_scale`), float64 [2]; NaN for a batch that
        is not full; None without an estimator.
    """

    values: list[Any] | Deferred | InShares
    finite: tf.Tensor | None
    sums: tf.Tensor
    noise: tf.Tensor | None


class Origin(NamedTuple):
    """The call of `update.gradients` that computed a gradient.

    Attributes:
      loss: Name of the loss; "" for a gradient that the step has combined.
      noise: Estimates of its noise (`Reduced`), float64 [2], or None.
    """

    loss: str = ""
    noise: tf.Tensor | None = None
