"""Metrics made of means: functions of one, and means with weights of their own."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from ddl.errors import check_takes
from ddl.metrics.values import Inputs, OfMean


class FunctionOfMean:
    """A function of the weighted mean over all examples, or tokens, of a period.

        root = ddl.metrics.FunctionOfMean(math.sqrt)
        …
        return ddl.PerExample(loss, {"rmse": root(tf.square(labels - outputs))})

    The mean of the function's values on each batch would differ. Where the function has no value,
    such as the logarithm of 0, the figure is NaN; where that is too large for a float, infinity.
    """

    def __init__(self, function: Callable[[float], float]):
        """Keeps the function.

        Args:
          function: From the mean, a Python float, to the figure. Called on the host.

        Raises:
          ConfigError: If it is not a function of one argument.
        """
        check_takes("FunctionOfMean.function", function, ("mean",))
        self._function = function

    def __call__(self, values: Any) -> OfMean:
        """Returns a value for `ddl.PerExample.metrics`. Replica context.

        Args:
          values: float, of the shape of the loss.
        """
        return OfMean(tf.convert_to_tensor(values), self._function)


class Perplexity(FunctionOfMean):
    """The exponential of the mean cross-entropy: `{"perplexity": Perplexity()(loss)}`."""

    def __init__(self) -> None:
        """Initializes the metric."""
        super().__init__(math.exp)


class WeightedMean:
    """A mean with weights of its own, where a tensor in `metrics` has those of the loss.

        return ddl.PerExample(loss, {"head_loss": WeightedMean()(other, weight)})

    It is its own state, see `ddl.metrics.values.StateSums`.
    """

    names, size = ("",), 2

    def __call__(self, values: Any, weight: Any) -> Inputs:
        """Returns a value for `ddl.PerExample.metrics`. Replica context.

        Args:
          values: float [batch, …].
          weight: float [batch, …], of the first dimensions of the values; times the example weight.
        """
        values = tf.convert_to_tensor(values)
        return Inputs(self, tf.zeros_like(values, tf.int64), values, weight)

    def state(self, name: str, labels: Any, outputs: Any, rank: int) -> "WeightedMean":
        """Returns the sums Σ weight·value and Σ weight, which add up for any inputs."""
        return self

    def sums(self, labels: tf.Tensor, outputs: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
        """See `ddl.metrics.values.StateSums`."""
        missing = [1] * (outputs.shape.rank - weight.shape.rank)
        weight = tf.reshape(weight, [*weight.shape, *missing])
        weight = tf.broadcast_to(weight, tf.shape(outputs))
        weight, values = (tf.cast(each, tf.float64) for each in (weight, outputs))
        values = tf.where(tf.equal(weight, 0), tf.zeros_like(values), values)  # may hold NaN
        return tf.stack([tf.reduce_sum(weight * values), tf.reduce_sum(weight)])

    def figures(self, sums: np.ndarray) -> tuple[float, ...]:
        """See `ddl.metrics.values.StateSums`."""
        total, weight = np.asarray(sums)
        return (float(total / weight) if weight else math.nan,)
