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
    """

    values: list[Any] | Deferred | InShares
    finite: tf.Tensor | None
    sums: tf.Tensor
